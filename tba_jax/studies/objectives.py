# SPDX-License-Identifier: Apache-2.0
"""Command: every objective on the main job: learning curves, and who is first at 95 %.

    python -m tba_jax.studies.objectives [--only="tb;grpo"] [--seeds=3] [--budget_min=60]

A run is the main command with `--config=math` in a process of its own, shorter and looked at more
often; --steps=150 is the whole job. It is a line of OUT/runs.jsonl when it has ended, also when it
failed, and is not run again. Seeds are outermost, so that a study cut short by its budget has
compared all objectives. It knows names of objectives, `metrics.jsonl` and `report.json`.

Seconds are from the start of the process to the evaluation, on the cores that this process may use.
"""

import argparse
import contextlib
import math
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tba_jax.commands.edge import guarded
from tba_jax.config.command_line import local_folder
from tba_jax.config.schema import ConfigError
from tba_jax.report.jsonl import JsonlWriter, read_jsonl
from tba_jax.report.plots import LIGHT, new_figure, style_axes, to_png
from tba_jax.studies.named import OBJECTIVES, overrides_of
from tba_jax.studies.study import run_folder, run_variant

# Those that are points of the same loss on this job, or another name for one, are left out.
_LEFT_OUT = ("tb, leave one out", "tba_prime_live", "grpo, beta 0")
NAMES = tuple(name for name in OBJECTIVES if name not in _LEFT_OUT)
REACHED = 0.95
_COLUMNS = 5


class Point(NamedTuple):
    """An evaluation of a run.

    Attributes:
        step: it looked at the policy of.
        accuracy: greedy pass@1 on held-out problems.
        seconds: since the start of the process.
        trained: responses that the steps until then were trained on, repeats counted.
        drawn: responses that searchers had drawn.
    """

    step: int
    accuracy: float
    seconds: float
    trained: int
    drawn: int


def key_of(name: str, seed: int, job: Mapping[str, Any]) -> dict[str, Any]:
    """What tells one run from another."""
    return {"objective": name, "seed": seed, **job}


def run_one(name: str, seed: int, job: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """Run it; the line that says what came out. Its work directory is deleted."""
    folder = run_folder(out, name, seed)
    overrides = [
        *overrides_of(name),
        f"num_steps={job['steps']}",
        f"eval.period={job['eval_period']}",
        f"task.num_eval_prompts={job['held_out']}",
        f"optimizer.learning_rate={job['learning_rate']:g}",
    ]
    start = time.monotonic()
    try:
        report = run_variant(folder, overrides, seed, "math")
    except RuntimeError as error:
        return {"failed": str(error)[-500:], "wall_s": time.monotonic() - start, "points": []}
    points = list(points_of(read_jsonl(folder / "metrics.jsonl")))
    shutil.rmtree(folder)
    return {
        "points": points,
        "wall_s": time.monotonic() - start,
        "first_step_s": report["time_to_first_step_s"],
        "staleness": report["staleness"]["mean"],
    }


def points_of(records: Sequence[Mapping[str, Any]]) -> Iterator[Point]:
    """Every evaluation, with what had been drawn and trained when it was asked for."""
    trained, drawn = {0: 0}, {0: 0}
    for record in records:
        step = int(record["step"])
        if "buffer/staleness_histogram" in record:
            of_step = sum(n for _, n in record["buffer/staleness_histogram"])
            trained[step] = max(trained.values()) + of_step
            drawn[step] = int(record["buffer/num_trajectories"])
        elif "eval/pass_at_1" in record:
            known = max(s for s in trained if s <= step)
            yield Point(
                step, record["eval/pass_at_1"], record["time_s"], trained[known], drawn[known]
            )


def reached(points: Sequence[Point]) -> Point | None:
    """The first evaluation of what was trained that is at the aim."""
    return next((p for p in points if p.step and p.accuracy >= REACHED), None)


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Medians over seeds; a seed that did not get there counts as later than all others."""
    rows = [
        f"| objective | seeds | pass@1 before | after, median (least) | runs at {REACHED:.0%} | "
        "step | seconds | responses trained | responses drawn | first step s | wall s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in by_objective(lines).items():
        done = [line for line in runs if line["points"]]
        failed = len(runs) - len(done)
        if not done:
            rows.append(f"| {name} | {len(runs)} | failed |" + " – |" * 8)
            continue
        points = [[Point(*p) for p in line["points"]] for line in done]
        ends = [p[-1].accuracy for p in points]
        there = [*(reached(p) for p in points), *[None] * failed]
        cells = [
            name,
            str(len(runs)) + (f" ({failed} failed)" if failed else ""),
            f"{100 * np.median([p[0].accuracy for p in points]):.1f} %",
            f"{100 * np.median(ends):.1f} % ({100 * min(ends):.1f})",
            f"{sum(p is not None for p in there)} of {len(runs)}",
            *(median_of(there, field) for field in ("step", "seconds", "trained", "drawn")),
            f"{np.median([line['first_step_s'] for line in done]):.1f}",
            f"{np.median([line['wall_s'] for line in done]):.0f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def median_of(there: Sequence[Point | None], field: str) -> str:
    """Over all runs; "–" where the median run never got there."""
    values = [math.inf if p is None else getattr(p, field) for p in there]
    middle = float(np.median(values))
    return f"{middle:,.0f}" if math.isfinite(middle) else "–"


def by_objective(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The lines of each objective, in the order of the studies."""
    found = {name: [line for line in lines if line["objective"] == name] for name in OBJECTIVES}
    return {name: of_name for name, of_name in found.items() if of_name}


def figure(lines: Sequence[Mapping[str, Any]]) -> bytes:
    """A panel for each objective, seeds thin, their median thick, the first one's in grey."""
    found = {
        name: [[Point(*p) for p in line["points"]] for line in runs if line["points"]]
        for name, runs in by_objective(lines).items()
    }
    found = {name: runs for name, runs in found.items() if runs}
    num_rows = -(-len(found) // _COLUMNS)
    picture = new_figure(2.0 * _COLUMNS, 1.55 * num_rows + 0.3, LIGHT)
    panels = picture.subplots(num_rows, _COLUMNS, sharex=True, sharey=True, squeeze=False)
    first = next(iter(found))
    for axes in panels.flat[len(found) :]:
        axes.set_visible(False)
    for axes, (name, runs) in zip(panels.flat, found.items(), strict=False):
        style_axes(axes, LIGHT)
        axes.set_title(name, fontsize=9, color=LIGHT.ink, loc="left")
        if name != first:
            axes.plot(*middle(found[first]), color=LIGHT.bars["wait"], linewidth=1.6)
        for run in runs:
            shown = [p.step for p in run], [100 * p.accuracy for p in run]
            axes.plot(*shown, color=LIGHT.main, alpha=0.35, linewidth=0.8)
        axes.plot(*middle(runs), color=LIGHT.main, linewidth=1.8)
        axes.set_ylim(0, 104)
    picture.supxlabel(f"optimiser step (grey: {first})", fontsize=9, color=LIGHT.muted)
    picture.supylabel("held-out pass@1, %", fontsize=9, color=LIGHT.muted)
    return to_png(picture, dpi=130)


def middle(runs: Sequence[Sequence[Point]]) -> tuple[list[int], list[float]]:
    """Steps that all runs were looked at, and the median accuracy there, in percent."""
    by_step = [{p.step: 100 * p.accuracy for p in run} for run in runs]
    steps = sorted(set.intersection(*(set(run) for run in by_step)))
    return steps, [float(np.median([run[s] for run in by_step])) for s in steps]


def make(
    wanted: Sequence[Mapping[str, Any]],
    job: Mapping[str, Any],
    out: Path,
    log: JsonlWriter,
    end: float,
) -> None:
    """The runs that the log has not, until a time of the monotonic clock."""
    for key in wanted:
        is_known = any(key.items() <= line.items() for line in read_jsonl(log.path))
        if is_known or time.monotonic() > end:
            continue
        line = {**key, **run_one(key["objective"], key["seed"], job, out)}
        log.append(line)
        ends = line.get("failed") or f"{line['points'][-1].accuracy:.1%}"
        print(f"{key['objective']}, seed {key['seed']}: {ends}, {line['wall_s']:.0f} s", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(prog="python -m tba_jax.studies.objectives")
    parser.add_argument("--only", default="", help="objectives, with ; between; default: all")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--steps", type=int, default=60, help="of the schedule")
    parser.add_argument("--eval_period", type=int, default=6, help="steps between evaluations")
    parser.add_argument("--held_out", type=int, default=512, help="problems")
    parser.add_argument("--learning_rate", type=float, default=2e-4, help="the main job's")
    parser.add_argument("--budget_min", type=float, default=60.0, help="start no run after this")
    parser.add_argument("--out", default="runs/objectives", help="folder")
    args = parser.parse_args(argv)
    names = [name.strip() for name in args.only.split(";") if name.strip()] or list(NAMES)
    try:
        out = local_folder(args.out, "--out")
        for name in names:
            if name not in OBJECTIVES:
                raise ConfigError(f"--only={name}: want some of {'; '.join(OBJECTIVES)}")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    job = {k: getattr(args, k) for k in ("steps", "eval_period", "held_out", "learning_rate")}
    wanted = [key_of(name, seed, job) for seed in range(args.seeds) for name in names]
    with contextlib.closing(JsonlWriter(out / "runs.jsonl")) as log:
        make(wanted, job, out, log, time.monotonic() + 60 * args.budget_min)
    lines = [x for x in read_jsonl(log.path) if any(key.items() <= x.items() for key in wanted)]
    text = table(lines)
    missing = len(wanted) - len(lines)
    if missing:
        text += f"\n\n{missing} runs are missing; the same command makes them."
    (out / "objectives.md").write_text(text + "\n")
    if any(line["points"] for line in lines):
        (out / "objectives.png").write_bytes(figure(lines))
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
