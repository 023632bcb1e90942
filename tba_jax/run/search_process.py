# SPDX-License-Identifier: Apache-2.0
"""The searchers of a process whose owner is in another process.

A process that only searches reads published weights from storage; a trainer process of a pod also
searches, with the weights in its memory. Invariant: after a rewind no response and no weights of
the previous trainer are used (tests/integration/test_fleet.py).
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from tba_jax.config.schema import Config
from tba_jax.devices.cluster import CONTINUE, Cluster, PeerError
from tba_jax.devices.placement import MESH_AXES, PlacementError
from tba_jax.devices.site import Site, Sites, device_lock_for
from tba_jax.devices.worker import StopFlag, Worker, WorkerError
from tba_jax.remote.channel import Refused, Rewind, RunEnded, Unreachable
from tba_jax.remote.client import Client
from tba_jax.remote.messages import Heartbeat
from tba_jax.run.shared import (
    RunClock,
    Shared,
    build_judging,
    make_searchers,
    make_stored_weights,
    open_shared,
)
from tba_jax.search.searcher import Searcher, SearchParts
from tba_jax.weights.folder import StoredWeights
from tba_jax.weights.memory import DELIVERY_S, Weights

POLL_S = 0.002
"""Sleep of a thread that has nothing to do."""
STOP_S = 10.0
"""Time that threads get to end their current step."""
_CHECK_S = 0.1  # seconds between two checks whether a worker has failed
_JOIN_RETRY_S = 0.5  # seconds between two join requests to a trainer that does not respond


@dataclasses.dataclass(frozen=True)
class SearchProcess:
    """The searchers of a process before they join an owner.

    Attributes:
        weights: source of the weights that the searchers sample with.
        wants_stop: returns whether this process received a stop signal; sent to the owner.
    """

    shared: Shared
    parts: tuple[SearchParts, ...]
    weights: StoredWeights | Weights
    wants_stop: Callable[[], bool] = lambda: False


def open_search_process(
    config: Config,
    workdir: Path,
    searchers: Sequence[int],
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
        note=lambda line: None,
        sites=_fleet_sites(config, searchers[0]) if cluster is None else None,
    )
    weights = make_stored_weights(shared)
    parts = make_searchers(shared, weights, build_judging(shared))
    return SearchProcess(shared, parts, weights, wants_stop)


def _fleet_sites(config: Config, first_searcher: int) -> Sites:
    """Divide the devices of this process among its searchers.

    Weights are read from storage with the devices of the first searcher.
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
    lock = device_lock_for([reading, *meshes])
    where, searching = Site(reading, lock), tuple(Site(mesh, lock) for mesh in meshes)
    num_searchers = config.fleet.max_searchers
    return Sites(where, where, searching, first_searcher, num_searchers, trains=False)


def search(process: SearchProcess, client: Client, stop: StopFlag) -> None:
    """Search until the run ends, or `stop` is set.

    Raises:
        PeerError: the owner refuses this process, or does not respond.
        WorkerError: a searcher failed.
    """
    indices = [parts.index for parts in process.parts]
    last_s = time.monotonic()
    while not stop.is_set():
        try:
            joined = client.join(indices, process.shared.identity)
            process.shared.clock.set(joined.run_s)
            _search_once(process, client, joined.version, stop)
        except RunEnded:
            return  # the trainer still computes final results; this process has no more work
        except Rewind as rewind:
            client.log(str(rewind))
        except Refused as error:
            raise PeerError(f"{client.host} may not search: {error}") from error
        except Unreachable as error:
            if time.monotonic() - last_s > client.timeout_s:
                raise PeerError(
                    f"the trainer has not responded for {client.timeout_s:.0f} s ({error}). "
                    f"{CONTINUE}"
                ) from error
            stop.wait(_JOIN_RETRY_S)
            continue
        last_s = time.monotonic()


def _search_once(process: SearchProcess, client: Client, version: int, outer: StopFlag) -> None:
    """Run the searchers until the client raises an error, or `outer` is set."""
    stop = StopFlag()
    process.weights.reset(version)
    client.on_versions = process.weights.announce
    searchers = [Searcher(parts, client) for parts in process.parts]
    pairs = [search_workers(each, stop) for each in searchers]

    def send() -> bool:
        for searcher, (decoding, _) in zip(searchers, pairs, strict=True):
            counts = searcher.decode_counts()
            heartbeat = Heartbeat(decoding.idle_total_s, counts, process.wants_stop())
            client.beat(searcher.index, heartbeat)
        return client.exchange()

    workers = [
        Worker("weight-reader", lambda: process.weights.poll(DELIVERY_S), stop),
        *(worker for pair in pairs for worker in pair),
        Worker("client", send, stop, idle_s=POLL_S),
    ]
    for worker in workers:
        worker.start()
    try:
        while not stop.wait(_CHECK_S) and not outer.is_set():
            pass
        stop.check()
    except WorkerError as error:
        if isinstance(error.__cause__, Rewind | RunEnded | Refused):
            raise error.__cause__ from None
        raise
    finally:
        stop.set()
        deadline = time.monotonic() + STOP_S
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))


def search_workers(searcher: Searcher, stop: StopFlag) -> list[Worker]:
    """Return the two workers of a searcher: decoding and grading."""
    return [
        Worker(f"searcher-{searcher.index}", searcher.step, stop, idle_s=POLL_S),
        Worker(f"grader-{searcher.index}", searcher.grade, stop, idle_s=POLL_S),
    ]
