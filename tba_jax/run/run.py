# SPDX-License-Identifier: Apache-2.0
"""A run from its config to its report: in one process, as a fleet, or as a job.

`train` claims the work directory and joins the processes; `conduct` trains and reports. In a job of
`jax.distributed` every process calls `train`; the placement says which of them train, search, or do
both. No heavy module is imported before a run needs it.
"""

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tba_jax.config.command_line import versions
from tba_jax.config.resolved import asked
from tba_jax.config.schema import Config, flatten
from tba_jax.devices.cluster import Cluster, peer_errors
from tba_jax.devices.placement import divide, hosts_of
from tba_jax.devices.worker import StopFlag
from tba_jax.remote.channel import ChannelServer
from tba_jax.remote.client import Client
from tba_jax.run.errors import UserError
from tba_jax.run.peers import connect, start_cluster
from tba_jax.run.workdir import begin_run, code_version, finished_report, hold, holds_run, opened
from tba_jax.storage.whole_files import is_address


def train(
    config: Config,
    workdir: Path | str,
    *,
    interrupted: Callable[[], bool] = lambda: False,
    start_s: float | None = None,
    callbacks: Sequence[Callable[..., Any]] = (),
    job: Cluster | None = None,
) -> dict[str, Any] | None:
    """Begin a run, or continue the run in the work directory, until its end or an interruption.

    Args:
        workdir: folder that is created or holds a run with this config, visible to every process;
            or gs://BUCKET/FOLDER, for a run in one process.
        interrupted: returns True if the run must stop; an interrupted run can be continued.
        start_s: value of `time.perf_counter` at which the run's clock starts; None: now.
        callbacks: functions of (step, values), called after each step; placement is not fleet.
        job: all processes of the job, which call this function and are disconnected after the run;
            None: this process alone.

    Returns:
        Contents of report.json; None in other processes than the first one that trains.

    Raises:
        UserError: the commands of the processes differ; the directory holds another run, or another
            process holds it; or the reward function cannot be used.
        PlacementError, PeerError: the devices do not fit the placement; another process ended.
    """
    start_s = time.perf_counter() if start_s is None else start_s
    processes, training, searchers = job or Cluster(), (0,), range(0)
    if processes.num_processes > 1:
        import jax

        found = divide(config.placement, jax.devices(), asked(config), processes.number)
        training = tuple(hosts_of(found.trainer))
        searchers = range(found.first_searcher, found.first_searcher + len(found.groups))
    is_owner = processes.number == training[0]
    with contextlib.ExitStack() as held:
        folder, flag = _claim_together(processes, config, workdir, training[0], held)
        report = finished_report(folder, config.num_steps) if is_owner else None
        if processes.gather_json(report is not None)[training[0]]:
            if is_owner:
                print("This run is finished. --workdir=DIR begins another run.")
        elif config.placement == "fleet":
            from tba_jax.run.fleet import train_fleet

            assert flag is not None, "one process drives a fleet"
            report = train_fleet(config, folder, flag, interrupted=interrupted)
        else:
            processes = job or start_cluster(config)
            link = connect(config, processes, training)
            if isinstance(link, ChannelServer):
                held.callback(link.close)
            if processes.number in training:
                from tba_jax.run.conduct import conduct

                cluster = processes.among(training)
                options: Any = {"hold": flag, "start_s": start_s, "callbacks": callbacks}
                with peer_errors(cluster):
                    report = conduct(config, folder, cluster, interrupted, link=link, **options)
            else:
                from tba_jax.run.search_process import search_apart

                assert isinstance(link, Client), "the owner trains"
                cluster = processes.among((processes.number,))
                search_apart(config, folder, searchers, link, cluster, interrupted)
        processes.close()  # the others may still request steps or tickets
    return report if is_owner else None


def claim(workdir: Path | str, config: Config, held: contextlib.ExitStack) -> tuple[Path, StopFlag]:
    """Lock a work directory until `held` closes, and begin its run unless it holds one.

    Return the local folder of the run, and the flag of `hold`.

    Raises:
        UserError: another process holds the directory, or it holds another run.
        OSError: it cannot be written.
    """
    is_run = False
    if is_address(workdir):
        folder, flag = held.enter_context(opened(str(workdir)))
    else:
        folder = Path(workdir)
        is_run = holds_run(folder, config)  # a refused folder gets no lock file
        flag = held.enter_context(hold(folder))
    if not holds_run(folder, config) and not is_run:  # no other process can begin a run now
        begin_run(folder, config)
    return folder, flag


def _claim_together(
    processes: Cluster, config: Config, workdir: Path | str, owner: int, held: contextlib.ExitStack
) -> tuple[Path, StopFlag | None]:
    """Check that every process has the same command; the owner claims the directory for all.

    Return the results of `claim` in the owner; the directory and None in other processes.

    Raises:
        UserError: commands differ, or the directory is refused; raised in all processes.
    """
    mine = {**flatten(config), **versions(), "code": code_version(), "workdir": str(workdir)}
    given = processes.gather_json(json.loads(json.dumps(mine)))
    found, refusal = (Path(workdir), None), ""
    for name, value in given[0].items():
        for number in (i for i, other in enumerate(given) if other.get(name) != value):
            refusal = (
                f"process {number} was started with another command than process 0: {name}: "
                f"{value!r} -> {given[number].get(name)!r}. Start the same command, with the same "
                "version of tba_jax, on every host"
            )
    if processes.number == owner and not refusal:
        try:
            found = claim(workdir, config, held)
        except (UserError, OSError) as error:
            if processes.num_processes == 1:
                raise
            refusal = str(error)
    if refusal := processes.gather_json(refusal)[owner]:
        with contextlib.suppress(RuntimeError):  # lost: this process has the reason
            processes.close()  # a process that ended now would end the others before their message
        raise UserError(refusal)
    if not found[0].is_dir():
        raise UserError(
            f"process {processes.number} does not see the work directory {workdir} that process "
            f"{owner} made. Give a --workdir on a file system that all hosts share"
        )
    return found
