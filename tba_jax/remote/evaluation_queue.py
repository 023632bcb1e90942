# SPDX-License-Identifier: Apache-2.0
"""EvaluationQueue: requested evaluations, of which searchers take shards.

Invariant: evaluations finish in the order of their requests, and each is computed once from all of
its shards (tests/remote/test_owner.py).
"""

import dataclasses
import threading
from typing import Any, NamedTuple

from tba_jax.flow.tickets import EvaluationResult, EvaluationShard, EvaluationTicket


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
    """Thread-safe queue of evaluations; each searcher works on one shard at a time.

    Args:
        evaluator: an `evaluation.Evaluator`, which divides an evaluation and merges its shards.
    """

    def __init__(self, evaluator: Any) -> None:
        self._evaluator = evaluator
        self._lock, self._merging = threading.Lock(), threading.Lock()
        self._requested: list[_Evaluation] = []
        self._taken: dict[int, tuple[int, int]] = {}  # searcher -> version and first prompt
        self._finished: list[Finished] = []

    def request(self, version: int) -> None:
        """Request the evaluation of a version; its weights must stay available."""
        missing = {ticket.first: ticket for ticket in self._evaluator.tickets(version)}
        with self._lock:
            self._requested.append(_Evaluation(version, missing))

    def take(self, searcher: int) -> EvaluationTicket | None:
        """Return a shard for a searcher; None if there is none, or the searcher has one."""
        with self._lock:
            busy = set(self._taken.values())
            for evaluation in self._requested if searcher not in self._taken else ():
                for first, ticket in evaluation.missing.items():
                    if (evaluation.version, first) not in busy:
                        self._taken[searcher] = evaluation.version, first
                        return ticket
            return None

    def put(self, searcher: int, result: EvaluationResult) -> None:
        """Accept the result of a shard; without a result, another searcher may take the shard."""
        version, first, shard = result
        with self._lock:
            if self._taken.get(searcher) == (version, first):
                del self._taken[searcher]
            for evaluation in self._requested:
                if evaluation.version == version and first in evaluation.missing:
                    ticket = evaluation.missing.pop(first)
                    if shard is not None:
                        evaluation.shards.append(shard)
                    else:  # no weights: the shard goes to the end
                        evaluation.missing[first] = ticket
                    break  # else another searcher was faster
        with self._merging:
            while self._requested and not self._requested[0].missing:
                first_one = self._requested[0]
                evaluation = self._evaluator.merge(first_one.shards)  # may take seconds
                with self._lock:
                    self._finished.append(Finished(first_one.version, evaluation))
                    self._requested.remove(first_one)

    def lose(self, searcher: int) -> None:
        """Let another searcher work on the shard of this one."""
        with self._lock:
            self._taken.pop(searcher, None)

    @property
    def versions(self) -> tuple[int, ...]:
        """Policy versions under evaluation, whose weights are still needed."""
        with self._lock:
            return tuple(each.version for each in self._requested)

    @property
    def num_missing(self) -> int:
        """Number of shards without a result."""
        with self._lock:
            return sum(len(each.missing) for each in self._requested)

    def poll(self) -> list[Finished]:
        """Return the evaluations that finished since the last call."""
        with self._lock:
            found, self._finished = self._finished, []
            return found

    def forget_unbegun(self) -> None:
        """Cancel the evaluations of which no shard has been taken."""
        with self._lock:
            begun = {version for version, _ in self._taken.values()}
            self._requested = [x for x in self._requested if x.shards or x.version in begun]
