# SPDX-License-Identifier: Apache-2.0
"""A run conducted in a claimed work directory: built, driven, evaluated at the end, reported.

It prints nothing but progress; what an outcome means to a user is the command's to say.
"""

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from rich.console import Console

from tba_jax.config.notes import notes
from tba_jax.config.schema import Config, flatten
from tba_jax.devices.cluster import Cluster
from tba_jax.devices.program_cache import open_cache
from tba_jax.report.jsonl import sample_jsonl
from tba_jax.report.lines import wrong_metrics
from tba_jax.report.relay import Display
from tba_jax.report.writers import ProgressDisplay, TensorBoardWriter, WandbWriter
from tba_jax.run import evaluations
from tba_jax.run.async_search import drive_async
from tba_jax.run.build import build
from tba_jax.run.clock import RunClock
from tba_jax.run.closing import write_report_json
from tba_jax.run.errors import WorkdirLost
from tba_jax.run.follow import follow
from tba_jax.run.lock import Hold
from tba_jax.run.peers import Link
from tba_jax.run.rescue import rescue
from tba_jax.run.rewarding import make_task
from tba_jax.run.run import Run
from tba_jax.run.schedule_replay import Schedule, drive_schedule
from tba_jax.run.sync_search import drive_sync
from tba_jax.run.workdir import Outcome

Drive = Callable[[Run, Callable[[], bool]], None]
"""Moves the parts of a run until its last step, or until the function says to stop."""

_SHOWN = 500
"""Lines of metrics.jsonl that the display of a resumed run begins with, evaluations aside."""


def conduct(
    config: Config,
    workdir: Path,
    cluster: Cluster,
    interrupted: Callable[[], bool],
    *,
    hold: Hold | None,
    accept_changed: Collection[str] = (),
    start_s: float,
    display: Display | None = None,
    drive: Drive | None = None,
    link: Link | None = None,
) -> Outcome:
    """Build, drive, evaluate at the end, write the report.

    Args:
        config: validated.
        workdir: claimed.
        cluster: the processes of the run; every one of them calls this.
        interrupted: looked at between steps.
        hold: of the work directory, in process 0; None in the others.
        accept_changed: of `identity.KINDS`, what may have changed since the run was saved.
        start_s: `time.perf_counter` when the run's time began to count.
        display: what is shown goes there; None: to standard output.
        drive: moves the parts in place of the configured driver; `replaying` is one such.
        link: to the other processes of the run; None: there are none.

    Raises:
        UserError: the reward function cannot be used.
        WorkdirLost: the directory is gone, or in other hands.
        ValueError, RuntimeError, OSError: as `build` and the drivers.
    """
    if display is None:
        display = make_display(config, workdir, is_shown=cluster.is_primary)
    run = _open(config, workdir, cluster, start_s, hold, accept_changed, display, link)
    if hold is not None:
        hold.begin()
    try:
        _drive(run, interrupted, drive)
        # Before the final evaluation, which may take long or fail. It is in no checkpoint: a run
        # that is killed in it evaluates again.
        run.save()
        is_finished = run.trainer.step_index >= config.num_steps
        if is_finished:
            _evaluate_at_the_end(run)
        run.logs.progress.phase("saving")
        run.shared.checkpoints.wait()
        run.confirm_hold()
    except BaseException as error:
        run.abort()
        lost = error if isinstance(error, WorkdirLost) else _taken_over(hold, workdir)
        if lost is None:
            raise
        raise WorkdirLost(f"{lost}. {rescue(run)}") from error
    run.close()
    run.confirm_hold()  # closing may take long
    report = write_report_json(run) if cluster.is_primary else {}
    if is_finished and cluster.is_primary:
        from tba_jax.report.build import build_report  # brings the plotting library

        run.confirm_hold()
        build_report(workdir)
    return Outcome(run.trainer.step_index, is_finished, was_finished=False, report=report)


def make_display(config: Config, workdir: Path, *, is_shown: bool = True) -> ProgressDisplay:
    """On standard output, or nowhere."""
    task = make_task(config)
    return ProgressDisplay(
        config.num_steps,
        title=workdir.name,
        kind=task.response_kinds[0] if task.response_kinds else "",
        metric=task.metric,
        console=None if is_shown else Console(quiet=True, force_terminal=False),
    )


def _open(
    config: Config,
    workdir: Path,
    cluster: Cluster,
    start_s: float,
    hold: Hold | None,
    accept_changed: Collection[str],
    progress: Display,
    link: Link | None,
) -> Run:
    """The connected parts, with a display."""
    try:
        taken = hold.taken_over if hold is not None else ""
        for line in (*notes(config), taken, open_cache(config.compilation_cache)):
            if line:
                progress.note(line)
        run = build(
            config,
            workdir,
            cluster=cluster,
            clock=RunClock(time.perf_counter, start_s),
            progress=progress,
            extra_writers=_writers(config, workdir) if cluster.is_primary else (),
            accept_changed=accept_changed,
            link=link,
            # A folder that mirrors an object store is this process's own.
            confirm=hold.confirm if hold is not None and hold.companion is None else _nothing,
        )
        run.hold = hold
        return run
    except BaseException as error:
        progress.close()
        lost = _taken_over(hold, workdir)
        if lost is None:
            raise
        raise WorkdirLost(f"{lost}. This process ends before its first step") from error


def _nothing() -> None:
    """Where nobody else can take the work directory over."""


def _taken_over(hold: Hold | None, workdir: Path) -> WorkdirLost | None:
    """Return why a failure is another process's doing, None where it is not.

    A process that continues after another one has taken its work directory over finds files
    removed or replaced, and fails in many ways.
    """
    if hold is None or not workdir.exists():
        return None
    try:
        hold.confirm()
    except WorkdirLost as lost:
        return lost
    except Exception:  # the failure that is being handled is the news
        return None
    return None


def replaying(schedule: Schedule) -> Drive:
    """What does again what a schedule log says."""
    return lambda run, interrupted: drive_schedule(run, schedule, interrupted)


def _drive(run: Run, interrupted: Callable[[], bool], drive: Drive | None) -> None:
    """From where the run is to its last step, the end of the schedule, or an interruption."""
    config, begun = run.config, run.trainer.step_index
    if begun:
        resume_display(run.logs.progress, run.shared.workdir)
        run.logs.progress.note(
            f"resumed {run.shared.workdir} at step {begun} of {config.num_steps}"
        )
        if run.evaluated.before is None:
            evaluations.evaluate_start_model(run)
    # Searchers of other processes evaluate the final policy, too, which happens in the drive.
    has_others = bool(run.search.remote) or run.shared.is_follower
    if begun < config.num_steps or has_others:
        own = drive_sync if config.driver == "sync" else drive_async
        if run.shared.is_follower:
            own = follow
        (drive or own)(run, interrupted)


def resume_display(progress: Display, workdir: Path) -> None:
    """Begin with the curves of what was done before, however long that was."""
    path = workdir / "metrics.jsonl"
    progress.resume([*sample_jsonl(path, _SHOWN, wrong_metrics, always=b'"eval/n"')])


def _writers(config: Config, workdir: Path) -> list[Any]:
    writers: list[Any] = []
    if config.log.tensorboard:
        writers.append(TensorBoardWriter(workdir / "tensorboard"))
    if config.log.wandb_project:
        writers.append(
            WandbWriter(
                config.log.wandb_project,
                name=workdir.name,
                workdir=workdir,
                config=flatten(config),
            )
        )
    return writers


def _evaluate_at_the_end(run: Run) -> None:
    """Evaluate what the report compares."""
    if run.evaluated.before is None:
        evaluations.evaluate_start_model(run)
    evaluations.evaluate_last(run)
