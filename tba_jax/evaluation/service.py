# SPDX-License-Identifier: Apache-2.0
"""EvaluationService: asked for a version, it has the result some time later.

Whoever asks does not wait: `request` and `poll` return at once. `step` does the work and belongs to
a worker (today the thread of a searcher, which has the weights on its devices, between two of its
rounds); a driver of one thread calls `evaluate`. It does not know who decides what is evaluated,
nor what becomes of a result. Invariant: versions are evaluated one at a time, in the order in which
they were asked for.
"""

import queue
from collections.abc import Callable
from typing import Any, NamedTuple

from tba_jax.evaluation.evaluator import Evaluation


class Finished(NamedTuple):
    """An evaluation of the weights of `version`, begun `start_s` seconds into the run."""

    version: int
    evaluation: Evaluation
    start_s: float


class EvaluationService:
    """Evaluations by request.

    Args:
        evaluate: weights in the decoder's layout -> figures (`Evaluator.run`).
        clock: seconds since the run began.
    """

    def __init__(self, evaluate: Callable[[Any], Evaluation], clock: Callable[[], float]) -> None:
        self._evaluate = evaluate
        self._clock = clock
        self._requests: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[Finished] = queue.SimpleQueue()

    def evaluate(self, version: int, params: Any) -> Finished:
        """Evaluate on the calling thread, whatever else was requested."""
        start = self._clock()
        return Finished(version, self._evaluate(params), start)

    def request(self, version: int, params: Any) -> None:
        """Ask for an evaluation of these weights."""
        self._requests.put((version, params))

    def step(self) -> bool:
        """Do what was requested first; False when nothing is."""
        try:
            version, params = self._requests.get_nowait()
        except queue.Empty:
            return False
        self._finished.put(self.evaluate(version, params))
        return True

    def poll(self) -> list[Finished]:
        """What was requested and is done, each once."""
        return [self._finished.get_nowait() for _ in range(self._finished.qsize())]
