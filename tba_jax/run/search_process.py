# SPDX-License-Identifier: Apache-2.0
"""A process that runs searchers for a trainer in another process.

The searchers are built by the same code as searcher threads of a single process. Their tickets come
from the search server, which also receives their responses.

Invariant: after a rewind no response and no weights of the previous trainer are used.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tba_jax.config.schema import Config
from tba_jax.devices.cluster import Cluster
from tba_jax.devices.placement import PlacementError
from tba_jax.devices.sharding import MESH_AXES
from tba_jax.devices.site import Site
from tba_jax.devices.turns import turns_for
from tba_jax.devices.worker import StopFlag, Worker, WorkerError
from tba_jax.evaluation.evaluator import Evaluator
from tba_jax.flow.evaluation_shard import EvaluationShard
from tba_jax.flow.state import PartState
from tba_jax.models.shardings import param_shardings
from tba_jax.remote.channel import Unreachable
from tba_jax.remote.client import (
    Dismissed,
    LeasedShard,
    Rewind,
    SearcherClient,
    SearchRequests,
    TicketQuota,
)
from tba_jax.remote.messages import (
    RUN_ENDED,
    Heartbeat,
    JoinRequest,
    JoinResponse,
    SearcherStart,
)
from tba_jax.run.async_search import DELIVERY_S, POLL_S, STOP_S
from tba_jax.run.clock import RunClock
from tba_jax.run.evaluating import build_evaluator
from tba_jax.run.fleet.identity import identity_of
from tba_jax.run.placing import Sites
from tba_jax.run.searching import (
    Search,
    build_searchers,
    make_references,
    make_transport,
    swaps_in_flight,
)
from tba_jax.run.shared import Seat as Place
from tba_jax.run.shared import Shared, open_shared
from tba_jax.search.continuous import ContinuousSearch
from tba_jax.weights.merging import MergingTransport
from tba_jax.weights.reading import VersionReader
from tba_jax.weights.versions import PublicationError

_CHECK_S = 0.1  # between two checks whether a worker has failed
_JOIN_RETRY_S = 0.5  # between two join requests to a trainer that does not respond


@dataclasses.dataclass(frozen=True)
class SearchProcess:
    """The searchers of a process, before they have joined.

    Attributes:
        searchers: their IDs in the run.
        reader: reads published weights.
        evaluator: works on evaluation shards, with a station for each searcher.
        first_positions: state of each prompt stream before its first prompt.
        clock: running time of the run, set by the join response.
    """

    shared: Shared
    search: Search
    searchers: tuple[int, ...]
    reader: VersionReader
    evaluator: Evaluator
    first_positions: tuple[Mapping[str, Any], ...]
    clock: RunClock


def open_search_process(
    config: Config,
    workdir: Path,
    searchers: Sequence[int],
    note: Callable[[str], None],
) -> SearchProcess:
    """Build searchers on the devices of this process.

    Args:
        config: validated.
        workdir: of the run; every machine sees it.
        searchers: consecutive searcher IDs.
        note: receives one line about the task.

    Raises:
        PlacementError: too few devices. ValueError: as `open_shared`.
    """
    clock = RunClock(time.perf_counter, time.perf_counter())
    place = Place(_sites(config), searchers[0], config.fleet.max_searchers)
    shared = open_shared(config, workdir, cluster=Cluster(), clock=clock, note=note, seat=place)
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
    transport = make_transport(config, shared.policy, shared.sites, workdir, base, None)
    reader = transport.source if isinstance(transport, MergingTransport) else transport
    assert isinstance(reader, VersionReader)
    search = build_searchers(
        shared, transport=transport, references=references, wants_given=False, note=note
    )
    graders = [searcher.parts.grader for searcher in search.searchers]
    evaluator = build_evaluator(shared, search.decoders, graders, references, note)
    positions = tuple(stream.state() for stream in search.streams)
    return SearchProcess(shared, search, tuple(searchers), reader, evaluator, positions, clock)


def _sites(config: Config) -> Sites:
    """All devices of this process for its searchers; the first ones' devices read weights."""
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
    turns = turns_for([reading, *meshes], timeout_s=config.log.watchdog_s / 2)
    where = Site(reading, turns)
    return Sites(where, where, tuple(Site(mesh, turns) for mesh in meshes))


def search(
    process: SearchProcess, server: SearchRequests, host: str, log: Callable[[str], None]
) -> str:
    """Search until the search server dismisses this process; return the reason.

    Args:
        process: the searchers.
        server: search server of the run, or a channel to it.
        host: name of this machine, for log lines.
        log: receives one line for each event.

    Raises:
        WorkerError: a searcher failed. TimeoutError: the trainer does not respond.
    """
    identity = identity_of(process.shared)
    timeout_s = 2 * process.shared.config.fleet.trainer_silence_s
    while True:
        request = JoinRequest(process.searchers, host, identity)
        response = _join(server, request, process.clock, timeout_s)
        if response.refusal == RUN_ENDED:
            # The trainer still computes its closing figures; this process has nothing left to do.
            return RUN_ENDED
        if response.refusal:
            return f"refused: {response.refusal}"
        try:
            _search_once(process, server, response, timeout_s)
        except Rewind as rewind:
            log(str(rewind))
        except Dismissed as dismissed:
            return str(dismissed)


def _join(
    server: SearchRequests, request: JoinRequest, clock: RunClock, timeout_s: float
) -> JoinResponse:
    """Send join requests until one is answered."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            response = server.join(request)
        except Unreachable as error:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the trainer has not responded for {timeout_s:.0f} s ({error}). The same "
                    "command resumes the run"
                ) from error
            time.sleep(_JOIN_RETRY_S)
            continue
        clock.set(response.run_s)
        return response


def _search_once(
    process: SearchProcess, server: SearchRequests, response: JoinResponse, timeout_s: float
) -> None:
    """Search for this search server until a client raises Rewind or Dismissed."""
    stop = StopFlag()
    process.reader.forget()
    process.reader.ring(response.version)
    workers = [
        Worker("weight-reader", functools.partial(process.reader.poll, DELIVERY_S), stop),
        *(
            worker
            for i, start in enumerate(response.starts)
            for worker in _workers(process, i, start, server, stop, timeout_s)
        ),
    ]
    for worker in workers:
        worker.start()
    try:
        while not stop.wait(_CHECK_S):
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
    """Return a shard of the evaluation of a version; None where its weights are gone."""
    transport = process.search.transport
    latest = transport.latest(i)
    if latest is not None and latest.version == version:
        params = latest.params
    else:
        try:
            found = process.reader.at(version)
        except PublicationError:
            return None  # the trainer has the weights and evaluates the shard itself
        if isinstance(transport, MergingTransport):
            found = transport.merged(found)
        params = found[i]
    return process.evaluator.part(params, shard, i)


def _workers(
    process: SearchProcess,
    i: int,
    start: SearcherStart,
    server: SearchRequests,
    stop: StopFlag,
    timeout_s: float,
) -> list[Worker]:
    """Return the workers of one searcher: decoding, grading, messages."""
    searcher, outbox = process.search.searchers[i], process.search.outboxes[i]
    position = dict(start.position)
    if position["prompt_state"] is None:
        position["prompt_state"] = process.first_positions[i]
    outbox.start_from(position)
    searcher.restore(PartState({}, {"decoded_tokens": 0, "idle_s": 0.0, "num_chunks": 0}))
    quota, leased = TicketQuota(), LeasedShard()
    continuous = ContinuousSearch(
        searcher,
        quota,
        swaps_in_flight=swaps_in_flight(process.shared.config),
        log_event=lambda event: None,
    )

    def step() -> bool:
        """An evaluation shard comes before the next chunk."""
        if (lease := leased.start()) is not None:
            leased.finish(lease, _evaluate(process, i, *lease))
            return True
        return continuous.step()

    decoding = Worker(f"searcher-{searcher.index}", step, stop, idle_s=POLL_S)

    def newest() -> int:
        """Version with which the next ticket would start."""
        published = process.reader.latest(i)
        return -1 if published is None else published.version

    client = SearcherClient(
        start,
        server,
        outbox,
        quota,
        leased,
        # A ticket that is admitted before there are weights would only grow stale.
        room=lambda: continuous.room if newest() >= 0 else 0,
        heartbeat=lambda put_s: Heartbeat(
            decoding.idle_total_s, put_s, continuous.slot_use(), version=newest()
        ),
        on_version=process.reader.ring,
        clock=time.monotonic,
        timeout_s=timeout_s,
    )
    return [
        decoding,
        Worker(f"grader-{searcher.index}", continuous.grade, stop, idle_s=POLL_S),
        Worker(f"client-{searcher.index}", client.step, stop, idle_s=POLL_S),
    ]
