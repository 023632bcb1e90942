# SPDX-License-Identifier: Apache-2.0
"""EvaluationQueue: requested evaluations, of which searchers take shards.

Invariant: evaluations finish in the order of their requests, and each is computed once from all of
its shards (tests/remote/test_owner.py).
"""

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Sequence
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
    """Evaluation of the weights of `version`, requested `start_s` seconds into the run."""

    version: int
    evaluation: Any
    start_s: float


@dataclasses.dataclass
class _Evaluation:
    """An evaluation in progress; `missing` has the first prompts of its unfinished shards."""

    version: int
    left: deque[EvaluationTicket]  # shards that no searcher works on
    missing: set[int]
    start_s: float
    shards: list[EvaluationShard] = dataclasses.field(default_factory=list)


class EvaluationQueue:
    """Thread-safe queue of evaluations; each searcher works on one shard at a time.

    Args:
        clock: running time of the run in seconds.
    """

    def __init__(self, evaluator: Evaluations, clock: Callable[[], float]) -> None:
        self._evaluator = evaluator
        self._clock = clock
        self._lock, self._merging = threading.Lock(), threading.Lock()
        self._requested: deque[_Evaluation] = deque()
        self._taken: dict[int, EvaluationTicket] = {}  # by searcher
        self._finished: list[Finished] = []

    def request(self, version: int) -> None:
        """Request the evaluation of a version; its weights must stay available."""
        tickets = self._evaluator.tickets(version)
        missing = {ticket.first for ticket in tickets}
        with self._lock:
            self._requested.append(_Evaluation(version, deque(tickets), missing, self._clock()))

    def take(self, searcher: int) -> EvaluationTicket | None:
        """Return the shard that this searcher must work on; None if there is none."""
        with self._lock:
            if searcher not in self._taken:
                left = next((each.left for each in self._requested if each.left), None)
                if left is None:
                    return None
                self._taken[searcher] = left.popleft()
            return self._taken[searcher]

    def put(self, searcher: int, result: EvaluationResult) -> None:
        """Accept the result of a shard; another searcher gets a shard without weights."""
        version, first, shard = result
        with self._lock:
            found = (x for x in self._requested if x.version == version and first in x.missing)
            evaluation, taken = next(found, None), self._taken.get(searcher)
            if taken is not None and taken[:2] == (version, first):
                del self._taken[searcher]
                if shard is None and evaluation is not None:
                    evaluation.left.append(taken)
            if shard is None or evaluation is None:
                return  # no weights, or another searcher was faster
            evaluation.missing.remove(first)
            evaluation.shards.append(shard)
            evaluation.left = deque(x for x in evaluation.left if x.first != first)
        self._merge()

    def lose(self, searcher: int) -> None:
        """Let another searcher work on the shard of this one."""
        with self._lock:
            ticket = self._taken.pop(searcher, None)
            if ticket is None:
                return
            for each in self._requested:
                if each.version == ticket.version and ticket.first in each.missing:
                    each.left.appendleft(ticket)
                    return

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
                    self._finished.append(Finished(first.version, evaluation, first.start_s))
                    self._requested.popleft()

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
            kept = [x for x in self._requested if x.shards or len(x.left) < len(x.missing)]
            self._requested = deque(kept)
