# SPDX-License-Identifier: Apache-2.0
"""EvaluationQueue: requested evaluations, of which searchers take shards.

Invariant: evaluations finish in the order of their requests, and each is computed once from all of
its shards (tests/remote/test_owner.py).
"""

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from tba_jax.flow.tickets import EvaluationResult, EvaluationShard, EvaluationTicket


class Evaluations(Protocol):
    """Division of an evaluation into shards, and its metrics; `evaluation.Evaluator`."""

    def tickets(self, version: int) -> list[EvaluationTicket]:
        """Return the shards of an evaluation."""
        ...

    def merge(self, shards: Sequence[EvaluationShard]) -> Any:
        """Return the result of an evaluation, from all its shards in any order."""
        ...


class Finished(NamedTuple):
    """Evaluation of the weights of `version`."""

    version: int
    evaluation: Any


@dataclasses.dataclass
class _Evaluation:
    """An evaluation in progress; the shards without a result, by the number of their prompts."""

    version: int
    missing: dict[int, EvaluationTicket]
    shards: list[EvaluationShard] = dataclasses.field(default_factory=list)


class EvaluationQueue:
    """Thread-safe queue of evaluations; each searcher works on one shard at a time."""

    def __init__(self, evaluator: Evaluations) -> None:
        self._evaluator = evaluator
        self._lock, self._merging = threading.Lock(), threading.Lock()
        self._requested: list[_Evaluation] = []
        self._taken: dict[int, EvaluationTicket] = {}  # by searcher
        self._finished: list[Finished] = []

    def request(self, version: int) -> None:
        """Request the evaluation of a version; its weights must stay available."""
        missing = {ticket.first: ticket for ticket in self._evaluator.tickets(version)}
        with self._lock:
            self._requested.append(_Evaluation(version, missing))

    def take(self, searcher: int) -> EvaluationTicket | None:
        """Return the shard that this searcher must work on; None if there is none."""
        with self._lock:
            if searcher not in self._taken:
                busy = {ticket[:2] for ticket in self._taken.values()}
                left = (
                    ticket
                    for each in self._requested
                    for ticket in each.missing.values()
                    if ticket[:2] not in busy
                )
                if (ticket := next(left, None)) is None:
                    return None
                self._taken[searcher] = ticket
            return self._taken[searcher]

    def put(self, searcher: int, result: EvaluationResult) -> None:
        """Accept the result of a shard; without a result, another searcher may take the shard."""
        version, first, shard = result
        with self._lock:
            taken = self._taken.get(searcher)
            if taken is not None and taken[:2] == (version, first):
                del self._taken[searcher]
            found = (x for x in self._requested if x.version == version and first in x.missing)
            evaluation = next(found, None)
            if evaluation is None:
                return  # another searcher was faster
            ticket = evaluation.missing.pop(first)
            if shard is None:  # no weights: the shard goes to the end
                evaluation.missing[first] = ticket
                return
            evaluation.shards.append(shard)
        self._merge()

    def lose(self, searcher: int) -> None:
        """Let another searcher work on the shard of this one."""
        with self._lock:
            self._taken.pop(searcher, None)

    def _merge(self) -> None:
        """Compute the metrics of complete evaluations, on the calling thread."""
        with self._merging:
            while True:
                with self._lock:
                    first = self._requested[0] if self._requested else None
                if first is None or first.missing:
                    return
                evaluation = self._evaluator.merge(first.shards)
                with self._lock:
                    self._finished.append(Finished(first.version, evaluation))
                    self._requested.remove(first)

    @property
    def versions(self) -> tuple[int, ...]:
        """Policy versions under evaluation, whose weights are still needed."""
        with self._lock:
            return tuple(each.version for each in self._requested)

    def poll(self) -> list[Finished]:
        """Return the evaluations that finished since the last call."""
        with self._lock:
            found, self._finished = self._finished, []
            return found

    def forget_unbegun(self) -> None:
        """Cancel the evaluations of which no shard has been taken."""
        with self._lock:
            begun = {ticket.version for ticket in self._taken.values()}
            self._requested = [x for x in self._requested if x.shards or x.version in begun]
