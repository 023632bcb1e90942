# SPDX-License-Identifier: Apache-2.0
"""Owner: tickets, evaluations and steps of a run, in the process that has the replay buffer.

Four methods: `take` tickets, `put` results, `beat`, and `step` for a plan with its batch. Searchers
of this process hold the object; every other process holds a `Client` with the same methods. A
searcher that exceeds the heartbeat timeout is lost: its open tickets are issued again, with the
same prompt and random key. The first result of a ticket counts; later ones are duplicates.

Which tickets may begin: with driver=sync, as many as the trainer allows, with its newest version;
with driver=async, those whose responses can still be drawn within `replay.max_staleness`.

Invariants: each ticket is merged once. A restored owner issues the tickets again that were open,
for any number of searchers (tests/remote/test_owner.py).
"""

import dataclasses
import heapq
import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tba_jax.flow.state import PartState
from tba_jax.flow.tickets import (
    DecodeCounts,
    EvaluationResult,
    Report,
    Result,
    Ticket,
    check_result,
)
from tba_jax.flow.trajectory import Prompt
from tba_jax.remote.channel import HEARTBEAT_S, Handler, Rewind, RunEnded
from tba_jax.remote.evaluation_queue import EvaluationQueue
from tba_jax.remote.messages import Plan, Request, Response, Work, decode, encode
from tba_jax.remote.steps import Steps
from tba_jax.replay.buffer import ReplayBuffer

# Size of the results that are not merged yet, above which no ticket begins.
_MOST_BYTES = 64 * 2**20
# Maximum rate of requests from all searchers without work, in requests per second; a single process
# waits at least _RETRY_S seconds between two requests.
_MAX_REQUESTS_PER_S = 400.0
_RETRY_S = 0.02
# Attributes of an owner that a checkpoint has.
_COUNTERS = (
    *("_next", "_num_begun", "num_given", "_num_generated", "_num_lost", "num_skipped"),
    "decoded_tokens",
)


class OwnerSettings(NamedTuple):
    """Settings of an owner.

    Attributes:
        identity: digest of the code and ID of the run, which other processes must have.
        num_searchers: number of searchers of the run.
        num_local: number of searchers of this process, the first ones.
        num_prompts: p, groups in a batch.
        share: m, mean share of fresh groups in a batch.
        max_staleness: bound on staleness in steps; 0: no bound.
        initial_fill: responses needed before the first step, besides given ones.
        samples_per_prompt: S, number of responses of a ticket.
    """

    identity: str
    num_searchers: int
    num_local: int
    num_prompts: int
    share: float
    max_staleness: int
    initial_fill: int
    samples_per_prompt: int


@dataclasses.dataclass
class _Searcher:
    """A searcher; `idle_s` includes `idle_before_s` of earlier processes."""

    host: str = ""
    state: str = "absent"  # or connected, or lost
    joins: int = 0
    idle_s: float = 0.0
    idle_before_s: float = 0.0
    last_message_s: float = 0.0
    place: str = ""  # of the process that runs the searcher


class Owner:
    """Thread-safe owner of the tickets of a run.

    Args:
        prompts: number -> (number, prompt) of the first usable prompt from this number on.
        steps: decisions on the training steps.
        given: tickets of given responses, numbered from 0; sampled tickets follow.
        log: receives one line for each join, loss and return of a searcher.

    Attributes:
        has_ended: whether the run has ended; later messages of searchers are refused.
        is_sampling: whether tickets may begin; False: evaluation shards only.
        version: newest complete policy version, for searchers of other processes.
        decoded_tokens: sampled tokens of all results.
        num_skipped: number of too long prompts that were left out, with repeats.
        num_given: number of tickets with given responses.
        num_merged: number of merged results of this process.
        remote_searchers: IDs of the searchers of other processes.
    """

    def __init__(
        self,
        settings: OwnerSettings,
        buffer: ReplayBuffer,
        prompts: Callable[[int], tuple[int, Prompt]],
        evaluations: EvaluationQueue,
        steps: Steps,
        *,
        given: Sequence[Ticket] = (),
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings, self.evaluations, self.steps = settings, evaluations, steps
        self.has_ended, self.is_sampling, self.version = False, True, -1
        self.decoded_tokens = self.num_skipped = self.num_merged = 0
        self.remote_searchers = range(settings.num_local, settings.num_searchers)
        self._buffer, self._prompts = buffer, prompts
        self._given, self.num_given = tuple(given), len(given)
        self._clock, self._log = clock, log
        self._lock = threading.RLock()
        self._searchers = [_Searcher() for _ in range(settings.num_searchers)]
        self._epoch, self._num_joins = uuid.uuid4().hex, 0
        self._answers: dict[str, tuple[int, bytes]] = {}  # place -> last request and its response
        self._stop_signals = False  # whether a process that only searches received one
        self._next = 0  # number of the next new ticket
        self._again: list[int] = []  # heap of numbers that were lost
        self._open: dict[int, int] = {}  # number of a ticket -> searcher
        self._results: dict[int, Result] = {}  # not merged yet, by number
        self._num_bytes = self._num_generated = self._num_lost = 0
        self._num_begun = 0  # sampled tickets
        self._allowed: tuple[int, int] | None = None  # tickets and version, with driver=sync
        self._most_each = 0  # open tickets of a searcher, with driver=sync
        self._step = self._num_fresh = 0
        self._decoded = DecodeCounts()
        self._num_searchers_lost = self._num_duplicates = 0

    # The four methods.

    def take(self, searcher: int, free: int, version: int) -> Work:
        """Return an evaluation shard for a searcher, or tickets to begin.

        Args:
            free: maximum number of tickets.
            version: version of the searcher's weights; -1: it has none.
        """
        if (shard := self.evaluations.take(searcher)) is not None:
            return [shard]
        with self._lock:
            if self._allowed is not None:  # the searchers share the tickets evenly
                free = min(free, self._most_each - len(self._open_of(searcher)))
            tickets: list[Ticket] = []
            while len(tickets) < free and (ticket := self._begin(version)) is not None:
                self._open[ticket.number] = searcher
                tickets.append(ticket)
            return tickets

    def put(self, searcher: int, results: Sequence[Result | EvaluationResult]) -> None:
        """Accept finished tickets and evaluation shards: all of them, or none.

        Raises:
            ValueError: a result is inconsistent, or its ticket was never issued.
        """
        finished = [each for each in results if isinstance(each, Result)]
        for result in finished:
            check_result(result)
        with self._lock:
            for result in finished:
                if result.number >= self._next:
                    raise ValueError(f"ticket {result.number} was not issued; take tickets first")
            for result in finished:
                self._accept(searcher, result)
        for each in results:
            if isinstance(each, EvaluationResult):
                self.evaluations.put(searcher, each)

    def beat(self, searcher: int, idle_s: float, decoded: DecodeCounts) -> None:
        """Record metrics of a searcher; a searcher that counted as lost is back.

        Args:
            idle_s: seconds without work since its process joined.
            decoded: counts of the decode session since the last call.
        """
        with self._lock:
            record, now = self._searchers[searcher], self._clock()
            record.idle_s = record.idle_before_s + idle_s
            self._decoded = self._decoded.plus(decoded)
            if searcher in self.remote_searchers:
                if record.state == "lost":
                    silent_s = now - record.last_message_s
                    self._log(
                        f"searcher {searcher} on {record.host} is back after {silent_s:.0f} s"
                    )
                record.last_message_s, record.state = now, "connected"

    def step(self, step: int, wants_stop: Callable[[], bool]) -> Plan:
        """Return plan and batch of a step; see `Steps.decide`."""
        return self.steps.decide(step, lambda: wants_stop() or self.wants_stop)

    # Tickets.

    def _open_of(self, searcher: int) -> list[int]:
        return [number for number, owner in self._open.items() if owner == searcher]

    def _begin(self, version: int) -> Ticket | None:
        """Return the next ticket; None if none may begin with weights of this version."""
        number, is_new = self._again[0] if self._again else self._next, not self._again
        is_given = number < self.num_given
        if not self.is_sampling or version < 0:
            return None
        if not is_given and not self._admits(version, is_new):
            return None
        if is_given:
            ticket = self._given[number]
        else:
            found, prompt = self._prompts(number)
            self.num_skipped += found - number
            number, ticket = found, Ticket(found, prompt)
        if not is_new:
            heapq.heappop(self._again)
            return ticket
        self._next = number + 1
        self._num_begun += not is_given
        return ticket

    def _admits(self, version: int, is_new: bool) -> bool:
        """Return whether a ticket of sampled responses may begin with weights of this version.

        The trainer uses groups in the order of their versions, m p fresh groups per step. So a
        ticket of version v begins at step t only while fewer than (v + bound + 1 - t) m p groups
        are open or unused (the rule of AReaL, arXiv 2505.24298, without replayed groups). A batch
        may consist of fresh groups only, so the limit is at least p groups.
        """
        if self._allowed is not None:
            total, wanted = self._allowed
            return version == wanted and (self._num_begun < total or not is_new)
        settings = self.settings
        if self._num_bytes >= _MOST_BYTES:
            return False
        if not settings.max_staleness:
            return True
        steps = version + settings.max_staleness + 1 - self._step
        if steps < 1:
            return False  # wait for newer weights
        least = settings.num_prompts
        if not self._step:
            fill = -(-settings.initial_fill // settings.samples_per_prompt)
            least = max(least, self.num_given + fill)
        limit = max(least, math.floor(settings.share * settings.num_prompts * steps))
        return self.num_under_way < limit

    def _accept(self, searcher: int, result: Result) -> None:
        number = result.number
        if number in self._again:  # its searcher was only slow
            self._again.remove(number)
            heapq.heapify(self._again)
            self._count_lost(number, -1)
        elif self._open.pop(number, None) is None:
            self._num_duplicates += 1
            return
        self._results[number] = result
        self._num_bytes += result.num_bytes
        self._num_generated += result.generated
        self.decoded_tokens += result.report.tokens

    def merge(self, step: int, most: int | None = None) -> list[Report]:
        """Move results into the buffer, in the order of their numbers, and check the ledger.

        Args:
            step: number of completed training steps.
            most: maximum number of results, for an exact lag; None: all.
        """
        with self._lock:
            numbers = sorted(self._results)[:most]
            results = [self._results.pop(number) for number in numbers]
            self._num_bytes -= sum(result.num_bytes for result in results)
            waiting, generated = self._num_waiting, self._num_generated
        if results:
            self._buffer.merge([result.group for result in results], step)
            self.num_merged += len(results)
        self._buffer.check_ledger(waiting, generated)
        self.note_step(step)
        return [result.report for result in results]

    @property
    def _num_waiting(self) -> int:
        return sum(result.generated for result in self._results.values())

    def note_step(self, step: int) -> None:
        """Set the number of completed steps, and count the groups that wait in the buffer."""
        num_fresh = self._buffer.num_fresh_groups
        with self._lock:
            self._step, self._num_fresh = step, num_fresh

    def allow(self, total: int, version: int) -> None:
        """Let searchers begin sampled tickets with this version only (driver=sync).

        Args:
            total: number of sampled tickets that may begin, from the beginning of the run.
        """
        with self._lock:
            self._allowed = total, version
            left = total - self._num_begun + len(self._again) + self.num_given_left
            self._most_each = max(1, -(-left // len(self._searchers)))

    @property
    def is_done(self) -> bool:
        """Whether all allowed and all given tickets have results (driver=sync)."""
        with self._lock:
            has_left = self._allowed is not None and self._num_begun < self._allowed[0]
            return not (has_left or self._again or self._open or self.num_given_left)

    @property
    def num_given_left(self) -> int:
        """Number of tickets with given responses that have no result yet."""
        with self._lock:
            begun = sum(n < self.num_given for n in (*self._again, *self._open))
            return max(0, self.num_given - self._next) + begun

    @property
    def is_filled(self) -> bool:
        """Whether the responses that the first step needs have results."""
        num_given = sum(len(each.responses) for each in self._given)
        num_sampled = self._num_generated - num_given
        return num_sampled >= self.settings.initial_fill and not self.num_given_left

    @property
    def num_under_way(self) -> int:
        """Number of groups that were begun and not drawn yet."""
        with self._lock:
            return len(self._open) + len(self._results) + self._num_fresh

    def ledger(self) -> dict[str, int]:
        """Return the numbers of responses: generated, waiting for a merge, and lost."""
        with self._lock:
            generated = self._num_generated + self._num_lost
            return {"generated": generated, "waiting": self._num_waiting, "lost": self._num_lost}

    # Searchers of other processes.

    def handlers(self) -> Mapping[str, Handler]:
        """Return the calls of other processes, by the name of their channel method."""
        return {
            "join": lambda data: encode(self.join(*decode(data, tuple))),
            "search": lambda data: self.answer(decode(data, Request)),
            "step": lambda data: self.steps.request(*decode(data, tuple)),
        }

    def join(self, searchers: Sequence[int], host: str, identity: str) -> str:
        """Return the place of a process for its requests, and let it run searchers.

        Open tickets of the previous processes of these searchers are lost.

        Args:
            searchers: IDs; (): the process only waits for the end of the run.
            host: name of the process and its machine, for log lines.
            identity: digest of the code and ID of the run in that process.

        Raises:
            RunEnded: the run has ended. ValueError: the process has other code.
        """
        with self._lock:
            if self.has_ended:
                raise RunEnded("the run has ended")
            if searchers and identity != self.settings.identity:
                raise ValueError(
                    f"its code and run are {identity}, wanted {self.settings.identity}. Start the "
                    "same command, with the same version of tba_jax, on every machine"
                )
            self._num_joins += 1
            place = f"{self._epoch}/{self._num_joins}"
            for searcher in searchers:
                self.lose(searcher)
                record = self._searchers[searcher]
                self._answers.pop(record.place, None)
                record.host, record.state, record.place = host, "connected", place
                record.last_message_s, record.idle_before_s = self._clock(), record.idle_s
                record.joins += 1
                verb = "joined again" if record.joins > 1 else "joined"
                self._log(f"searcher {searcher} on {host} {verb}")
            return place

    def answer(self, request: Request) -> bytes:
        """Respond to the searchers of another process: `put`, `beat` and `take` in one message.

        Raises:
            RunEnded: the run has ended. Rewind: the process joined an earlier owner.
            ValueError: a result is invalid, or another process runs a searcher now.
        """
        place = request.place

        def is_new() -> bool:  # else the response was lost on the way: send it again
            return self._answers.get(place, (-1, b""))[0] < request.number

        if self.has_ended:
            raise RunEnded("the run has ended")
        if not place.startswith(self._epoch):
            raise Rewind(
                "the trainer was restored from a checkpoint; responses that the checkpoint does "
                "not hold are sampled again"
            )
        for mail in request.mails:
            if (record := self._searchers[mail.searcher]).place != place:
                raise ValueError(
                    f"another process, on {record.host}, runs searcher {mail.searcher} now"
                )
        for mail in request.mails if is_new() else ():
            self.put(mail.searcher, mail.results)  # may take seconds; twice is harmless
        with self._lock:
            if is_new():
                self._stop_signals = self._stop_signals or request.wants_stop
                for mail in request.mails:
                    self.beat(mail.searcher, mail.idle_s, mail.decoded)
                work = tuple(
                    self.take(mail.searcher, mail.free, mail.version) if mail.free >= 0 else []
                    for mail in request.mails
                )
                retry_s = max(_RETRY_S, len(self._answers) / _MAX_REQUESTS_PER_S)
                response = Response(self.version, self.evaluations.versions, retry_s, work)
                self._answers[place] = request.number, encode(response)
            return self._answers[place][1]

    def lose_silent(self) -> bool:
        """Count searchers over the heartbeat timeout as lost; return whether any was lost."""
        with self._lock:
            now, found = self._clock(), False
            for searcher in self.remote_searchers:
                record = self._searchers[searcher]
                silent_s = now - record.last_message_s
                if record.state == "connected" and silent_s > HEARTBEAT_S:
                    self._log(
                        f"searcher {searcher} on {record.host} is lost: no message for "
                        f"{silent_s:.0f} s. Its {len(self._open_of(searcher))} open tickets are "
                        "issued again"
                    )
                    self.lose(searcher)
                    found = True
            return found

    def lose(self, searcher: int) -> None:
        """Issue the open tickets of a searcher again; its process has ended or is silent."""
        record = self._searchers[searcher]
        if record.state != "connected":
            return
        record.state = "lost"
        self._num_searchers_lost += 1
        for number in self._open_of(searcher):
            del self._open[number]
            heapq.heappush(self._again, number)
            self._count_lost(number, 1)
        self.evaluations.lose(searcher)

    def _count_lost(self, number: int, count: int) -> None:
        if number >= self.num_given:
            self._num_lost += count * self.settings.samples_per_prompt

    @property
    def wants_stop(self) -> bool:
        """Whether another process of the run received a stop signal."""
        return self._stop_signals or (self.steps.wants_stop)

    @property
    def absent(self) -> list[int]:
        """IDs of the searchers of other processes that no process runs."""
        return [i for i in self.remote_searchers if self._searchers[i].state != "connected"]

    def metrics(self) -> dict[str, float]:
        """Return metrics of the searchers of other processes by name."""
        with self._lock:
            connected = [each for each in self._searchers if each.state == "connected"]
            counts = {
                "hosts": len({each.host for each in connected}),
                "searchers": len(connected),
                "slots": len(self.remote_searchers),
                "joins": sum(each.joins for each in self._searchers),
                "searchers_lost": self._num_searchers_lost,
                "lost": self._num_lost // self.settings.samples_per_prompt,
                "duplicates": self._num_duplicates,
            }
        return {f"fleet/{name}": float(count) for name, count in counts.items()}

    @property
    def idle_s(self) -> list[float]:
        """Seconds without work of each searcher."""
        return [each.idle_s for each in self._searchers]

    def take_decode_counts(self) -> DecodeCounts:
        """Return the decode counts of all searchers since the last call."""
        with self._lock:
            counts, self._decoded = self._decoded, DecodeCounts()
            return counts

    # Checkpoints.

    def state(self) -> PartState:
        """Return the position in the data, the results that are not merged, and the counters."""
        with self._lock:
            results = tuple(self._results[number] for number in sorted(self._results))
            meta = {name: getattr(self, name) for name in _COUNTERS}
            meta |= {"open": sorted([*self._open, *self._again]), "idle_s": self.idle_s}
        return PartState({"results": np.frombuffer(encode(results), np.uint8)}, meta)

    def restore(self, state: PartState) -> None:
        """Continue from a saved `state`; tickets that were open are issued again."""
        results = decode(state.arrays["results"].tobytes())
        with self._lock:
            self._results = {result.number: result for result in results}
            self._num_bytes = sum(result.num_bytes for result in results)
            self._again, self._open = list(state.meta["open"]), {}
            for name in _COUNTERS:
                setattr(self, name, state.meta[name])
            for record, idle_s in zip(self._searchers, state.meta["idle_s"], strict=False):
                record.idle_s = record.idle_before_s = idle_s
