# SPDX-License-Identifier: Apache-2.0
"""A trainer of several processes in a fleet: the first has the desk and the buffer, all train.

They are one job of `jax.distributed`, as the hosts that train with placement=whole_hosts are: one
StepPlan, batches from the first, weights and checkpoints written together. Searchers know the first
alone. No process of a gang evaluates: a version lies on all of them. Invariant: what one member
does in its loop, all do, in the same order.
"""

import time
import uuid
from collections.abc import Callable, Collection
from typing import Any

from tba_jax.config.schema import Config
from tba_jax.devices.cluster import Address, Cluster, start
from tba_jax.remote.search_server import SearchServer
from tba_jax.replay.outbox import Outbox
from tba_jax.run import evaluations
from tba_jax.run.async_search import POLL_S, drive_async
from tba_jax.run.errors import FleetError
from tba_jax.run.run import Run
from tba_jax.run.shared import Shared
from tba_jax.run.whole_hosts.home import RemoteSearcher
from tba_jax.run.whole_hosts.remote_search import RemoteSearch
from tba_jax.weights.remote import Members, VersionWriter


def join_gang(config: Config, coordinator: str, number: int) -> Cluster:
    """Join the other members; before the first use of a device.

    Args:
        config: of the run.
        coordinator: HOST:PORT, of the first member.
        number: of this one, from 0.

    Raises:
        PeerError: they do not come.
    """
    return start(
        Address(coordinator, config.fleet.trainer_hosts, number),
        num_cpu_devices=config.num_cpu_devices,
        heartbeat_s=config.pod.heartbeat_s,
        shutdown_s=int(config.log.watchdog_s),
    )


def make_gang_search(
    shared: Shared, publish: Callable[[Any], Any], kept: Callable[[], Collection[int]]
) -> RemoteSearch:
    """The searchers of the run as a member has them: the first one keeps count of all.

    Args:
        shared: what its parts stand on; all members call this.
        publish: copy and cast of the weights.
        kept: versions that stay on disk beyond the newest.
    """
    config, cluster = shared.config, shared.cluster
    transport = VersionWriter(
        str(shared.workdir),
        publish,
        session=cluster.broadcast_json(uuid.uuid4().hex[:16]),
        members=Members(cluster.number, cluster.members),
        keep=config.sync.keep,
        timeout_s=config.checkpoint.timeout_s,
        kept=kept,
    )
    slots = range(config.fleet.max_searchers if cluster.is_primary else 0)
    keepers = tuple(RemoteSearcher(i, Outbox(config.search.outbox_bytes)) for i in slots)
    return RemoteSearch(transport, None, keepers)


def follow(run: Run, interrupted: Callable[[], bool]) -> None:
    """Train on what the first member draws, until the last step or an interruption."""
    drive_async(run, interrupted)
    publish_last(run)


def publish_last(run: Run) -> bool:
    """Publish the final policy, where it is still to be evaluated; a call of all members."""
    if run.trainer.step_index < run.config.num_steps:
        return False
    if evaluations.newest_evaluated(run) >= run.config.num_steps:
        return False
    run.trainer.publish()
    run.search.transport.poll()
    return True


def evaluate_last(run: Run, server: SearchServer) -> None:
    """Have searchers evaluate the final policy, which is published; for the first member.

    Raises:
        FleetError: nobody does.
    """
    version = run.trainer.step_index
    limit_s = run.config.fleet.trainer_silence_s
    run.logs.progress.phase("searchers evaluate the final policy")
    server.set_version(version)
    run.evaluations.request(version, [None])
    alone_since = time.monotonic()
    while not run.evaluations.is_idle:
        run.evaluations.merge()
        server.lose_silent_searchers()
        now = time.monotonic()
        alone_since = now if server.gives_leases else alone_since
        if now - alone_since > limit_s:
            raise FleetError(
                f"no searcher has come for {limit_s:.0f} s (config.fleet.trainer_silence_s) to "
                "evaluate the final policy; it is saved, and the same command goes on from there"
            )
        time.sleep(POLL_S)
    run.record_evaluations()
