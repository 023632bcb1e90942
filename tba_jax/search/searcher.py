# SPDX-License-Identifier: Apache-2.0
"""Searcher: takes tickets from the owner, samples and grades their responses, returns the groups.

A searcher has no state of its own: a ticket that it loses is issued again, with the same prompt and
random key. `step` decodes and `grade` grades; with driver=async two threads call them, with
driver=sync one thread calls them in turn. Newer weights are loaded between chunks, or, if a
response must have one version, when the session is empty.
"""

import dataclasses
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tba_jax.devices.worker import StopFlag, Worker
from tba_jax.evaluation.evaluator import ShardEvaluator
from tba_jax.flow.tickets import (
    DecodeCounts,
    EvaluationResult,
    EvaluationTicket,
    Result,
    Ticket,
)
from tba_jax.remote.client import Client
from tba_jax.remote.owner import Owner
from tba_jax.rewards.scores import Grade, Grader
from tba_jax.search.groups import assemble, grade_groups, measure
from tba_jax.search.sampler import GroupSession, SampledGroup, Sampler
from tba_jax.search.start_data import GivenScorer
from tba_jax.search.state_values import advantages_of, values_of
from tba_jax.weights.publication import Published

POLL_S = 0.002
"""Sleep of a thread that has nothing to do."""
_STOP_S = 10.0  # time that threads get to end their current step


@dataclasses.dataclass(frozen=True)
class SearchParts:
    """Parts of a searcher.

    Attributes:
        index: ID of the searcher in the run.
        weights: returns the newest weights on the searcher's devices; None before the first
            publication.
        evaluated: version -> weights of a version under evaluation; None if they were dropped.
        given: scores given responses.
        swaps_in_flight: True: load newer weights between chunks; False: when the session is empty.
        waits_for_all: whether to end all begun episodes before others begin, in a fixed order, so
            that no duration of an environment changes a result.
    """

    index: int
    weights: Callable[[], Published | None]
    evaluated: Callable[[int], Published | None]
    sampler: Sampler
    grader: Grader
    evaluator: ShardEvaluator
    given: GivenScorer | None
    swaps_in_flight: bool = False
    waits_for_all: bool = False


class _Begun(NamedTuple):
    """A ticket in progress, with the version and time of its start."""

    ticket: Ticket
    version: int
    start_s: float


_Ended = tuple[_Begun, SampledGroup, float]
"""A ticket whose responses have ended, with its share of the session's decoding time."""


class Searcher:
    """One searcher; one thread calls `step`, one calls `grade`.

    Args:
        source: owner of the run's tickets, or client of an owner in another process.
    """

    def __init__(self, parts: SearchParts, source: Owner | Client) -> None:
        self.parts = parts
        self.index = parts.index
        self.source = source
        self._groups: GroupSession | None = None
        self._begun: dict[int, _Begun] = {}  # by ticket number
        self._ended: queue.SimpleQueue[_Ended] = queue.SimpleQueue()
        self._counted = DecodeCounts()
        size = parts.sampler.settings.samples_per_prompt
        self._num_at_once = -(-parts.sampler.settings.slots // size)  # tickets that fill the slots

    def workers(self, stop: StopFlag) -> tuple[Worker, Worker]:
        """Return two workers for this searcher: decoding and grading."""
        decoding = Worker(f"searcher-{self.index}", self.step, stop, idle_s=POLL_S)
        return decoding, Worker(f"grader-{self.index}", self.grade, stop, idle_s=POLL_S)

    def evaluate(self) -> bool:
        """Work on an evaluation shard; return False if there is none."""
        return self._evaluated(self.source.take(self.index, 0, -1))

    def _evaluated(self, work: Sequence[Ticket] | Sequence[EvaluationTicket]) -> bool:
        """Return whether this is an evaluation shard, and put its result if it is."""
        if not (work and isinstance(work[0], EvaluationTicket)):
            return False
        ticket = work[0]
        weights, shard = self.parts.evaluated(ticket.version), None
        if weights is not None:
            shard = self.parts.evaluator.evaluate(weights.params, ticket)
        self.source.put(self.index, [EvaluationResult(ticket.version, ticket.first, shard)])
        return True

    def step(self) -> bool:
        """Do one evaluation shard, or begin tickets and decode a chunk; False: nothing to do."""
        published = self.parts.weights()
        if published is None:
            return self.evaluate()
        if self._groups is None:
            self._groups = self.parts.sampler.open(published)
        groups, session = self._groups, self._groups.session
        is_newer = published.version > session.version
        is_draining = is_newer and not (self.parts.swaps_in_flight or session.is_idle)
        free = 0 if is_draining else self._free(groups)
        tickets = self.source.take(self.index, free, published.version)
        if self._evaluated(tickets):
            return True
        if not tickets and (session.is_idle or session.is_waiting):
            return False
        if is_newer and not is_draining:
            session.swap(published.params, published.version)
        for ticket in tickets:
            assert isinstance(ticket, Ticket), "evaluation shards come alone"
            begun = _Begun(ticket, session.version, time.monotonic())
            if ticket.responses:
                assert self.parts.given is not None, "the run has no start data"
                group = self.parts.given(published.params, ticket, published.version)
                self._ended.put((begun, group, 0.0))
            else:
                groups.submit(ticket.number, ticket.prompt)
                self._begun[ticket.number] = begun
        self._decode(groups)
        return True

    def _free(self, groups: GroupSession) -> int:
        """Return for how many tickets slots are free; 0 while many wait for slow grading."""
        if self._ended.qsize() >= 2 * self._num_at_once:
            return 0
        size = self.parts.sampler.settings.samples_per_prompt
        return max(0, -(-groups.session.room // size))

    def _decode(self, groups: GroupSession) -> None:
        """Decode one chunk, and queue finished tickets for grading."""
        ended = groups.run() if self.parts.waits_for_all else groups.step()
        spent = groups.session.statistics
        per_token = spent.decode_s / max(1, spent.tokens)
        for number, group in ended.items():
            decode_s = per_token * sum(y.num_sampled for y in group.episodes)
            self._ended.put((self._begun.pop(number), group, decode_s))

    def grade(self) -> bool:
        """Grade and return the finished tickets; return False if there are none."""
        num = min(self._num_at_once, self._ended.qsize())
        ended = [self._ended.get_nowait() for _ in range(num)]
        if ended:
            self.source.put(self.index, self._results(ended))
        return bool(ended)

    def _results(self, ended: Sequence[_Ended]) -> list[Result]:
        """Return the results of tickets, with rewards and advantages."""
        parts, groups = self.parts, [group for _, group, _ in ended]
        start_s = time.monotonic()
        grades = grade_groups(parts.grader, groups)
        advantages = [self._advantages(*each) for each in zip(groups, grades, strict=True)]
        end_s = time.monotonic()
        results = []
        for (begun, group, decode_s), own, of_tokens in zip(ended, grades, advantages, strict=True):
            number = begun.ticket.number
            made = assemble(group, own, searcher=parts.index, number=number, advantages=of_tokens)
            report = measure(group, own)._replace(
                ticket_s=end_s - begun.start_s,
                decode_s=decode_s,
                reward_s=(end_s - start_s) / len(ended),
            )
            if begun.ticket.responses:
                report = report._replace(tokens=0)
            results.append(Result(number, begun.version, made, report))
        return results

    def _advantages(self, group: SampledGroup, grades: Sequence[Grade]) -> list[np.ndarray] | None:
        """Return the advantages of each response's tokens; None if no values are estimated."""
        every = self.parts.sampler.state_tokens
        if not every:
            return None
        values = values_of(self.parts.grader, group.prompt, group.continuations)
        rewards = [grade.reward for grade in grades]
        return advantages_of([y.tokens for y in group.episodes], rewards, values, every)

    def decode_counts(self) -> DecodeCounts:
        """Return the counts of the decode session since the last call."""
        if self._groups is None:
            return DecodeCounts()
        statistics, before = self._groups.session.statistics, self._counted
        self._counted = DecodeCounts(*(getattr(statistics, n) for n in DecodeCounts._fields))
        return DecodeCounts(*(now - then for now, then in zip(self._counted, before, strict=True)))


def stop_workers(workers: Iterable[Worker], stop: StopFlag) -> None:
    """Stop workers; give them a short time to end their current step."""
    stop.set()
    deadline = time.monotonic() + _STOP_S
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
