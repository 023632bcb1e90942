# SPDX-License-Identifier: Apache-2.0
"""Searchers for a replay buffer in another process: their process, and the service of the owner.

`search` runs in the process of the searchers. `SearchService` is the interface of drivers to the
search server, in the process that owns the buffer. The same code builds the searchers of a single
process and of several. Their tickets come from the search server, which also receives their
responses. A process that only searches reads published weights from disk; a trainer process of a
pod also searches, with the weights in its memory.

Invariants: after a rewind no response and no weights of the previous trainer are used. No searcher
joins before the run is restored, nor after the run has ended (tests/integration/test_fleet.py).
"""

import contextlib
import dataclasses
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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
from tba_jax.evaluation.evaluator import Evaluator
from tba_jax.flow.evaluation_shard import EvaluationShard
from tba_jax.flow.state import PartState
from tba_jax.models.shardings import param_shardings
from tba_jax.remote.channel import HEARTBEAT_S, OWNER_TIMEOUT_S, Unreachable
from tba_jax.remote.client import (
    Callbacks,
    Dismissed,
    LeasedShard,
    Rewind,
    SearcherClient,
    TicketQuota,
)
from tba_jax.remote.messages import (
    RUN_ENDED,
    Heartbeat,
    JoinRequest,
    JoinResponse,
    SearcherStart,
)
from tba_jax.remote.search_channel import RemoteSearchServer, SearchRequests
from tba_jax.remote.search_server import SearchServer
from tba_jax.remote.searcher_table import ServerSettings, TicketAdmission
from tba_jax.remote.step_server import StepClient
from tba_jax.run.host_state import RunClock
from tba_jax.run.model_parts import swaps_in_flight
from tba_jax.run.peers import Owner
from tba_jax.run.run import Run
from tba_jax.run.search_parts import (
    Search,
    build_evaluator,
    build_searchers,
    load_start_weights,
    make_references,
    make_transport,
)
from tba_jax.run.shared import Shared, open_shared
from tba_jax.search.continuous import ContinuousSearch, RoundSearch
from tba_jax.weights.merged_adapters import MergingTransport
from tba_jax.weights.transport import DELIVERY_S, PublishedWeights, Transport
from tba_jax.weights.version_reader import VersionReader
from tba_jax.weights.versions import PublicationError

POLL_S = 0.002
"""Sleep of a searcher's thread that has nothing to do."""
STOP_S = 10.0
"""Time that threads get to end their current step."""
_CHECK_S = 0.1  # seconds between two checks whether a worker has failed
_JOIN_RETRY_S = 0.5  # seconds between two join requests to a trainer that does not respond
_WAIT_S = 0.02  # seconds between two checks whether searchers have joined


@dataclasses.dataclass(frozen=True)
class StoredWeights:
    """Weights on the devices of the searchers of a process, read from the work directory.

    Args:
        transport: transport from which the searchers take weights.
        reader: reads published versions for `transport`.
    """

    shared: Shared
    transport: Transport
    reader: VersionReader

    def reset(self, version: int) -> None:
        """Forget all versions; `version` is the newest version of the new search server."""
        self.reader.forget()
        self.reader.announce(version)

    def announce(self, version: int, evaluated: tuple[int, ...]) -> None:
        """Set the newest complete version, and the versions under evaluation."""
        del evaluated
        self.reader.announce(version)

    def poll(self) -> bool:
        """Load the announced versions; called on a separate thread."""
        return self.reader.poll(DELIVERY_S)

    def newest(self, i: int) -> int:
        """Return the version with which searcher i would sample; -1: there is none."""
        published = self.reader.latest(i)
        return -1 if published is None else published.version

    def at(self, version: int, i: int) -> Any:
        """Return the weights of a version for searcher i; None if the version was deleted."""
        latest = self.transport.latest(i)
        if latest is not None and latest.version == version:
            return latest.params
        try:
            found = self.reader.at(version)
        except PublicationError:
            if version:
                return None
            return load_start_weights(self.shared, self.shared.sites.searchers[i])
        if isinstance(self.transport, MergingTransport):
            found = self.transport.merged(found)
        return found[i]


@dataclasses.dataclass(frozen=True)
class SearchProcess:
    """The searchers of a process before they join a search server.

    Attributes:
        weights: source of the weights that the searchers sample with.
        evaluator: works on evaluation shards, with a shard evaluator for each searcher.
        wants_stop: returns whether this process received a stop signal; sent to the owner.
        first_positions: state of each prompt stream before its first prompt.
    """

    shared: Shared
    search: Search
    weights: StoredWeights | PublishedWeights
    evaluator: Evaluator
    wants_stop: Callable[[], bool] = lambda: False
    first_positions: tuple[Mapping[str, Any], ...] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        positions = tuple(stream.state() for stream in self.search.streams)
        object.__setattr__(self, "first_positions", positions)


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
    references, base = {}, None
    if config.reference.placement == "searcher" or shared.policy.adapters is not None:
        base = shared.model.load_params(
            param_dtype=jnp.dtype(config.model.param_dtype), shardings=param_shardings(plain, mesh)
        )
    if config.reference.placement == "searcher":
        references = make_references(
            config, shared.policy, shared.tokenizer.eos_ids, shared.sites, base
        )
    if shared.policy.adapters is None:
        base = None
    transport = make_transport(config, shared.policy, shared.sites, workdir, base, None)
    reader = transport.source if isinstance(transport, MergingTransport) else transport
    assert isinstance(reader, VersionReader)
    search = build_searchers(
        shared,
        transport=transport,
        references=references,
        wants_given=shared.checkpoints.latest_step() in (None, 0),
        note=note,
    )
    graders = [searcher.parts.grader for searcher in search.local]
    evaluator = build_evaluator(shared, search.decoders, graders, references, note)
    weights = StoredWeights(shared, transport, reader)
    return SearchProcess(shared, search, weights, evaluator, wants_stop)


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
    server: SearchRequests,
    host: str,
    log: Callable[[str], None],
    stop: StopFlag | None = None,
) -> str:
    """Search until the search server dismisses this process; return the reason.

    Args:
        stop: ends the search when it is set; the reason is then "".

    Raises:
        WorkerError: a searcher failed.
        TimeoutError: the trainer does not respond.
    """
    identity = process.shared.identity
    config = process.shared.config
    timeout_s = config.log.watchdog_s
    if MODES[config.placement].has_remote_searchers:
        timeout_s = 2 * OWNER_TIMEOUT_S
    stop = StopFlag() if stop is None else stop
    local = process.search.local
    indices = tuple(searcher.index for searcher in local)
    given = tuple((s.num_given, s.num_given_rounds) for s in local)
    while not stop.is_set():
        request = JoinRequest(indices, host, identity, given)
        response = _join(server, request, process.shared.clock, timeout_s, stop)
        if response is None:
            break
        if response.refusal == RUN_ENDED:
            # The trainer still computes final results; this process has no more work.
            return RUN_ENDED
        if response.refusal:
            return f"refused: {response.refusal}"
        try:
            _search_once(process, server, response, timeout_s, stop, log)
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
    reason = search(process, RemoteSearchServer(link.channel), link.host, log, stop)
    if reason and not reason.endswith(RUN_ENDED):
        raise PeerError(f"{link.host} may not search: {reason}")


def _join(
    server: SearchRequests,
    request: JoinRequest,
    clock: RunClock,
    timeout_s: float,
    stop: StopFlag,
) -> JoinResponse | None:
    """Send join requests until the trainer responds; return None if `stop` was set."""
    deadline = time.monotonic() + timeout_s
    while not stop.is_set():
        try:
            response = server.join(request)
        except Unreachable as error:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the trainer has not responded for {timeout_s:.0f} s ({error}). The same "
                    "command resumes the run"
                ) from error
            stop.wait(_JOIN_RETRY_S)
            continue
        clock.set(response.run_s)
        return response
    return None


def _search_once(
    process: SearchProcess,
    server: SearchRequests,
    response: JoinResponse,
    timeout_s: float,
    outer: StopFlag,
    log: Callable[[str], None],
) -> None:
    """Run the searchers until a client raises Rewind or Dismissed, or `outer` is set."""
    stop = StopFlag()
    process.weights.reset(response.version)
    workers = [
        Worker("weight-reader", process.weights.poll, stop),
        *(
            worker
            for i, start in enumerate(response.starts)
            for worker in _workers(process, i, start, server, stop, timeout_s, log)
        ),
    ]
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


def _evaluate(process: SearchProcess, i: int, version: int, shard: int) -> EvaluationShard | None:
    """Evaluate a shard of a version's evaluation; return None if the weights were deleted."""
    params = process.weights.at(version, i)
    return None if params is None else process.evaluator.shard(params, shard, i)


def _workers(
    process: SearchProcess,
    i: int,
    start: SearcherStart,
    server: SearchRequests,
    stop: StopFlag,
    timeout_s: float,
    log: Callable[[str], None],
) -> list[Worker]:
    """Return the workers of one searcher: decoding, grading, messages."""
    config, weights = process.shared.config, process.weights
    searcher, outbox = process.search.local[i], process.search.outboxes[i]
    position = dict(start.position)
    if position["prompt_state"] is None:
        position["prompt_state"] = process.first_positions[i]
    outbox.start_from(position)
    counters = {"decoded_tokens": 0, "idle_s": 0.0}
    searcher.restore(PartState({}, counters))
    quota, leased = TicketQuota(), LeasedShard()
    worked: ContinuousSearch | RoundSearch
    if config.driver == "sync":
        worked = RoundSearch(searcher, quota)
    else:
        worked = ContinuousSearch(searcher, quota, swaps_in_flight=swaps_in_flight(config))

    def step() -> bool:
        """Evaluate a leased shard, else commit given responses, else sample responses."""
        if (lease := leased.start()) is not None:
            leased.finish(lease, _evaluate(process, i, *lease))
            return True
        if config.driver == "async" and searcher.num_given_rounds_left:
            return quota.admit(searcher.index, -1) and searcher.step()
        return worked.step()

    decoding = Worker(f"searcher-{searcher.index}", step, stop, idle_s=POLL_S)
    client = SearcherClient(
        start,
        server,
        outbox,
        quota,
        leased,
        Callbacks(
            # A ticket that is admitted before there are weights would only grow stale.
            room=lambda: worked.room if weights.newest(i) >= 0 else 0,
            heartbeat=lambda put_s: Heartbeat(
                decoding.idle_total_s,
                put_s,
                worked.decode_counts(),
                version=weights.newest(i),
                wants_stop=process.wants_stop(),
            ),
            versions=weights.announce,
            log=log,
        ),
        clock=time.monotonic,
        timeout_s=timeout_s,
    )
    return [
        decoding,
        Worker(f"grader-{searcher.index}", worked.grade, stop, idle_s=POLL_S),
        Worker(f"client-{searcher.index}", client.step, stop, idle_s=POLL_S),
    ]


class SearchService:
    """Interface of a driver to the searchers of other processes.

    Attributes:
        server: the search server.
    """

    def __init__(self, run: Run, owner: Owner, admission: TicketAdmission) -> None:
        self._run = run
        self._owner = owner
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
                heartbeat_timeout_s=HEARTBEAT_S,
                max_tickets=slots if config.search.num_slots else config.search.prompts_per_round,
            ),
            run.search.remote,
            admission,
            run.evaluations,
            clock=time.monotonic,
            run_clock=run.clock,
            log=run.logs.progress.note,
        )

    def open(self) -> None:
        """Let searchers join; wait for all of them, except in a fleet.

        Raises:
            PeerError: a process of the job does not join.
        """
        self._owner.search_server = self.server
        if MODES[self._run.config.placement].has_remote_searchers:
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

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the searchers by name."""
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
                idle_s=HEARTBEAT_S / 8,
            )
        ]
        if not self._run.search.local:  # otherwise a searcher of this process computes them
            found.append(Worker("evaluator", merge, stop, idle_s=POLL_S))
        return found


class NoSearchService:
    """`SearchService` of a run whose searchers are all in this process."""

    server = None

    def announce(self) -> None: ...

    def metrics(self) -> Mapping[str, float]:
        return {}

    def workers(self, stop: StopFlag) -> list[Worker]:
        return []


@contextlib.contextmanager
def serving(run: Run, admission: TicketAdmission) -> Iterator[SearchService | NoSearchService]:
    """Let searchers of other processes join; notify them when the run ends."""
    owner = run.link
    if not run.search.remote:
        yield NoSearchService()
        return
    assert isinstance(owner, Owner), "searchers of other processes join the owner of the buffer"
    service = SearchService(run, owner, admission)
    try:
        service.open()
        run.request_start_model()
        yield service
    except BaseException:
        service.close(has_failed=True)
        raise
    service.close(has_failed=False)
