# SPDX-License-Identifier: Apache-2.0
"""A run from its config to its report: in one process, as a fleet, or as a job.

`train` and `run_job` claim the work directory and join the processes; `conduct` trains and reports.
In a job of `jax.distributed` every process calls `run_job`; the placement says which of them train,
search, or do both. No heavy module is imported before a run needs it.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba_jax.config.resolved import asked
from tba_jax.config.schema import Config
from tba_jax.devices.cluster import Cluster, peer_errors
from tba_jax.devices.placement import divide, hosts_of
from tba_jax.devices.worker import StopFlag
from tba_jax.remote.channel import ChannelServer
from tba_jax.remote.client import Client
from tba_jax.run.peers import connect, start_cluster
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

        cluster = start_cluster(config)
        return conduct(
            config, folder, cluster, interrupted, hold=hold, start_s=start_s, callbacks=callbacks
        )


@contextlib.contextmanager
def _claimed(config: Config, workdir: Path | str) -> Iterator[tuple[Path, "Hold | None"]]:
    """Hold a work directory while a run uses it; an address stands for a local folder.

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
        PlacementError: the devices cannot be divided as the placement says.
        PeerError: another process ended.
    """
    import jax

    from tba_jax.run.conduct import conduct

    division = divide(config.placement, jax.devices(), asked(config), cluster.number)
    training = tuple(hosts_of(division.trainer))
    is_done, hold = claim_together(cluster, config, workdir, held, owner=training[0])
    trains = cluster.number in training
    trainers = cluster.among(training) if trains else cluster
    if is_done:
        return trainers, finished_before(config, workdir) if trains else None
    link = connect(config, cluster, training)
    if isinstance(link, ChannelServer):
        held.callback(link.close)
    if not trains:
        assert isinstance(link, Client), "the owner trains"
        first = division.first_searcher
        searchers = range(first, first + len(division.groups))
        _search(config, workdir, cluster, link, searchers, interrupted)
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
    searchers: Sequence[int],
    interrupted: Callable[[], bool],
) -> None:
    """Search until the run ends; a process without searchers waits for the end."""
    from tba_jax.run.search_process import search, wait_for_end
    from tba_jax.run.shared import open_searchers

    if not searchers:
        wait_for_end(link)
        return
    shared, parts, weights = open_searchers(config, workdir, searchers, cluster.alone())
    try:
        shared.rewards.check()
        stop = StopFlag()
        search(shared.identity, parts, weights, link, stop=stop, wants_stop=interrupted)
    finally:
        shared.rewards.close()
