# SPDX-License-Identifier: Apache-2.0
"""A trainer process that does not own the replay buffer: it trains on what the owner draws.

It runs the same loop as the owner, and receives plan and batch of every step. Publications, steps
and checkpoints are calls of all trainer processes. In a pod it also runs searchers, whose tickets
come from the owner's search server.
"""

import socket
import time
from collections.abc import Callable
from typing import Any

from tba_jax.devices.cluster import PeerError
from tba_jax.devices.worker import StopFlag, Worker
from tba_jax.flow.rounds import RoundReport
from tba_jax.remote.messages import RUN_ENDED
from tba_jax.remote.search_channel import RemoteSearchServer
from tba_jax.run import evaluations
from tba_jax.run.loop import loop
from tba_jax.run.peers import Follower
from tba_jax.run.run import Run
from tba_jax.run.search_process import (
    DELIVERY_S,
    STOP_S,
    PublishedWeights,
    make_search_process,
    search,
)

_CHECK_S = 0.05


def follow(run: Run, interrupted: Callable[[], bool]) -> None:
    """Train on what the owner draws, until the last step or an interruption.

    Raises:
        WorkerError: a searcher failed, or the owner does not respond; its cause says which.
    """
    link = run.link
    assert isinstance(link, Follower)
    failed, ended = StopFlag(), StopFlag()
    weights = PublishedWeights(run.search.transport, len(run.search.local))
    process = make_search_process(
        run.shared,
        run.search,
        weights,
        run.evaluator,
        run.clock,
        lambda: run.is_interrupted(interrupted),
    )
    host = f"process {run.cluster.number} on {socket.gethostname()}"
    server = RemoteSearchServer(link.channel)

    def work() -> bool:
        """Search until the owner says that the run has ended."""
        reason = search(process, server, host, run.logs.progress.note, ended)
        if reason and not reason.endswith(RUN_ENDED):
            raise PeerError(f"process {run.cluster.number} may not search: {reason}")
        ended.set()
        while not failed.wait(_CHECK_S):  # this worker has nothing else to do
            pass
        return True

    def deliver() -> bool:
        return run.search.transport.poll(DELIVERY_S)

    has_searchers = bool(run.search.local)
    role = ("search-process", work) if has_searchers else ("weight-poller", deliver)
    worker = Worker(*role, failed)
    link.check = failed.check
    try:
        worker.start()  # first: the owner publishes when all searchers have joined
        if run.config.driver == "async":
            run.trainer.publish()
        loop(run, FollowingSearch(run, weights, failed), interrupted)
        run.save()
        evaluations.evaluate_last(run)
        if has_searchers:
            weights.keep()
            while not ended.wait(_CHECK_S):  # searchers work on evaluation shards
                failed.check()
    finally:
        ended.set()
        failed.set()
        worker.join(STOP_S)


class FollowingSearch:
    """Searchers of `loop` in a process that does not own the buffer.

    Args:
        run: the connected parts.
        weights: of the searchers of this process.
        failed: set by a worker that fails.
    """

    def __init__(self, run: Run, weights: PublishedWeights, failed: StopFlag) -> None:
        self._run = run
        self._weights = weights
        self._failed = failed
        self.publishes_first = run.config.driver == "sync"
        self._newest_eval = run.evaluated.last_eval_step

    def begin(self, interrupted: Callable[[], bool]) -> list[RoundReport]:
        """Keep the weights of the first evaluation, as the owner requests it."""
        del interrupted
        if not self.publishes_first:
            self.merged(self._run.trainer.step_index)
        return []

    def check(self) -> None:
        self._failed.check()

    def may_publish(self) -> bool:
        return True

    def published(self, step: int, interrupted: Callable[[], bool]) -> None:
        """Deliver the weights to the searchers of this process."""
        del interrupted
        self._run.search.transport.poll()
        self._keep(step)

    def merge(self) -> list[RoundReport]:
        return []

    def merged(self, step: int) -> None:
        if not self.publishes_first:
            self._keep(step)

    def _keep(self, step: int) -> None:
        """Keep a version that will be evaluated."""
        if evaluations.is_due(self._run, step, self._newest_eval):
            self._newest_eval = step
            if self._run.search.local:
                self._weights.keep()

    def must_wait(self, step: int) -> bool:
        del step
        return False

    def wait(self) -> None:
        time.sleep(_CHECK_S)

    def no_batch(self) -> list[RoundReport]:
        return []  # the plan says that the run stops

    def stepped(self, values: dict[str, Any]) -> dict[str, Any]:
        del values
        return {}
