# SPDX-License-Identifier: Apache-2.0
"""Work of a trainer process in a claimed work directory: build the run, train, report."""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from tba_jax.config.advice import notes
from tba_jax.config.command_line import versions
from tba_jax.config.schema import Config, defaults, difference, flatten
from tba_jax.devices.cluster import Cluster
from tba_jax.devices.platform import open_cache
from tba_jax.report.files import Metrics, load_run
from tba_jax.report.jsonl import jsonable, read_jsonl, stream_jsonl
from tba_jax.report.process import ReportProcess
from tba_jax.report.progress import ProgressDisplay
from tba_jax.report.writers import make_tracker
from tba_jax.run.build import Run
from tba_jax.run.errors import out_of_memory
from tba_jax.run.loop import train
from tba_jax.run.records import combined
from tba_jax.run.shared import RunClock
from tba_jax.run.workdir import run_id_of
from tba_jax.storage.whole_files import write_json


def conduct(
    config: Config,
    workdir: Path,
    cluster: Cluster,
    interrupted: Callable[[], bool],
    *,
    start_s: float,
    callbacks: Sequence[Callable[..., Any]] = (),
    **options: Any,
) -> dict[str, Any]:
    """Build a run, train, evaluate the final policy; write the report and return it.

    All trainer processes, `cluster`, call this; only the primary one has a report, the others
    return {}. `options` are `link` and `hold` of `Run`.

    Raises:
        RunError: device memory ran out before the first update; or the work directory was removed,
            or its storage fails.
        UserError: the reward function cannot be used.
    """
    task, is_primary = config.task.open(), cluster.is_primary
    display = ProgressDisplay(
        config.num_steps,
        kind=next(iter(task.response_kinds), ""),
        metric=task.metric,
        console=None if is_primary else Console(quiet=True, force_terminal=False),
        start_s=start_s,
    )
    try:
        named = combined(callbacks, display.note)
        for line in filter(None, (*notes(config), open_cache())):
            display.note(line)
        writers: list[Any] = [ReportProcess(workdir)] if is_primary else []
        if is_primary and (tracker := config.log.tracker):
            writers.append(make_tracker(tracker, workdir, flatten(config), run_id_of(workdir)))
        options |= {"writers": writers, "callbacks": named}
        run = Run(config, workdir, cluster, RunClock(start_s), display, **options)
        if begun := run.trainer.step_index:
            display.resume(stream_jsonl(run.shared.workdir / "metrics.jsonl"))
            display.note(f"resumed {run.shared.workdir} at step {begun} of {config.num_steps}")
    except BaseException:
        display.close()
        raise
    try:
        train(run, interrupted)
        is_done = run.trainer.step_index >= config.num_steps
        display.phase("saving")
        run.checkpoints.wait()
    except BaseException as error:
        run.close(has_failed=True)
        if run.trainer.step_index == 0 and (found := out_of_memory(error)):
            raise found from error
        raise
    run.close()
    report = write_report_json(run) if is_primary else {}
    if is_done and is_primary:
        from tba_jax.report.build import write_report  # loads the plotting library

        write_report(load_run(workdir))
    return report


def write_report_json(run: Run) -> dict[str, Any]:
    """Write the final metrics of the run to WORKDIR/report.json, and return them."""
    owner, wall_s = run.owner, run.clock()
    assert owner is not None, "the primary process owns the buffer"
    workdir = run.shared.workdir
    logged = Metrics(stream_jsonl(workdir / "metrics.jsonl"))
    evaluations = [_figures(line) for line in logged.evaluations]
    tokens, waits_s = (
        float(logged.column("step", f"train/{name}")[1].sum())
        for name in ("response_tokens", "wait_batch_s")
    )
    before, after = (evaluations[0], evaluations[-1]) if evaluations else (None, None)
    device = jax.local_devices()[0]
    report = {
        "name": run.config.name,
        "seed": run.config.seed,
        "driver": run.config.driver,
        "eval": {"before": before, "after": after},
        "steps": run.trainer.step_index,
        "num_steps": run.config.num_steps,
        "wall_s": wall_s,
        "tokens_per_s": {"decoded": owner.decoded_tokens / wall_s, "trained": tokens / wall_s},
        "idle_s": {"trainer": waits_s, "searchers": owner.idle_s},
        "staleness": _statistics(logged.staleness),
        "ledger": {**run.buffer.ledger(), **owner.ledger()},
        "economy": run.buffer.economy(),
        "skipped_prompts": {"train": owner.num_skipped, "eval": run.evaluator.num_skipped},
        "kinds": list(run.shared.task.response_kinds),
        "samples": _samples(workdir),
        "processes": jax.process_count(),
        "hardware": f"{jax.device_count()} x {device.device_kind}, "
        f"{os.cpu_count()} CPU cores, {platform.platform()}",
        "versions": versions(),
        "config_changes": difference(defaults(run.config.objective.name), flatten(run.config)),
    }
    if owner.remote_searchers:
        report["fleet"] = {k.removeprefix("fleet/"): x for k, x in owner.metrics().items()}
    report = jsonable(report)
    write_json(workdir / "report.json", report)
    return report


def _statistics(staleness: Mapping[int, int]) -> dict[str, float]:
    """Return mean, median, 95th percentile and maximum over the uses of responses, or {}."""
    if not staleness:
        return {}
    uses = np.repeat([*staleness], [*staleness.values()])
    p50, p95 = np.percentile(uses, [50, 95], method="inverted_cdf").tolist()
    return {"mean": float(uses.mean()), "p50": p50, "p95": p95, "max": int(uses.max())}


def _figures(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of an evaluation from its line of metrics.jsonl."""
    own = {name.removeprefix("eval/"): x for name, x in line.items() if name.startswith("eval/")}
    step = own.pop("version")
    return {**own, "step": step}


def _samples(workdir: Path) -> list[dict[str, Any]]:
    """Return the first held-out prompts, with a response before and a response after training."""
    shown = [x for x in read_jsonl(workdir / "samples.jsonl") if x["of"] == "eval"]
    before = (x for x in shown if x["step"] == shown[0]["step"])
    after = (x for x in shown if x["step"] == shown[-1]["step"])
    return [
        {name: x[name] for name in ("prompt", "answer")}
        | {"before": x["tokens"][0], "before_reward": x["reward"]}
        | {"after": y["tokens"][0], "after_reward": y["reward"]}
        for x, y in zip(before, after, strict=False)
    ]
