# SPDX-License-Identifier: Apache-2.0
"""Searchers for an owner in another process: their process, and the service of the owner.

`search` runs in the process of the searchers. `SearchService` is the interface of drivers to the
searchers of other processes, in the owner's process. The same code builds the searchers of a single
process and of several. A process that only searches reads published weights from disk; a trainer
process of a pod also searches, with the weights in its memory.

Invariants: after a rewind no response and no weights of the previous trainer are used. No searcher
joins before the run is restored, nor after the run has ended (tests/integration/test_fleet.py).
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tba_jax.config.schema import Config
from tba_jax.devices.cluster import Cluster, PeerError
from tba_jax.devices.device_lock import device_lock_for
from tba_jax.devices.placement import MODES, PlacementError
from tba_jax.devices.sharding import MESH_AXES
from tba_jax.devices.site import Site, Sites
from tba_jax.devices.worker import StopFlag, Worker, WorkerError
from tba_jax.models.shardings import param_shardings
from tba_jax.remote.channel import HEARTBEAT_S, OWNER_TIMEOUT_S, Unreachable
from tba_jax.remote.client import Callbacks, Client, Dismissed, Rewind
from tba_jax.remote.messages import RUN_ENDED, Heartbeat, JoinRequest, JoinResponse, Sender
from tba_jax.remote.owner import Owner
from tba_jax.remote.search_channel import RemoteOwner
from tba_jax.remote.step_server import StepClient
from tba_jax.run.host_state import RunClock
from tba_jax.run.peers import OwnerServer
from tba_jax.run.run import Run
from tba_jax.run.search_parts import (
    Search,
    build_judging,
    build_searchers,
    make_stored_weights,
)
from tba_jax.run.shared import Shared, open_shared
from tba_jax.search.searcher import Searcher
from tba_jax.weights.folder import StoredWeights
from tba_jax.weights.memory import DELIVERY_S, Weights

POLL_S = 0.002
"""Sleep of a searcher's thread that has nothing to do."""
STOP_S = 10.0
"""Time that threads get to end their current step."""
_CHECK_S = 0.1  # seconds between two checks whether a worker has failed
_JOIN_RETRY_S = 0.5  # seconds between two join requests to a trainer that does not respond
_WAIT_S = 0.02  # seconds between two checks whether searchers have joined


@dataclasses.dataclass(frozen=True)
class SearchProcess:
    """The searchers of a process before they join an owner.

    Attributes:
        weights: source of the weights that the searchers sample with.
        wants_stop: returns whether this process received a stop signal; sent to the owner.
    """

    shared: Shared
    search: Search
    weights: StoredWeights | Weights
    wants_stop: Callable[[], bool] = lambda: False


def open_search_process(
    config: Config,
    workdir: Path,
    searchers: Sequence[int],
    note: Callable[[str], None],
    *,
    cluster: Cluster | None = None,
    wants_stop: Callable[[], bool] = lambda: False,
) -> SearchProcess:
    """Build searchers on the devices of this process.

    Args:
        searchers: consecutive searcher IDs.
        cluster: cluster of this process alone, in a job whose other processes train; None: the
            process belongs to a fleet.

    Raises:
        PlacementError: too few devices. ValueError: as `open_shared`.
    """
    shared = open_shared(
        config,
        workdir,
        cluster=cluster or Cluster(),
        clock=RunClock(time.perf_counter, time.perf_counter()),  # the join response sets it
        note=note,
        sites=_fleet_sites(config, searchers[0]) if cluster is None else None,
    )
    plain, mesh = shared.model.config, shared.sites.trainer.mesh
    base = None
    if shared.policy.adapters is not None:
        base = shared.model.load_params(
            param_dtype=jnp.dtype(config.model.param_dtype), shardings=param_shardings(plain, mesh)
        )
    weights = make_stored_weights(shared, base)
    search = build_searchers(shared, weights, build_judging(shared))
    return SearchProcess(shared, search, weights, wants_stop)


def _fleet_sites(config: Config, first_searcher: int) -> Sites:
    """Divide the devices of this process among its searchers.

    Weights are read from disk with the devices of the first searcher.
    """
    each, num = config.search.num_devices, config.num_searchers
    devices = jax.local_devices()
    groups = [devices[i : i + each] for i in range(0, len(devices) - each + 1, each)]
    if not groups:
        raise PlacementError(
            f"a searcher wants {each} devices (search.num_devices), and a process of searchers "
            f"sees {len(devices)}; lower it, or give more with fleet.searcher"
        )
    meshes = [Mesh(np.array(groups[i % len(groups)]), ("model",)) for i in range(num)]
    reading = Mesh(np.array(groups[0]).reshape(1, 1, each), MESH_AXES)
    lock = device_lock_for([reading, *meshes], timeout_s=config.log.watchdog_s / 2)
    where = Site(reading, lock)
    searching = tuple(Site(mesh, lock) for mesh in meshes)
    num_searchers = config.fleet.max_searchers
    return Sites(where, where, searching, first_searcher, num_searchers, trains=False)


def search(
    process: SearchProcess,
    owner: RemoteOwner,
    host: str,
    log: Callable[[str], None],
    stop: StopFlag | None = None,
) -> str:
    """Search until the owner dismisses this process; return the reason.

    Args:
        stop: ends the search when it is set; the reason is then "".

    Raises:
        WorkerError: a searcher failed.
        TimeoutError: the trainer does not respond.
    """
    config = process.shared.config
    timeout_s = config.log.watchdog_s
    if MODES[config.placement].has_remote_searchers:
        timeout_s = 2 * OWNER_TIMEOUT_S
    stop = StopFlag() if stop is None else stop
    indices = [parts.index for parts in process.search.parts]
    request = JoinRequest(indices, host, process.shared.identity)
    while not stop.is_set():
        response = _join(owner, request, timeout_s, stop)
        if response is None:
            break
        if response.refusal == RUN_ENDED:
            # The trainer still computes final results; this process has no more work.
            return RUN_ENDED
        if response.refusal:
            return f"refused: {response.refusal}"
        process.shared.clock.set(response.run_s)
        try:
            _search_once(process, owner, response, timeout_s, stop, log)
        except Rewind as rewind:
            log(str(rewind))
        except Dismissed as dismissed:
            return str(dismissed)
    return ""


def search_in_job(
    process: SearchProcess, link: StepClient, log: Callable[[str], None], stop: StopFlag | None
) -> None:
    """Search in a process of a job, until the run ends or `stop` is set.

    Raises:
        PeerError: the owner of the buffer refuses the searchers.
    """
    reason = search(process, RemoteOwner(link.channel), link.host, log, stop)
    if reason and not reason.endswith(RUN_ENDED):
        raise PeerError(f"{link.host} may not search: {reason}")


def _join(
    owner: RemoteOwner, request: JoinRequest, timeout_s: float, stop: StopFlag
) -> JoinResponse | None:
    """Send join requests until the trainer responds; return None if `stop` was set."""
    deadline = time.monotonic() + timeout_s
    while not stop.is_set():
        try:
            return owner.join(request)
        except Unreachable as error:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the trainer has not responded for {timeout_s:.0f} s ({error}). The same "
                    "command resumes the run"
                ) from error
            stop.wait(_JOIN_RETRY_S)
    return None


def _search_once(
    process: SearchProcess,
    owner: RemoteOwner,
    response: JoinResponse,
    timeout_s: float,
    outer: StopFlag,
    log: Callable[[str], None],
) -> None:
    """Run the searchers until a client raises Rewind or Dismissed, or `outer` is set."""
    stop = StopFlag()
    process.weights.reset(response.version)
    workers = [Worker("weight-reader", lambda: process.weights.poll(DELIVERY_S), stop)]
    for i, parts in enumerate(process.search.parts):
        sender = Sender(response.epoch, parts.index)
        workers += _workers(process, i, sender, owner, stop, timeout_s, log)
    for worker in workers:
        worker.start()
    try:
        while not stop.wait(_CHECK_S) and not outer.is_set():
            pass
        stop.check()
    except WorkerError as error:
        if isinstance(error.__cause__, Rewind | Dismissed):
            raise error.__cause__ from None
        raise
    finally:
        stop.set()
        deadline = time.monotonic() + STOP_S
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))


def _workers(
    process: SearchProcess,
    i: int,
    sender: Sender,
    owner: RemoteOwner,
    stop: StopFlag,
    timeout_s: float,
    log: Callable[[str], None],
) -> list[Worker]:
    """Return the workers of one searcher: decoding, grading, messages."""

    def heartbeat() -> Heartbeat:
        counts = searcher.decode_counts()
        return Heartbeat(decoding.idle_total_s, counts, process.wants_stop())

    client = Client(
        sender,
        owner,
        Callbacks(heartbeat, process.weights.announce, log),
        clock=time.monotonic,
        timeout_s=timeout_s,
    )
    searcher = Searcher(process.search.parts[i], client)
    decoding, grading = search_workers(searcher, stop)
    sending = Worker(f"client-{sender.searcher}", client.step, stop, idle_s=POLL_S)
    return [decoding, grading, sending]


def search_workers(searcher: Searcher, stop: StopFlag) -> list[Worker]:
    """Return the two workers of a searcher: decoding and grading."""
    return [
        Worker(f"searcher-{searcher.index}", searcher.step, stop, idle_s=POLL_S),
        Worker(f"grader-{searcher.index}", searcher.grade, stop, idle_s=POLL_S),
    ]


class SearchService:
    """Interface of a driver to the searchers of other processes."""

    def __init__(self, run: Run, owner: Owner, server: OwnerServer) -> None:
        self._run = run
        self._owner = owner
        self._server = server
        run.sections["fleet"] = lambda: {
            **{name.removeprefix("fleet/"): value for name, value in self.metrics().items()},
            "by_searcher": owner.searchers(),
        }

    def open(self) -> None:
        """Let searchers join; wait for all of them, except in a fleet.

        Raises:
            PeerError: a process of the job does not join.
        """
        self._server.owner = self._owner
        if MODES[self._run.config.placement].has_remote_searchers:
            return
        self._run.logs.progress.phase("waiting for the processes that search")
        limit_s = self._run.config.log.watchdog_s
        deadline = time.monotonic() + limit_s
        while absent := self._owner.absent:
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
            self._server.owner = None
        else:
            self._owner.has_ended = True

    def announce(self) -> None:
        """Announce the newest delivered version."""
        if (newest := self._run.weights.newest) is not None:
            self._owner.set_version(newest)

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the searchers by name."""
        restarts = float(self._server.num_restarts)
        return {**self._owner.metrics(), "fleet/trainer_restarts": restarts}

    def workers(self, stop: StopFlag) -> list[Worker]:
        """Return the worker that finds lost searchers."""
        period_s = HEARTBEAT_S / 8
        return [Worker("heartbeat-check", self._owner.lose_silent, stop, idle_s=period_s)]


class NoSearchService:
    """`SearchService` of a run whose searchers are all in this process."""

    def announce(self) -> None: ...

    def metrics(self) -> Mapping[str, float]:
        return {}

    def workers(self, stop: StopFlag) -> list[Worker]:
        return []


@contextlib.contextmanager
def serving(run: Run) -> Iterator[SearchService | NoSearchService]:
    """Let searchers of other processes join; notify them when the run ends."""
    server, owner = run.link, run.owner
    assert owner is not None, "this process owns the buffer"
    if not owner.remote_searchers:
        yield NoSearchService()
        return
    assert isinstance(server, OwnerServer), "searchers of other processes join its owner"
    service = SearchService(run, owner, server)
    try:
        service.open()
        run.request_start_model()
        yield service
    except BaseException:
        service.close(has_failed=True)
        raise
    service.close(has_failed=False)
