# SPDX-License-Identifier: Apache-2.0
"""EvaluationService: asked for a version, it has the result some time later.

Whoever asks does not wait: `request` and `poll` return at once. The work is divided into parts, and
`step` does one: workers call it (the threads of the searchers, between two chunks), each with the
weights that it has on its own devices. Parts can be lent to whoever has the weights elsewhere and
may never come back. With several hosts each does its share of the parts, and
the shares of a version travel together when all hosts have done theirs; who decides that is not
known here, nor who decides what is evaluated or what becomes of a result. Invariant: results come
in the order in which versions were asked for, each made of all parts.
"""

import collections
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tba_jax.evaluation.evaluator import Evaluation, Evaluator
from tba_jax.flow.evaluation_shard import EvaluationShard, Lease


class Finished(NamedTuple):
    """An evaluation of the weights of `version`, begun `start_s` seconds into the run."""

    version: int
    evaluation: Evaluation
    start_s: float


@dataclasses.dataclass
class _Version:
    """A version under evaluation: `left` parts are to be begun, `missing` to be done."""

    version: int
    params: list[Any]
    start_s: float
    left: collections.deque[int]
    missing: int
    is_begun: bool = False
    leased: set[int] = dataclasses.field(default_factory=set)
    parts: list[EvaluationShard] = dataclasses.field(default_factory=list)

    def forget_params(self) -> None:
        """Once nobody here can begin another part: the devices need the room."""
        if not self.left and not self.leased:
            self.params = []


class EvaluationService:
    """Evaluations by request; safe to share between threads.

    Args:
        evaluator: does parts, and makes figures of them.
        clock: seconds since the run began.
        is_divided: whether `evaluate` too goes part by part, for figures that are the same.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        clock: Callable[[], float],
        *,
        is_divided: bool = True,
    ) -> None:
        self._evaluator = evaluator
        self._clock = clock
        self._is_divided = is_divided
        self._lock = threading.Lock()
        self._merge_lock = threading.Lock()
        self._requests: collections.deque[_Version] = collections.deque()
        self._complete: collections.deque[_Version] = collections.deque()
        self._finished: collections.deque[Finished] = collections.deque()

    def evaluate(self, version: int, params: Any) -> Finished:
        """Evaluate all of it on the calling thread, whatever else was requested.

        Args:
            version: of the weights.
            params: on the devices of the first station.
        """
        start, evaluator = self._clock(), self._evaluator
        if not self._is_divided:
            return Finished(version, evaluator.run(params), start)
        parts = [evaluator.part(params, number) for number in range(evaluator.num_parts)]
        return Finished(version, evaluator.merge(parts), start)

    def request(self, version: int, params: Sequence[Any]) -> None:
        """Ask for an evaluation of these weights.

        Args:
            version: of the weights.
            params: by station; None where they are not: that one takes no part.
        """
        numbers = collections.deque(range(self._evaluator.num_parts))
        with self._lock:
            self._requests.append(
                _Version(version, list(params), self._clock(), numbers, len(numbers))
            )
            self._pass_on()

    def step(self, station: int = 0) -> bool:
        """Do the next part, or make figures of parts; False when there is nothing for it to do.

        Args:
            station: of the evaluator, on whose devices it is done.
        """
        with self._lock:
            version = next(
                (v for v in self._requests if v.left and v.params[station] is not None), None
            )
            if version is not None:
                if not version.is_begun:
                    version.start_s, version.is_begun = self._clock(), True
                number, params = version.left.popleft(), version.params[station]
                version.forget_params()
        if version is None:
            return self._merge(blocking=False)
        part = self._evaluator.part(params, number, station)
        with self._lock:
            version.parts.append(part)
            version.missing -= 1
            self._pass_on()
        self._merge(blocking=False)
        return True

    def lease(self) -> Lease | None:
        """Return a shard for another process to work on; None where none is left.

        The shard is missing until `complete` or `withdraw` is called for the lease.
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
        """Accept a leased shard; False where the lease was withdrawn before."""
        with self._lock:
            version = self._end_lease(lease)
            if version is None:
                return False
            version.parts.append(shard)
            version.missing -= 1
            version.forget_params()
            self._pass_on()
            return True

    def withdraw(self, lease: Lease) -> None:
        """End a lease that was not completed, so that another searcher gets the shard."""
        with self._lock:
            version = self._end_lease(lease)
            if version is not None:
                version.left.appendleft(lease.shard)

    def _end_lease(self, lease: Lease) -> _Version | None:
        """Return the version of an active lease and end the lease; the caller holds the lock."""
        for version in self._requests:
            if version.version == lease.version and lease.shard in version.leased:
                version.leased.remove(lease.shard)
                return version
        return None

    @property
    def wanted(self) -> tuple[int, ...]:
        """Versions of which parts are missing."""
        with self._lock:
            return tuple(v.version for v in self._requests)

    def merge(self) -> None:
        """Make figures of what is complete, on the calling thread."""
        self._merge(blocking=True)

    @property
    def newest_begun(self) -> int:
        """Newest version that is begun and not finished, -1 for none."""
        with self._lock:
            return max([v.version for v in self._requests if v.is_begun], default=-1)

    def forget(self, *, after: int) -> None:
        """Requests of versions after this one are not wanted any more."""
        with self._lock:
            kept = [v for v in self._requests if v.version <= after]
            self._requests = collections.deque(kept)

    def _pass_on(self) -> None:
        """What is done leaves the requests, in their order; the lock is held."""
        while self._requests and not self._requests[0].missing:
            done = self._requests.popleft()
            self._complete.append(done)

    def _merge(self, *, blocking: bool) -> bool:
        """Figures of what is complete; whether there was any. One thread at a time."""
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
        """Nothing of what was requested here is still to be done."""
        return not (self._requests or self._complete)

    def poll(self) -> list[Finished]:
        """What was requested and is done, each once."""
        return [self._finished.popleft() for _ in range(len(self._finished))]
