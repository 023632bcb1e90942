# SPDX-License-Identifier: Apache-2.0
"""One run in a claimed work directory, from the build to the report."""

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from tba_jax.config.command_line import versions
from tba_jax.config.notes import notes
from tba_jax.config.schema import Config, defaults, difference, flatten
from tba_jax.devices.cluster import Cluster
from tba_jax.devices.program_cache import open_cache
from tba_jax.replay.buffer import ReplayBuffer
from tba_jax.report.files import wrong_metrics
from tba_jax.report.jsonl import LogError, jsonable, stream_jsonl
from tba_jax.report.process import ReportProcess
from tba_jax.report.writers import ProgressDisplay, make_tracker
from tba_jax.run.build import build
from tba_jax.run.callbacks import Callbacks
from tba_jax.run.errors import OutOfMemory, out_of_memory
from tba_jax.run.host_state import RunClock
from tba_jax.run.lock import Hold
from tba_jax.run.loop import train
from tba_jax.run.peers import Peer
from tba_jax.run.run import Run
from tba_jax.run.shared import make_task
from tba_jax.run.workdir import Outcome, run_id_of
from tba_jax.storage.whole_files import write_json


def conduct(
    config: Config,
    workdir: Path,
    cluster: Cluster,
    interrupted: Callable[[], bool],
    *,
    hold: Hold | None,
    start_s: float,
    display: ProgressDisplay | None = None,
    link: Peer | None = None,
    callbacks: Sequence[Callable[..., Any]] = (),
) -> Outcome:
    """Build a run, train, evaluate the final policy, write the report.

    Args:
        cluster: the processes of the run; all of them call this function.
        interrupted: function that returns True if the run must stop; called between steps.
        hold: lock of the work directory in process 0; None in the other processes.
        display: display of the progress; None: standard output.
        callbacks: functions of (step, values), called after each step.

    Raises:
        OutOfMemory: device memory ran out before the first update.
        UserError: the reward function cannot be used.
        WorkdirLost: the work directory was removed, or its storage fails.
    """
    if display is None:
        console = None if cluster.is_primary else Console(quiet=True, force_terminal=False)
        display = make_display(config, start_s, console)
    run = _open(config, workdir, cluster, start_s, hold, display, link, callbacks)
    try:
        if begun := run.trainer.step_index:
            resume_display(run.logs.progress, run.shared.workdir)
            run.logs.progress.note(
                f"resumed {run.shared.workdir} at step {begun} of {config.num_steps}"
            )
        train(run, interrupted)
        is_finished = run.trainer.step_index >= config.num_steps
        run.logs.progress.phase("saving")
        run.shared.checkpoints.wait()
    except BaseException as error:
        run.abort()
        if run.trainer.step_index == 0 and (reason := out_of_memory(error)):
            raise OutOfMemory(reason) from error
        raise
    run.close()
    report = write_report_json(run) if cluster.is_primary else {}
    if is_finished and cluster.is_primary:
        from tba_jax.report.build import build_report  # Loads the plotting library.

        build_report(workdir)
    return Outcome(run.trainer.step_index, is_finished, was_finished=False, report=report)


def make_display(
    config: Config, start_s: float | None = None, console: Console | None = None
) -> ProgressDisplay:
    """Return a display of a run; without a console, on standard output."""
    task = make_task(config)
    return ProgressDisplay(
        config.num_steps,
        kind=task.response_kinds[0] if task.response_kinds else "",
        metric=task.metric,
        console=console,
        start_s=start_s,
    )


def _open(
    config: Config,
    workdir: Path,
    cluster: Cluster,
    start_s: float,
    hold: Hold | None,
    progress: ProgressDisplay,
    link: Peer | None,
    callbacks: Sequence[Callable[..., Any]],
) -> Run:
    """Build the run; close the display if the build fails."""
    try:
        named = Callbacks(callbacks, progress.note)
        for line in (*notes(config), open_cache()):
            if line:
                progress.note(line)
        run = build(
            config,
            workdir,
            cluster=cluster,
            clock=RunClock(time.perf_counter, start_s),
            progress=progress,
            extra_writers=_writers(config, workdir) if cluster.is_primary else (),
            link=link,
        )
        run.hold = hold
        run.callbacks = named
        return run
    except BaseException:
        progress.close()
        raise


def resume_display(progress: ProgressDisplay, workdir: Path) -> None:
    """Show metrics that earlier processes of the run logged."""
    progress.resume(stream_jsonl(workdir / "metrics.jsonl", wrong_metrics))


def _writers(config: Config, workdir: Path) -> list[Any]:
    writers: list[Any] = [ReportProcess(workdir, config.report.period_s)]
    if tracker := config.log.tracker:
        writers.append(make_tracker(tracker, workdir, flatten(config), run_id_of(workdir)))
    return writers


def write_report_json(run: Run) -> dict[str, Any]:
    """Write the final metrics of the run to WORKDIR/report.json, and return them."""
    trainer, clock = run.trainer, run.clock
    wall_s = clock()

    owner = run.owner
    assert owner is not None, "the primary process owns the buffer"
    device = jax.local_devices()[0]
    report = {
        "name": run.config.name,
        "seed": run.config.seed,
        "driver": run.config.driver,
        "eval": {
            "before": _figures(run.evaluated.before),
            "after": _figures(run.evaluated.after),
        },
        "steps": trainer.step_index,
        "num_steps": run.config.num_steps,
        "wall_s": wall_s,
        "time_to_first_step_s": run.clock.time_to_first_step_s,
        "tokens_per_s": {
            "decoded": owner.decoded_tokens / wall_s,
            "trained": trainer.counters.trained_tokens / wall_s,
        },
        "idle_s": {
            "trainer": trainer.counters.wait_s,
            "searchers": owner.idle_s,
        },
        "staleness": staleness_summary(trainer.counters.staleness_counts),
        "ledger": {**run.buffer.ledger(), **owner.ledger()},
        "economy": economy_summary(run.buffer),
        "sync": {
            "count": trainer.counters.num_syncs,
            "mean_s": trainer.counters.sync_total_s / max(1, trainer.counters.num_syncs),
            "max_s": trainer.counters.sync_max_s,
        },
        "skipped_prompts": {
            "train": owner.num_skipped,
            "eval": run.evaluator.num_skipped,
        },
        "compiled_decode_programs": run.search.num_compiled,
        "kinds": list(run.shared.task.response_kinds),
        "samples": _samples(run),
        "processes": jax.process_count(),
        "hardware": f"{jax.device_count()} x {device.device_kind}, "
        f"{os.cpu_count()} CPU cores, {platform.platform()}",
        "versions": versions(),
        "config_changes": difference(defaults(run.config.objective.name), flatten(run.config)),
    }
    report |= {key: section() for key, section in run.sections.items()}
    report = jsonable(report)
    path = run.shared.workdir / "report.json"
    try:
        write_json(path, report)
    except OSError as error:
        raise LogError(
            f"writing {path} failed: {error}. Free space or repair the storage, then run the same "
            "command again"
        ) from error
    return report


def _figures(record: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the figures of an evaluation, without texts."""
    if record is None:
        return None
    return {k: v for k, v in record.items() if k not in ("texts", "rewards")}


def _samples(run: Run) -> list[dict[str, Any]]:
    """Return the first held-out prompts, with a response before and a response after training."""
    before, after = run.evaluated.before, run.evaluated.after
    if before is None or after is None:
        return []
    prompts = run.evaluator.prompts
    if len(prompts) == 1:  # Show several responses of the only prompt.
        prompts = prompts * len(before["texts"])
    shown = zip(
        prompts, before["texts"], before["rewards"], after["texts"], after["rewards"], strict=False
    )
    return [
        {
            "prompt": prompt.text,
            "answer": prompt.columns.get("answer", ""),
            "before": old,
            "after": new,
            "before_reward": old_reward,
            "after_reward": new_reward,
        }
        for prompt, old, old_reward, new, new_reward in shown
    ]


def economy_summary(buffer: ReplayBuffer) -> dict[str, Any]:
    """Return the shares of used responses and groups, and warnings."""
    stats, names = buffer.stats(), ("trained_share", "length_rank", "effective_m")
    return {
        **{name: stats[f"buffer/{name}"] for name in names},
        "warnings": buffer.warnings(),
    }


def staleness_summary(counts: Mapping[int, int]) -> dict[str, float]:
    """Return mean, median, 95th percentile and maximum of the staleness of trained trajectories.

    Args:
        counts: number of uses of a trajectory at each staleness; an empty mapping gives {}.
    """
    if not counts:
        return {}
    values = np.array(sorted(counts))
    weights = np.array([counts[v] for v in values.tolist()])
    reached = np.cumsum(weights) / weights.sum()
    return {
        "mean": float((values * weights).sum() / weights.sum()),
        "p50": int(values[np.searchsorted(reached, 0.5)]),
        "p95": int(values[np.searchsorted(reached, 0.95)]),
        "max": int(values[-1]),
    }
