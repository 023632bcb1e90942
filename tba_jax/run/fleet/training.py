# SPDX-License-Identifier: Apache-2.0
"""The trainer's process of a fleet: a run whose searchers join a search server.

The run is conducted by the same code as a run with searcher threads. Given responses are scored
here.

Invariant: no searcher joins before the run is restored, nor after the run has ended
(tests/run/fleet).
"""

import contextlib
import functools
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from tba_jax.config.resolved import is_gang
from tba_jax.config.schema import Config
from tba_jax.devices.cluster import peer_errors
from tba_jax.devices.worker import StopFlag, Worker
from tba_jax.remote.channel import ChannelServer, Endpoint
from tba_jax.remote.search_channel import search_handlers
from tba_jax.remote.search_server import SearchServer
from tba_jax.remote.searcher_table import ServerSettings
from tba_jax.replay.admission import Admission
from tba_jax.report.relay import Relay
from tba_jax.run.async_search import (
    DELIVERY_S,
    POLL_S,
    Searchers,
    drive_concurrently,
    make_admission,
)
from tba_jax.run.fleet.gang import evaluate_last, follow, join_gang, publish_last
from tba_jax.run.fleet.identity import identity_of
from tba_jax.run.run import Run
from tba_jax.run.searching import Search
from tba_jax.run.workdir import Outcome
from tba_jax.weights.checkpoints import CheckpointTransport
from tba_jax.weights.merging import MergingTransport
from tba_jax.weights.remote import VersionWriter


class TrainerHost:
    """The trainer's process; `run` returns when the run ends.

    Args:
        config: validated.
        workdir: claimed by the driver.
        accept_changed: as in `conduct`.
        token: bearer token of the run's channel; "" in processes that do not own the buffer.
        num_restarts: trainers of this run that its driver has replaced.
    """

    def __init__(
        self,
        config: Config,
        workdir: Path,
        accept_changed: Collection[str],
        token: str,
        num_restarts: int = 0,
    ) -> None:
        self._config = config
        self._workdir = workdir
        self._accept_changed = accept_changed
        self._num_restarts = num_restarts
        self._relay = Relay()
        self._interrupted = threading.Event()
        self._search_server: SearchServer | None = None
        self._channel: ChannelServer | None = None
        if token:
            self._channel = ChannelServer(
                search_handlers(lambda: self._search_server),
                token,
                port=config.remote.port,
                is_local=config.fleet.address == "local",
            ).start()

    @property
    def endpoint(self) -> Endpoint:
        """Where searchers reach the search server."""
        assert self._channel is not None, "searchers ask the owner of the buffer"
        return self._channel.endpoint

    def run(self, number: int = 0, coordinator: str = "") -> Outcome:
        """Begin or continue the run.

        Args:
            number: of this process in the trainer group.
            coordinator: HOST:PORT where the processes of a trainer group meet.

        Raises:
            PeerError: another process of the group is gone. Else what `conduct` raises.
        """
        start_s = time.perf_counter()
        from tba_jax.run.conduct import conduct
        from tba_jax.run.joining import start_cluster

        if is_gang(self._config):
            cluster = join_gang(self._config, coordinator, number)
        else:
            cluster = start_cluster(self._config)
        lead = functools.partial(
            drive_fleet, set_server=self._set_server, num_restarts=self._num_restarts
        )
        with peer_errors(cluster):
            outcome = conduct(
                self._config,
                self._workdir,
                cluster,
                self._interrupted.is_set,
                hold=None,
                accept_changed=self._accept_changed,
                start_s=start_s,
                display=self._relay,
                drive=lead if cluster.is_primary else follow,
            )
        cluster.close()
        return outcome

    def _set_server(self, server: SearchServer | None) -> None:
        self._search_server = server

    def news(self, since: int) -> tuple[int, list[tuple[str, tuple[Any, ...]]]]:
        """Return what the driver shows; see `Relay.since`."""
        return self._relay.since(since)

    def searchers_died(self, searchers: Sequence[int]) -> None:
        """Count these searchers as lost; a trainer that is starting has none."""
        if self._search_server is not None:
            self._search_server.lose_host(searchers)

    def interrupt(self) -> None:
        """Save after the current step and end."""
        self._interrupted.set()


def drive_fleet(
    run: Run,
    interrupted: Callable[[], bool],
    *,
    set_server: Callable[[SearchServer | None], None],
    num_restarts: int = 0,
) -> None:
    """Train concurrently with remote searchers until the last step or an interruption.

    Args:
        run: its searchers only hold counters.
        interrupted: checked between steps.
        set_server: as in `serving`.
        num_restarts: as in `TrainerHost`.
    """
    searchers = run.search.searchers
    streams = run.search.streams if isinstance(run.search, Search) else ()
    _do_given_rounds(run, interrupted)
    admission = make_admission(run)
    server = _make_server(run, admission)
    stop = StopFlag()
    workers = _workers(run, server, stop)
    before = [(searcher.idle_s, searcher.decoded_tokens) for searcher in searchers]

    def count() -> None:
        for searcher, (idle_s, tokens) in zip(searchers, before, strict=True):
            more_idle_s, more_tokens = server.totals(searcher.index)
            searcher.idle_s = idle_s + more_idle_s
            searcher.decoded_tokens = tokens + more_tokens
        for stream, outbox in zip(streams, run.search.outboxes, strict=bool(streams)):
            _, position = outbox.committed
            if position is not None:
                stream.num_skipped = position["num_skipped"]

    def figures() -> dict[str, float]:
        server.set_step(run.trainer.step_index)
        return {**server.metrics(), "fleet/trainer_restarts": float(num_restarts)}

    run.sections["fleet"] = lambda: {
        **{name.removeprefix("fleet/"): value for name, value in figures().items()},
        "by_searcher": server.searchers(),
    }
    with serving(server, set_server):
        remote = Searchers(admission, stop, workers, count, server.take_slot_use, figures)
        drive_concurrently(run, interrupted, remote)
        if is_gang(run.config) and publish_last(run):
            evaluate_last(run, server)


@contextlib.contextmanager
def serving(
    server: SearchServer, set_server: Callable[[SearchServer | None], None]
) -> Iterator[None]:
    """Let searchers join; at the end tell them that the run has ended.

    After a failure searchers are told nothing: the run may continue in another process.

    Args:
        server: the search server.
        set_server: receives the server when searchers may join, and None after a failure.
    """
    set_server(server)
    try:
        yield
        server.close()
    except BaseException:
        set_server(None)
        raise
    finally:
        server.stop_leases()


def _make_server(run: Run, admission: Admission) -> SearchServer:
    """Return the search server of a run."""
    config = run.config
    size = config.search.samples_per_prompt
    return SearchServer(
        ServerSettings(
            epoch=uuid.uuid4().hex,
            identity=identity_of(run.shared),
            responses_per_ticket=size,
            heartbeat_timeout_s=config.fleet.silence_s,
            max_tickets=max(1, -(-config.search.num_slots // size))
            if config.search.num_slots
            else config.search.prompts_per_round,
        ),
        dict(enumerate(run.search.outboxes)),
        admission,
        run.evaluations,
        clock=time.monotonic,
        run_clock=run.clock,
        log=run.logs.progress.note,
    )


def _way(run: Run) -> CheckpointTransport | VersionWriter:
    """How weights leave this process."""
    way = run.search.transport
    way = way.source if isinstance(way, MergingTransport) else way
    assert isinstance(way, CheckpointTransport | VersionWriter), "validated"
    return way


def _workers(run: Run, server: SearchServer, stop: StopFlag) -> list[Worker]:
    """Return the workers that publish weights, evaluate, and find lost searchers."""
    way = _way(run)
    if not isinstance(way, VersionWriter):
        way.keep_also(lambda: run.evaluations.wanted)

    def deliver() -> bool:
        """Deliver a publication and announce its version."""
        if not run.search.transport.poll(DELIVERY_S):
            return False
        published = way.latest(0)
        assert published is not None, "it was delivered"
        server.set_version(published.version)
        return True

    def evaluate() -> bool:
        """Evaluate here only where no searcher does: training need not wait."""
        if server.gives_leases:
            run.evaluations.merge()
            return False
        return run.evaluations.step(0)

    period_s = run.config.fleet.silence_s / 8
    return [
        Worker("weight-poller", deliver, stop),
        Worker("evaluator", evaluate, stop, idle_s=POLL_S),
        Worker(
            "heartbeat-check",
            server.lose_silent_searchers,
            stop,
            idle_s=period_s,
        ),
    ]


def _do_given_rounds(run: Run, interrupted: Callable[[], bool]) -> None:
    """Score given responses on the trainer's devices."""
    if not isinstance(run.search, Search):
        return  # validated: a trainer group has no given responses
    given = [searcher for searcher in run.search.searchers if searcher.num_given_rounds_left]
    if given:
        run.trainer.publish()
        run.search.transport.poll()
    for searcher in given:
        while searcher.num_given_rounds_left and not interrupted():
            searcher.step()
