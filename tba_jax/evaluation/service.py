# SPDX-License-Identifier: Apache-2.0
"""EvaluationService: asynchronous evaluation of requested versions.

`request` and `poll` return at once. An evaluation is divided into shards. `step` evaluates one
shard; the threads of searchers call it between two chunks, each with weights on its own devices.
Shards can be leased to other processes, which may never complete them. Invariant: results come in
the order of the requests, and each is computed from all shards.
"""

import collections
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tba_jax.evaluation.evaluator import Evaluation, Evaluator
from tba_jax.flow.evaluation_shard import EvaluationShard, Lease


class Finished(NamedTuple):
    """Evaluation of the weights of `version`, started `start_s` seconds into the run."""

    version: int
    evaluation: Evaluation
    start_s: float


@dataclasses.dataclass
class _Version:
    """Evaluation of one version in progress.

    Attributes:
        left: shards that are not started.
        missing: number of unfinished shards.
        leased: shards that other processes evaluate.
    """

    version: int
    params: list[Any]
    start_s: float
    left: collections.deque[int]
    missing: int
    is_begun: bool = False
    leased: set[int] = dataclasses.field(default_factory=set)
    parts: list[EvaluationShard] = dataclasses.field(default_factory=list)

    def release_params(self) -> None:
        """Release the memory of the weights when this process has no shard left to start."""
        if not self.left and not self.leased:
            self.params = []


class EvaluationService:
    """Thread-safe service that evaluates requested versions."""

    def __init__(self, evaluator: Evaluator, clock: Callable[[], float]) -> None:
        self._evaluator = evaluator
        self._clock = clock
        self._lock = threading.Lock()
        self._merge_lock = threading.Lock()
        self._requests: collections.deque[_Version] = collections.deque()
        self._complete: collections.deque[_Version] = collections.deque()
        self._finished: collections.deque[Finished] = collections.deque()

    def request(self, version: int, params: Sequence[Any]) -> None:
        """Request the evaluation of a version.

        Args:
            params: weights on each set of devices; None for a set that does not evaluate.
        """
        numbers = collections.deque(range(self._evaluator.num_shards))
        with self._lock:
            self._requests.append(
                _Version(version, list(params), self._clock(), numbers, len(numbers))
            )
            self._pass_on()

    def step(self, device_set: int = 0) -> bool:
        """Evaluate the next shard, or compute metrics; return False if there was nothing to do."""
        with self._lock:
            version = next(
                (v for v in self._requests if v.left and v.params[device_set] is not None), None
            )
            if version is not None:
                if not version.is_begun:
                    version.start_s, version.is_begun = self._clock(), True
                number, params = version.left.popleft(), version.params[device_set]
                version.release_params()
        if version is None:
            return self._merge(blocking=False)
        part = self._evaluator.shard(params, number, device_set)
        with self._lock:
            version.parts.append(part)
            version.missing -= 1
            self._pass_on()
        self._merge(blocking=False)
        return True

    def lease(self) -> Lease | None:
        """Lease a shard to another process; return None if no shard is left.

        The shard is unfinished until `complete` or `withdraw` is called for the lease.
        """
        with self._lock:
            version = next((v for v in self._requests if v.left), None)
            if version is None:
                return None
            if not version.is_begun:
                version.start_s, version.is_begun = self._clock(), True
            number = version.left.popleft()
            version.leased.add(number)
            return Lease(version.version, number)

    def complete(self, lease: Lease, shard: EvaluationShard) -> bool:
        """Accept the result of a lease; return False if the lease was withdrawn before."""
        with self._lock:
            version = self._end_lease(lease)
            if version is None:
                return False
            version.parts.append(shard)
            version.missing -= 1
            version.release_params()
            self._pass_on()
            return True

    def withdraw(self, lease: Lease) -> None:
        """End a lease without a result, so that another searcher can evaluate the shard."""
        with self._lock:
            version = self._end_lease(lease)
            if version is not None:
                version.left.appendleft(lease.shard)

    def _end_lease(self, lease: Lease) -> _Version | None:
        """End an active lease and return its version; the caller holds the lock."""
        for version in self._requests:
            if version.version == lease.version and lease.shard in version.leased:
                version.leased.remove(lease.shard)
                return version
        return None

    @property
    def wanted(self) -> tuple[int, ...]:
        """Versions with unfinished shards."""
        with self._lock:
            return tuple(v.version for v in self._requests)

    def merge(self) -> None:
        """Compute the metrics of complete evaluations, on the calling thread."""
        self._merge(blocking=True)

    @property
    def newest_begun(self) -> int:
        """Newest version whose evaluation has started and not finished; -1 if there is none."""
        with self._lock:
            return max([v.version for v in self._requests if v.is_begun], default=-1)

    def forget(self, *, after: int) -> None:
        """Cancel the evaluations of versions above `after`."""
        with self._lock:
            kept = [v for v in self._requests if v.version <= after]
            self._requests = collections.deque(kept)

    def _pass_on(self) -> None:
        """Move complete evaluations to the merge queue, in order; the caller holds the lock."""
        while self._requests and not self._requests[0].missing:
            done = self._requests.popleft()
            self._complete.append(done)

    def _merge(self, *, blocking: bool) -> bool:
        """Compute metrics of complete evaluations; return whether there was one.

        One thread at a time computes metrics.
        """
        if not self._complete or not self._merge_lock.acquire(blocking):
            return False
        try:
            while self._complete:
                done = self._complete[0]
                evaluation = self._evaluator.merge(done.parts)
                self._finished.append(Finished(done.version, evaluation, done.start_s))
                self._complete.popleft()
        finally:
            self._merge_lock.release()
        return True

    @property
    def is_idle(self) -> bool:
        """Whether all requested evaluations are finished."""
        return not (self._requests or self._complete)

    def poll(self) -> list[Finished]:
        """Return the evaluations that finished since the last call."""
        return [self._finished.popleft() for _ in range(len(self._finished))]
