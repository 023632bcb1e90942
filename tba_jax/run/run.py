# SPDX-License-Identifier: Apache-2.0
"""A run from its config to its report: in one process, as a fleet, or as a job.

`train` and `run_job` claim the work directory and join the processes; `conduct` trains and reports.
In a job of `jax.distributed` every process calls `run_job`; the placement says which of them train,
search, or do both. They exchange the command and the owner's address first; afterwards processes
that only search take part in no collective. No heavy module is imported before a run needs it.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tba_jax.config.devices import asked
from tba_jax.config.schema import Config
from tba_jax.devices.cluster import CONTINUE, Cluster, PeerError, peer_errors
from tba_jax.devices.placement import divide, hosts_of
from tba_jax.devices.worker import StopFlag
from tba_jax.remote.channel import RunEnded, Unreachable
from tba_jax.remote.client import Client
from tba_jax.run.peers import OwnerServer, connect, start_cluster
from tba_jax.run.workdir import (
    Outcome,
    begin_run,
    claim,
    claim_together,
    finished_before,
    holds_run,
    is_finished,
)
from tba_jax.storage.whole_files import is_address

if TYPE_CHECKING:
    from tba_jax.run.lock import Hold

_POLL_S = 1.0  # seconds between two requests of an idle process whether the run has ended


def train(
    config: Config,
    workdir: Path | str,
    *,
    interrupted: Callable[[], bool] = lambda: False,
    start_s: float | None = None,
    callbacks: Sequence[Callable[..., Any]] = (),
) -> Outcome:
    """Train in this process: begin a run, or continue the run in the work directory.

    Args:
        config: validated config of the run.
        workdir: folder that is created or holds a run with this config; or gs://BUCKET/FOLDER, for
            a run in one process.
        interrupted: returns True if the run must stop; an interrupted run can be continued.
        start_s: value of `time.perf_counter` at which the run's clock starts; None: now.
        callbacks: functions of (step, values), called after each step; placement is not fleet.

    Raises:
        UserError: the directory holds another run, or another process holds it; or the reward
            function cannot be used.
    """
    start_s = time.perf_counter() if start_s is None else start_s
    with _claimed(config, workdir) as (folder, hold):
        if hold is None:
            return finished_before(config, folder)
        if config.placement == "fleet":
            from tba_jax.run.fleet import train_fleet

            return train_fleet(config, folder, hold, interrupted=interrupted)
        from tba_jax.run.conduct import conduct

        return conduct(
            config,
            folder,
            start_cluster(config),
            interrupted,
            hold=hold,
            start_s=start_s,
            callbacks=callbacks,
        )


@contextlib.contextmanager
def _claimed(config: Config, workdir: Path | str) -> Iterator[tuple[Path, "Hold | None"]]:
    """Hold a work directory while a run uses it.

    Args:
        workdir: folder, or address in an object store.

    Yields:
        The local folder of the run, and its lock; None instead of the lock if the run is finished.
    """
    if not is_address(workdir):
        hold = claim(Path(workdir), config)
        with hold or contextlib.nullcontext():
            yield Path(workdir), hold
        return
    from tba_jax.run.object_store import opened, upload

    with opened(str(workdir)) as (folder, hold):
        if not holds_run(folder, config):
            begin_run(folder, config)
            upload(folder)
        is_done = is_finished(folder, config.num_steps)
        yield folder, None if is_done else hold


# Jobs of several processes.


class Roles(NamedTuple):
    """Roles of the processes of a job, by their indices.

    Attributes:
        train: processes with devices of the trainer; the first owns the replay buffer.
        search: process -> IDs of its searchers; processes without searchers are left out.
    """

    train: tuple[int, ...]
    search: Mapping[int, tuple[int, ...]]


def roles_of(config: Config, devices: Sequence[Any]) -> Roles:
    """Return the roles of all processes of a job.

    Args:
        devices: devices of all processes.

    Raises:
        PlacementError: the devices cannot be divided as the placement says.
    """
    hosts = hosts_of(devices)
    found = {h: divide(config.placement, devices, asked(config), h) for h in hosts}
    search = {
        h: tuple(range(a.first_searcher, a.first_searcher + len(a.groups)))
        for h, a in found.items()
        if a.groups
    }
    return Roles(tuple(hosts_of(found[hosts[0]].trainer)), search)


def run_job(
    config: Config,
    workdir: Path,
    cluster: Cluster,
    interrupted: Callable[[], bool],
    *,
    start_s: float,
    held: contextlib.ExitStack,
) -> tuple[Cluster, Outcome | None]:
    """Train, search, or both, by the role of this process, until the run ends or is interrupted.

    Args:
        workdir: work directory of the run; every process sees it.
        cluster: all processes of the job, all of which call this.
        held: exit stack that releases the work directory and the channel when it closes.

    Returns:
        The processes that train, and the outcome; None in a process that only searches.

    Raises:
        UserError: the commands of the processes differ, or the work directory is refused.
        PeerError: another process ended.
    """
    import jax

    from tba_jax.run.conduct import conduct

    roles = roles_of(config, jax.devices())
    is_done, hold = claim_together(cluster, config, workdir, held, owner=roles.train[0])
    trains = cluster.number in roles.train
    trainers = cluster.among(roles.train) if trains else cluster
    if is_done:
        return trainers, finished_before(config, workdir) if trains else None
    link = connect(config, cluster, roles.train)
    if isinstance(link, OwnerServer):
        held.callback(link.close)
    if not trains:
        assert isinstance(link, Client), "the owner trains"
        _search(config, workdir, cluster, link, roles, interrupted)
        return cluster, None
    with peer_errors(trainers):
        outcome = conduct(
            config, workdir, trainers, interrupted, hold=hold, start_s=start_s, link=link
        )
    return trainers, outcome


def _search(
    config: Config,
    workdir: Path,
    cluster: Cluster,
    link: Client,
    roles: Roles,
    interrupted: Callable[[], bool],
) -> None:
    """Search until the run ends; a process without searchers waits for the end."""
    from tba_jax.run.search_process import open_search_process, search

    searchers = roles.search.get(cluster.number)
    if searchers is None:
        _wait_for_end(link, config.log.watchdog_s)
        return
    process = open_search_process(
        config, workdir, searchers, cluster=cluster.alone(), wants_stop=interrupted
    )
    try:
        process.shared.rewards.check()
        search(process, link, StopFlag())
    finally:
        process.shared.rewards.close()


def _wait_for_end(link: Client, limit_s: float) -> None:
    """Wait until the run ends.

    Raises:
        PeerError: the owner does not respond for `limit_s`.
    """
    last_s = time.monotonic()
    while True:
        try:
            link.join((), "")
            last_s = time.monotonic()
        except RunEnded:
            return
        except Unreachable as error:
            if time.monotonic() - last_s > limit_s:
                raise PeerError(
                    f"the first trainer process has not responded for {limit_s:.0f} s ({error}). "
                    f"{CONTINUE}"
                ) from error
        time.sleep(_POLL_S)
