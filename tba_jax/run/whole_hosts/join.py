# SPDX-License-Identifier: Apache-2.0
"""A process joins a run in which some hosts train and others search, and does its part.

It knows the roles; what trainers and searchers do is elsewhere. Invariant: a host that searches
returns from here when the run is over, and has taken part in no collective.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax

from tba_jax.config.devices import validate_devices
from tba_jax.config.schema import Config
from tba_jax.devices.cluster import Cluster
from tba_jax.run.lock import Hold
from tba_jax.run.whole_hosts.searching_host import serve
from tba_jax.run.whole_hosts.team import Team, meet_at_home, meet_elsewhere, roles_of


class Joined(NamedTuple):
    """What a host that trains goes on with.

    Attributes:
        cluster: the hosts that train.
        is_finished: the run was finished before.
        hold: of the work directory, on the first of them.
        team: the hosts that search for them.
    """

    cluster: Cluster
    is_finished: bool
    hold: Hold | None
    team: Team


def join(
    config: Config,
    workdir: Path,
    cluster: Cluster,
    interrupted: Callable[[], bool],
    held: contextlib.ExitStack,
    start_s: float,
) -> Joined | None:
    """Meet the other hosts; search, where this one does, until the run is over.

    Args:
        config: of the run.
        workdir: its directory.
        cluster: all processes.
        interrupted: whether this process is asked to stop.
        held: lets go of the work directory when it ends.
        start_s: `time.perf_counter` when the run's time began to count.

    Returns:
        For a host that trains: what it goes on with; None for the others.

    Raises:
        ConfigError, PlacementError: the devices do not fit the placement.
        UserError, PeerError: as `meet_at_home` and `meet_elsewhere`.
    """
    validate_devices(config, len(jax.local_devices()), cluster.num_processes)
    roles = roles_of(config, jax.devices())
    if cluster.number in roles.train:
        cluster = cluster.among(roles.train)
        return Joined(cluster, *meet_at_home(cluster, config, workdir, roles, held))
    alone = cluster.alone()
    is_finished, team = meet_elsewhere(config, workdir, cluster.number, roles)
    if not is_finished:
        serve(config, workdir, alone, team, roles, interrupted, start_s)
    return None
