# SPDX-License-Identifier: Apache-2.0
"""Search without rounds: a continuous decode session; groups are committed as they end.

A prompt is taken when decode slots are free and admission allows it. It becomes a ticket with its
own number. When its last response has ended, another thread grades and commits the ticket. A ticket
is a transaction, like a round: after a resume, uncommitted tickets are sampled again from the same
prompts and random numbers. Newer weights are loaded between chunks, or, if a response must have one
version, when the session is empty.
"""

import dataclasses
import queue
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from tba_jax.decoding.requests import Statistics
from tba_jax.flow.rounds import NO_COUNTS, DecodeCounts, PhaseTimes, RoundCommit, RoundReport
from tba_jax.flow.trajectory import Prompt
from tba_jax.search.groups import measure
from tba_jax.search.sampler import GroupSession, SampledGroup
from tba_jax.search.searcher import Searcher
from tba_jax.weights.transport import Published


class Ticket(NamedTuple):
    """A prompt that was taken from the stream.

    Attributes:
        number: number of the ticket, counted from 0 in the order of the stream over the whole run.
        prompt_state: state of the stream after this prompt.
    """

    number: int
    prompt: Prompt
    prompt_state: Mapping[str, Any]


class _Begun(NamedTuple):
    """A ticket in progress, with the version and time of its admission."""

    ticket: Ticket
    version: int
    start_s: float


class Finished(NamedTuple):
    """A ticket whose responses have ended.

    Attributes:
        version: version of the weights with which the ticket began.
        start_s: time of the ticket's admission.
        decode_s: the ticket's share of the session's time.
    """

    ticket: Ticket
    version: int
    start_s: float
    group: SampledGroup
    decode_s: float


class SearcherAdmission(Protocol):
    """The methods of `Admission` that a searcher calls."""

    def admit(self, searcher: int, version: int) -> bool:
        """Return whether this searcher may begin a prompt; if so, count the prompt as open."""
        ...

    def commit(self, searcher: int, version: int) -> None:
        """Count a group as committed that was admitted with this version."""
        ...


class ContinuousSearch:
    """Search concurrent with a trainer: one thread calls `step` to decode, one `grade` to commit.

    Args:
        searcher: parts and counters of the searcher; its rounds of given responses come first.
        swaps_in_flight: True: load newer weights between chunks; False: when the session is empty.
    """

    def __init__(
        self,
        searcher: Searcher,
        admission: SearcherAdmission,
        *,
        swaps_in_flight: bool,
    ) -> None:
        self.searcher = searcher
        self._parts = searcher.parts
        self._settings = searcher.parts.sampler.settings
        self._admission = admission
        self._swaps_in_flight = swaps_in_flight
        self._groups: GroupSession | None = None
        self._begun: dict[int, _Begun] = {}  # by the session's number of the group
        self._finished: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        self._next_number = -1  # before the first prompt was taken
        self._reported = Statistics()

    def step(self) -> bool:
        """Admit prompts and decode one chunk; return False if there is nothing to decode."""
        if self.searcher.num_given_rounds_left:
            return self.searcher.step()
        published = self._parts.weights()
        if published is None:
            return False
        groups = self._opened(published)
        session = groups.session
        is_newer = published.version > session.version
        is_draining = is_newer and not (self._swaps_in_flight or session.is_idle)
        tickets = [] if is_draining else self._admit(groups, published.version)
        if not tickets and (session.is_idle or session.is_waiting):
            return False
        if is_newer and not is_draining:
            session.swap(published.params, published.version)
        for ticket in tickets:
            (number,) = groups.submit([ticket.prompt], ticket.number)
            self._begun[number] = _Begun(ticket, session.version, self._parts.clock())
        self._decode(groups)
        return True

    def grade(self) -> bool:
        """Grade and commit up to `prompts_per_round` finished tickets; return False without any."""
        finished: list[Finished] = []
        while len(finished) < self._settings.prompts_per_round:
            try:
                finished.append(self._finished.get_nowait())
            except queue.Empty:
                break
        if finished:
            self._commit(finished)
        return bool(finished)

    @property
    def room(self) -> int:
        """Number of prompts for which slots are free now."""
        size, groups = self._settings.samples_per_prompt, self._groups
        if groups is None:
            return -(-self._settings.slots // size)
        return -(-max(0, groups.session.room) // size)

    def decode_counts(self) -> DecodeCounts:
        """Return the counts since the last call."""
        if self._groups is None:
            return NO_COUNTS
        now, before = dataclasses.replace(self._groups.session.statistics), self._reported
        self._reported = now
        return DecodeCounts(*(getattr(now, x) - getattr(before, x) for x in DecodeCounts._fields))

    def _opened(self, published: Published) -> GroupSession:
        if self._groups is None:
            self._groups = self._parts.sampler.open(published)
        return self._groups

    def _admit(self, groups: GroupSession, version: int) -> list[Ticket]:
        """Return tickets for the free slots, admitted with weights of this version."""
        session = groups.session
        tickets: list[Ticket] = []
        size = self._settings.samples_per_prompt
        # Limit the tickets that wait for grading, because grading may be slow.
        most = 2 * -(-session.num_slots // size)
        while (
            session.room > len(tickets) * size
            and self._finished.qsize() < most
            and self._parts.outbox.has_room()
            and self._admission.admit(self.searcher.index, version)
        ):
            tickets.append(self._take())
        return tickets

    def _take(self) -> Ticket:
        """Return the next uncommitted prompt of the stream."""
        if self._next_number < 0:
            self._next_number, _ = self._parts.outbox.committed
        while True:
            number = self._next_number
            (prompt,) = self._parts.stream.take(1)
            self._next_number += 1
            if not self._parts.outbox.is_committed(number):
                return Ticket(number, prompt, self._parts.stream.state())

    def _decode(self, groups: GroupSession) -> None:
        """Decode one chunk, and queue finished tickets for grading."""
        for number, group in groups.step().items():
            begun = self._begun.pop(number)
            spent = groups.session.statistics
            per_token = (spent.chunk_s + spent.prefill_s) / max(1, spent.tokens)
            decode_s = per_token * sum(y.num_sampled for y in group.episodes)
            self._finished.put(Finished(*begun, group, decode_s))

    def _commit(self, finished: Sequence[Finished]) -> None:
        """Grade these tickets and commit each of them separately."""
        parts = self._parts
        sampled = [f.group for f in finished]
        groups, grades, reward_s, reference_s = parts.finish(
            sampled, [f.ticket.number for f in finished]
        )
        end_s = parts.clock()
        start = 0
        for f, group in zip(finished, groups, strict=True):
            episodes = f.group.episodes
            own = grades.between(start, start + len(episodes))
            start += len(episodes)
            num_tokens = sum(y.num_sampled for y in episodes)
            share = 1 / len(finished)
            times = PhaseTimes(f.start_s, end_s, f.decode_s, reward_s * share, reference_s * share)
            parts.outbox.put(
                RoundCommit(
                    searcher=self.searcher.index,
                    round=f.ticket.number,
                    version=f.version,
                    groups=(group,),
                    prompt_state=f.ticket.prompt_state,
                    generated=len(episodes),
                    report=RoundReport(measure([f.group], own, num_tokens), times),
                )
            )
            self.searcher.decoded_tokens += num_tokens
            self._admission.commit(self.searcher.index, f.version)


class RoundQuota(SearcherAdmission, Protocol):
    """Admission of rounds; its length is the number of rounds that may start now."""

    def __len__(self) -> int: ...


class RoundSearch:
    """A searcher whose tickets are whole rounds, for driver=sync; used like `ContinuousSearch`."""

    def __init__(self, searcher: Searcher, quota: RoundQuota) -> None:
        self._searcher = searcher
        self._quota = quota
        self._is_busy = False

    def step(self) -> bool:
        """Do the next round if it is admitted."""
        if not len(self._quota):
            return False
        self._is_busy = True
        try:
            done = self._searcher.step()
            if done:
                self._quota.admit(self._searcher.index, -1)
            return done
        finally:
            self._is_busy = False

    def grade(self) -> bool:
        """Return False: `step` grades its round."""
        return False

    @property
    def room(self) -> int:
        """Number of rounds that could start now."""
        return 0 if self._is_busy else 1

    def decode_counts(self) -> DecodeCounts:
        """Return zeros: the use of slots is not measured for rounds."""
        return NO_COUNTS
