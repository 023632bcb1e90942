# SPDX-License-Identifier: Apache-2.0
"""Other processes of a run while a driver works: their searchers, and trainers that follow.

`SearchService` is the search server in the process that owns the buffer. `follow` is the driver of
a trainer process that does not own it.
Invariant: no searcher joins before the run is restored, nor after the run has ended
(tests/integration/test_fleet.py).
"""

import contextlib
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tba_jax.devices.cluster import PeerError
from tba_jax.devices.placement import MODES
from tba_jax.devices.worker import StopFlag, Worker
from tba_jax.flow.rounds import RoundReport
from tba_jax.remote.messages import RUN_ENDED
from tba_jax.remote.search_channel import RemoteSearchServer
from tba_jax.remote.search_server import SearchServer
from tba_jax.remote.searcher_table import Listeners, ServerSettings, TicketAdmission
from tba_jax.run import evaluations
from tba_jax.run.loop import loop
from tba_jax.run.peers import Follower, Owner
from tba_jax.run.run import Run
from tba_jax.run.search_process import (
    DELIVERY_S,
    POLL_S,
    STOP_S,
    PublishedWeights,
    SearchProcess,
    search,
)
from tba_jax.weights.merged_adapters import MergingTransport

_WAIT_S = 0.02  # between two checks whether searchers have joined


_CHECK_S = 0.05


class SearchService:
    """The searchers of other processes, as a driver sees them.

    Args:
        run: the connected parts.
        owner: where the server listens.
        admission: decides how many tickets may be open.

    Attributes:
        server: the search server.
    """

    def __init__(self, run: Run, owner: Owner, admission: TicketAdmission) -> None:
        self._run = run
        self._owner = owner
        remote = run.search.remote
        self._searchers = {s.index: s for s in remote}
        self._before = {s.index: (s.idle_s, s.decoded_tokens) for s in remote}
        self.server = self._make_server(admission)
        run.sections["fleet"] = lambda: {
            **{name.removeprefix("fleet/"): value for name, value in self.metrics().items()},
            "by_searcher": self.server.searchers(),
        }

    def _make_server(self, admission: TicketAdmission) -> SearchServer:
        run, config = self._run, self._run.config
        size, is_sync = config.search.samples_per_prompt, config.driver == "sync"
        slots = max(1, -(-config.search.num_slots // size))
        return SearchServer(
            ServerSettings(
                epoch=uuid.uuid4().hex,
                identity=run.shared.identity,
                responses_per_ticket=size * (config.search.prompts_per_round if is_sync else 1),
                heartbeat_timeout_s=config.remote.heartbeat_s,
                max_tickets=slots if config.search.num_slots else config.search.prompts_per_round,
            ),
            {index: searcher.outbox for index, searcher in self._searchers.items()},
            admission,
            run.evaluations,
            clock=time.monotonic,
            run_clock=run.clock,
            log=run.logs.progress.note,
            num_chunks={index: searcher.num_chunks for index, searcher in self._searchers.items()},
            listeners=Listeners(self._note_given, run.logs.schedule.append, self._note_chunks),
        )

    def _note_given(self, searcher: int, responses: int, rounds: int) -> None:
        found = self._searchers[searcher]
        found.num_given, found.num_given_rounds = responses, rounds

    def _note_chunks(self, searcher: int, chunks: int) -> None:
        self._searchers[searcher].num_chunks = chunks

    def open(self) -> None:
        """Let searchers join; wait for them, unless they may come and go.

        Raises:
            PeerError: a process of the job does not join.
        """
        self._owner.search_server = self.server
        if MODES[self._run.config.placement].searches_elsewhere:
            return
        self._run.logs.progress.phase("waiting for the processes that search")
        limit_s = self._run.config.log.watchdog_s
        deadline = time.monotonic() + limit_s
        while absent := self.server.absent:
            if time.monotonic() > deadline:
                raise PeerError(
                    f"searchers {absent} did not join within {limit_s:.0f} s "
                    "(config.log.watchdog_s). Look at the output of their processes; the same "
                    "command on every host resumes the run"
                )
            time.sleep(_WAIT_S)

    def close(self, *, has_failed: bool) -> None:
        """Notify searchers of the end of the run.

        After a failure searchers are not notified: the run may continue in another process.
        """
        if has_failed:
            self._owner.search_server = None
        else:
            self.server.close()
        self.server.stop_leases()

    def announce(self) -> None:
        """Announce the newest delivered version."""
        transport = self._run.search.transport
        if isinstance(transport, MergingTransport):
            transport = transport.source  # its weights are merged where a searcher takes them
        published = transport.latest(0)
        if published is not None:
            self.server.set_version(published.version)

    def count(self) -> None:
        """Update the counters of the searchers."""
        for index, (idle_s, tokens) in self._before.items():
            more_idle_s, more_tokens = self.server.totals(index)
            self._searchers[index].idle_s = idle_s + more_idle_s
            self._searchers[index].decoded_tokens = tokens + more_tokens

    def metrics(self) -> Mapping[str, float]:
        """Return the figures of the searchers, by metric name."""
        self.server.set_step(self._run.trainer.step_index)
        restarts = float(self._owner.num_restarts)
        return {**self.server.metrics(), "fleet/trainer_restarts": restarts}

    def workers(self, stop: StopFlag) -> list[Worker]:
        """Return the workers that find lost searchers, and compute metrics of evaluations."""

        def merge() -> bool:
            self._run.evaluations.merge()
            return False

        found = [
            Worker(
                "heartbeat-check",
                self.server.lose_silent_searchers,
                stop,
                idle_s=self._run.config.remote.heartbeat_s / 8,
            )
        ]
        if not self._run.search.local:  # else a searcher of this process does it
            found.append(Worker("evaluator", merge, stop, idle_s=POLL_S))
        return found

    def finish(self) -> None:
        """Evaluate the final policy while searchers are there.

        Raises:
            FleetError: no searcher is there.
        """
        evaluations.evaluate_last(self._run)


class NoSearchService:
    """`SearchService` of a run whose searchers are all in this process."""

    server = None

    def announce(self) -> None:
        """Do nothing."""

    def count(self) -> None:
        """Do nothing: searchers count themselves."""

    def metrics(self) -> Mapping[str, float]:
        """Return none."""
        return {}

    def workers(self, stop: StopFlag) -> list[Worker]:
        """Return none."""
        return []

    def finish(self) -> None:
        """Do nothing: the final policy is evaluated later."""


@contextlib.contextmanager
def serving(run: Run, admission: TicketAdmission) -> Iterator[SearchService | NoSearchService]:
    """Let searchers of other processes join; at the end tell them that the run has ended."""
    owner = run.link
    if not run.search.remote:
        yield NoSearchService()
        return
    assert isinstance(owner, Owner), "searchers of other processes join the owner of the buffer"
    service = SearchService(run, owner, admission)
    try:
        service.open()
        evaluations.request_start_model(run)
        yield service
    except BaseException:
        service.close(has_failed=True)
        raise
    service.close(has_failed=False)


def follow(run: Run, interrupted: Callable[[], bool]) -> None:
    """Train on what the owner draws, until the last step or an interruption.

    Raises:
        WorkerError: a searcher failed, or the owner does not respond; its cause says which.
    """
    link = run.link
    assert isinstance(link, Follower)
    failed, ended = StopFlag(), StopFlag()
    weights = PublishedWeights(run.search.transport, len(run.search.local))
    process = SearchProcess(
        run.shared, run.search, weights, run.evaluator, lambda: run.is_interrupted(interrupted)
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
