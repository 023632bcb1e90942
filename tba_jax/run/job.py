# SPDX-License-Identifier: Apache-2.0
"""A process of a job of `jax.distributed`: it trains, searches, or does both.

The placement says which process does what. All of them exchange the command and the owner's address
first; afterwards processes that only search take part in no collective.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from tba_jax.config.devices import asked, validate_devices
from tba_jax.config.schema import Config
from tba_jax.devices.cluster import CONTINUE, Cluster, PeerError, peer_errors
from tba_jax.devices.placement import arrange
from tba_jax.devices.slices import hosts_of
from tba_jax.remote.channel import Unreachable
from tba_jax.remote.messages import RUN_ENDED, JoinRequest
from tba_jax.remote.search_channel import RemoteSearchServer
from tba_jax.run.conduct import conduct
from tba_jax.run.peers import Follower, connect
from tba_jax.run.search_process import open_search_process, search
from tba_jax.run.workdir import Outcome, claim_together, finished_before

_POLL_S = 1.0  # between two questions of an idle process whether the run has ended


class Roles(NamedTuple):
    """What the processes of a job do, by their numbers.

    Attributes:
        train: processes with devices of the trainer; the first owns the replay buffer.
        search: IDs of the searchers of each process that has some.
    """

    train: tuple[int, ...]
    search: Mapping[int, tuple[int, ...]]


def roles_of(config: Config, devices: Sequence[Any]) -> Roles:
    """Return what every process of a job does.

    Args:
        config: of the run.
        devices: of all processes.

    Raises:
        PlacementError: the devices cannot be divided as the placement says.
    """
    hosts = hosts_of(devices)
    found = {h: arrange(config.placement, devices, asked(config), h) for h in hosts}
    train = tuple(hosts_of(found[hosts[0]].trainer))
    search = {
        h: tuple(range(a.first_searcher, a.first_searcher + len(a.groups)))
        for h, a in found.items()
        if a.groups
    }
    return Roles(train, search)


def run_job(
    config: Config,
    workdir: Path,
    cluster: Cluster,
    interrupted: Callable[[], bool],
    *,
    accept_changed: Collection[str],
    start_s: float,
    held: contextlib.ExitStack,
) -> tuple[Cluster, Outcome | None]:
    """Do what this process of a job does, until the run ends or is interrupted.

    Args:
        config: validated.
        workdir: of the run; every process sees it.
        cluster: all processes of the job, all of which call this.
        interrupted: whether this process was told to stop.
        accept_changed: as in `conduct`.
        start_s: `time.perf_counter` when the run's time began to count.
        held: releases the work directory and the channel when it closes.

    Returns:
        The processes that train, and the outcome; None in a process that only searches.

    Raises:
        UserError: the commands of the processes differ, or the work directory is refused.
        PeerError: another process is gone. Else what `conduct` raises.
    """
    validate_devices(config, len(jax.local_devices()), cluster.num_processes)
    roles = roles_of(config, jax.devices())
    is_finished, hold = claim_together(cluster, config, workdir, held, owner=roles.train[0])
    trains = cluster.number in roles.train
    if is_finished:
        trainers = cluster.among(roles.train) if trains else cluster
        return trainers, finished_before(config, workdir) if trains else None
    link = connect(config, cluster, roles.train)
    if link is not None:
        held.callback(link.close)
    if not trains:
        assert isinstance(link, Follower)
        _search(config, workdir, cluster, link, roles, interrupted)
        return cluster, None
    trainers = cluster.among(roles.train)
    with peer_errors(trainers):
        outcome = conduct(
            config,
            workdir,
            trainers,
            interrupted,
            hold=hold,
            accept_changed=accept_changed,
            start_s=start_s,
            link=link,
        )
    return trainers, outcome


def _search(
    config: Config,
    workdir: Path,
    cluster: Cluster,
    link: Follower,
    roles: Roles,
    interrupted: Callable[[], bool],
) -> None:
    """Search until the run ends; a process without searchers waits for that."""
    server = RemoteSearchServer(link.channel)
    host = f"process {cluster.number} on {socket.gethostname()}"
    searchers = roles.search.get(cluster.number)
    if searchers is None:
        _wait_for_end(server, host, config.log.watchdog_s)
        return
    process = open_search_process(
        config,
        workdir,
        searchers,
        lambda text: None,
        cluster=cluster.alone(),
        wants_stop=interrupted,
    )
    try:
        process.shared.rewards.check()
        reason = search(process, server, host, lambda text: None)
    finally:
        process.shared.rewards.close()
    if not reason.endswith(RUN_ENDED):
        raise PeerError(f"process {cluster.number} may not search: {reason}")


def _wait_for_end(server: RemoteSearchServer, host: str, limit_s: float) -> None:
    """Wait until the run ends.

    Raises:
        PeerError: the owner does not respond for `limit_s`.
    """
    last_s = time.monotonic()
    while True:
        try:
            if server.join(JoinRequest((), host, {})).refusal == RUN_ENDED:
                return
            last_s = time.monotonic()
        except Unreachable as error:
            if time.monotonic() - last_s > limit_s:
                raise PeerError(
                    f"the first trainer process has not responded for {limit_s:.0f} s ({error}). "
                    f"{CONTINUE}"
                ) from error
        time.sleep(_POLL_S)
