# SPDX-License-Identifier: Apache-2.0
"""EvaluationQueue: requested evaluations, of which searchers take shards.

Invariant: evaluations finish in the order of their requests, and each is computed once from all of
its shards (tests/remote/test_owner.py).
"""

import threading
from typing import Any

from tba_jax.flow.tickets import EvaluationResult, EvaluationShard, EvaluationTicket


class EvaluationQueue:
    """Thread-safe queue of evaluations; each searcher works on one shard at a time.

    Args:
        evaluator: an `evaluation.Evaluator`, which divides an evaluation and merges its shards.
    """

    def __init__(self, evaluator: Any) -> None:
        self._evaluator = evaluator
        self._lock, self._merging = threading.Lock(), threading.Lock()
        # By version, in the order of the requests: missing tickets by first prompt, and shards.
        self._open: dict[int, tuple[dict[int, EvaluationTicket], list[EvaluationShard]]] = {}
        self._taken: dict[int, tuple[int, int]] = {}  # searcher -> version and first prompt
        self._finished: list[tuple[int, Any]] = []

    def request(self, version: int) -> None:
        """Request the evaluation of a version; its weights must stay available."""
        missing = {ticket.first: ticket for ticket in self._evaluator.tickets(version)}
        with self._lock:
            self._open.setdefault(version, (missing, []))

    def take(self, searcher: int) -> EvaluationTicket | None:
        """Return a shard for a searcher; None if there is none, or the searcher has one."""
        with self._lock:
            busy = set(self._taken.values())
            every = (ticket for missing, _ in self._open.values() for ticket in missing.values())
            free = next((x for x in every if (x.version, x.first) not in busy), None)
            if free is None or searcher in self._taken:
                return None
            self._taken[searcher] = free.version, free.first
            return free

    def put(self, searcher: int, result: EvaluationResult) -> None:
        """Accept the result of a shard; without a result, another searcher may take the shard."""
        version, first, shard = result
        with self._lock:
            if self._taken.get(searcher) == (version, first):
                del self._taken[searcher]
            missing, shards = self._open.get(version, ({}, []))
            ticket = missing.pop(first, None)
            if ticket is not None and shard is not None:  # else another searcher was faster
                shards.append(shard)
            elif ticket is not None:  # no weights: the shard goes to the end
                missing[first] = ticket
        with self._merging:
            while self.versions and not self._open[oldest := self.versions[0]][0]:
                evaluation = self._evaluator.merge(self._open[oldest][1])  # may take seconds
                with self._lock:
                    self._finished.append((oldest, evaluation))
                    del self._open[oldest]

    def lose(self, searcher: int) -> None:
        """Let another searcher work on the shard of this one."""
        with self._lock:
            self._taken.pop(searcher, None)

    @property
    def versions(self) -> tuple[int, ...]:
        """Policy versions under evaluation, whose weights are still needed."""
        with self._lock:
            return tuple(self._open)

    @property
    def num_missing(self) -> int:
        """Number of shards without a result."""
        with self._lock:
            return sum(len(missing) for missing, _ in self._open.values())

    def poll(self) -> list[tuple[int, Any]]:
        """Return version and result of the evaluations that finished since the last call."""
        with self._lock:
            found, self._finished = self._finished, []
            return found
