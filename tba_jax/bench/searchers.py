# SPDX-License-Identifier: Apache-2.0
"""What more searchers are worth: time of the main job to an accuracy, with 1, 2, 4, 8 of them.

    python -m tba_jax.bench.searchers [--searchers=1,2,4,8] [--chunk_ms=300] [--seeds=3] [--json]

Every run is the main command on the embedded start model and sums; its searchers are slowed to what
one on a machine of its own would make (`slow_searchers`: a chunk of decode steps takes `--chunk_ms`
at least), so that two cores can show many. A process ends where it has reached the accuracy.
Seconds are from the end of the first step to the evaluation that reached it; the first run of each
number, which compiles, is not counted. Trainer and searchers share the cores: where these do not
idle any more, the machine ends what searchers could still give.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tba_jax.bench import processes, reporting
from tba_jax.bench.time_to_accuracy import Reached, watch


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tba_jax.bench.searchers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--searchers", default="1,2,4,8", help="numbers, with commas")
    parser.add_argument("--chunk_ms", type=float, default=300.0, help="of a chunk of decode steps")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each number")
    parser.add_argument("--accuracy", type=float, default=0.95, help="share of the held-out")
    parser.add_argument("--num_steps", type=int, default=150, help="of the schedule")
    parser.add_argument("--eval_period", type=int, default=5, help="steps between evaluations")
    with tempfile.TemporaryDirectory(prefix="bench_searchers_") as folder:
        return reporting.run_command(parser, argv, lambda args: measure(args, Path(folder)), table)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All figures, by name.

    Args:
        args: of the command line.
        folder: empty, for the runs.

    Raises:
        ValueError: an option that cannot be measured; a run failed.
    """
    try:
        counts = [int(part) for part in args.searchers.split(",")]
    except ValueError as error:
        raise ValueError(f"--searchers={args.searchers}: wanted numbers with commas") from error
    if min(counts) < 1 or args.seeds < 1 or not 0 < args.chunk_ms < 1e4:
        raise ValueError(
            f"got --searchers={args.searchers} --seeds={args.seeds} --chunk_ms={args.chunk_ms:g}; "
            "wanted at least one of each, and 10 seconds a chunk at most"
        )
    rows = []
    for count in counts:
        _run(args, folder / f"{count}-first", count, 0)
        runs = [_run(args, folder / f"{count}-{seed}", count, seed) for seed in range(args.seeds)]
        figures = [_figures(folder / f"{count}-{seed}") for seed in range(args.seeds)]
        rows.append({"searchers": count, **summary(runs), **_medians(figures)})
        print(f"{count} searchers: {rows[-1]['after_first_step_s']}", file=sys.stderr)
    names = ("accuracy", "chunk_ms", "seeds", "num_steps", "eval_period")
    return {
        "rows": rows,
        "workload": {name: getattr(args, name) for name in names},
        "hardware": processes.hardware({"platform": "cpu", "device": "cpu"}),
    }


def summary(runs: Sequence[Reached]) -> dict[str, Any]:
    """Median seconds and steps of the runs that reached the accuracy."""
    there = [run for run in runs if run.from_command_s is not None]
    seconds = [(run.from_command_s or 0.0) - run.first_step_s for run in there]
    return {
        "reached": len(there),
        "after_first_step_s": statistics.median(seconds) if seconds else None,
        "seconds": seconds,
        "steps": statistics.median(run.step or 0 for run in there) if there else None,
    }


def _run(args: argparse.Namespace, workdir: Path, count: int, seed: int) -> Reached:
    fields = {
        "num_steps": args.num_steps,
        "num_searchers": count,
        "seed": seed,
        "eval.period": args.eval_period,
    }
    command = [sys.executable, "-m", "tba_jax.bench.slow_searchers", f"{args.chunk_ms:g}"]
    command += ["--config=math", f"--workdir={workdir}"]
    command += [f"--config.{name}={value}" for name, value in fields.items()]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}

    def told(line: Mapping[str, Any]) -> float | None:
        return line.get("eval/pass_at_1")

    log = workdir / "metrics.jsonl"
    return watch(f"{count} searchers", command, env, log, told, args.accuracy)


def _figures(workdir: Path) -> dict[str, float]:
    """Means over the steps of a run, the first ones aside."""
    with (workdir / "metrics.jsonl").open() as file:
        lines = [x for x in map(json.loads, file) if "train/loss" in x and x["step"] > 3]
    names = {
        "step_s": "train/step_s",
        "wait_s": "train/wait_batch_s",
        "staleness": "buffer/staleness_mean",
    }
    return {
        name: statistics.mean(x[key] for x in lines) if lines else float("nan")
        for name, key in names.items()
    }


def _medians(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(x[name] for x in figures) for name in figures[0]}


def table(result: Mapping[str, Any]) -> Iterator[str]:
    """Lines to read."""
    w = result["workload"]
    yield (
        f"to {w['accuracy']:.0%}; a chunk takes a searcher {w['chunk_ms']:g} ms at least; medians "
        f"of {w['seeds']} seeds"
    )
    yield "searchers  after the first step   steps  step s  waited s  staleness"
    for row in result["rows"]:
        seconds = row["after_first_step_s"]
        told = f"{seconds:.1f} s" if seconds is not None else "never"
        yield (
            f"{row['searchers']:9d} {told:>21s} {row['steps'] or 0:7.0f} {row['step_s']:7.2f} "
            f"{row['wait_s']:9.2f} {row['staleness']:10.2f}"
        )


if __name__ == "__main__":
    sys.exit(main())
