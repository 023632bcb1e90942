# SPDX-License-Identifier: Apache-2.0
"""Command: speed of the asynchronous job on two cores relative to the synchronous job on one core.

    python -m tba_jax.bench.async_speedup [--repeats=5] [--json] [-- OVERRIDES OF BOTH SIDES]

Both sides train a model of 5M random weights on the embedded sums, through the main command. The
model is large enough that a step is mostly arithmetic, and responses have at least 16 tokens, so
that steps are alike. `sync` is one process on one core: it searches, then trains, on data of the
newest version. `async` is two processes on one core each (`placement=whole_hosts`): one trains
while the other searches, and weights and responses pass through the work directory. Both sides make
the same number of steps with the same number of responses. The time of a step is measured from the
end of step `--skip` to the end of the last step, without start and compilation. Sides alternate,
and the ratio compares neighbouring runs.

Searching and training overlap, so the largest possible speedup, `limit`, is sync's step over the
longer of its two halves: 2 for equal halves. `--model=start` uses the embedded start model, whose
steps are short compared with the transfer of weights and responses (docs/lab/fleet.md). Needs
two idle cores.
"""

import argparse
import dataclasses
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tba_jax.bench import processes, reporting
from tba_jax.bench.synthetic import write_checkpoint
from tba_jax.models import model as models
from tba_jax.run.model_parts import START_MODEL

_POLL_S = 0.1
# config fields of each side
_SIDES = {
    "sync": {"driver": "sync", "placement": "shared"},
    "async": {"placement": "whole_hosts"},
}
# Equal responses are separate rows, and steps do only the measured work.
_COMMON = {
    "eval.period": 0,
    "task.num_eval_prompts": 16,
    "checkpoint.period": 0,
}
# For the model of random weights: halves of equal length, and time to publish weights.
_BALANCED = {
    "sync_period": 2,
    "replay.max_staleness": 4,
    "search.min_new_tokens": 16,
    "search.num_slots": 96,
    "search.samples_per_prompt": 24,  # 16 of these are trained on
    "batch.num_prompts": 4,
    "model.remat": "none",
}
_WIDER = {
    "hidden_size": 256,
    "num_layers": 6,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 64,
    "mlp_size": 768,
}


class Figures(NamedTuple):
    """Figures of one run.

    Attributes:
        step_s: seconds per step.
        search_s, train_s: busy seconds of searching and training per step.
        replay_ratio: draws per merged response over the whole run.
        staleness: mean staleness in steps.
    """

    step_s: float
    search_s: float
    train_s: float
    replay_ratio: float
    staleness: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = reporting.make_parser("async_speedup", __doc__)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each side")
    parser.add_argument("--num_steps", type=int, default=60, help="steps of each run")
    parser.add_argument("--model", default="random", choices=("random", "start"))
    parser.add_argument("--skip", type=int, default=20, help="steps before the clock starts")
    parser.add_argument("overrides", nargs="*", help="after --: --config.NAME=VALUE for both sides")
    return reporting.run_in_folder(parser, argv, measure, table)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return all figures by name.

    Args:
        folder: empty folder for the runs.

    Raises:
        ValueError: an option cannot be measured, there are fewer than two cores, or a run failed.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ValueError(f"this process may use {len(cores)} core; wanted two")
    if args.repeats < 1 or not 0 < args.skip < args.num_steps:
        raise ValueError(
            f"got --repeats={args.repeats} --skip={args.skip} --num_steps={args.num_steps}; wanted "
            "--repeats and --skip of at least 1, and --num_steps above --skip"
        )
    fields: dict[str, Any] = dict(_COMMON)
    if args.model == "random":
        write_model(folder / "model")
        fields |= _BALANCED | {"model.path": str(folder / "model")}
    runs: dict[str, list[Figures]] = {side: [] for side in _SIDES}
    for number in range(-1, args.repeats):  # the first run of each side fills the compilation cache
        for side, found in runs.items():
            if number < 0:
                _run(side, args, fields, folder / f"{side}-first", cores, args.skip)
                continue
            workdir = folder / f"{side}-{number}"
            _run(side, args, fields, workdir, cores, args.num_steps)
            found.append(read(workdir, args.skip))
            print(f"{side} {number}: {found[-1].step_s:.3f} s a step", file=sys.stderr)
    ratios = sorted(a.step_s / b.step_s for a, b in zip(runs["sync"], runs["async"], strict=True))
    halves = [(x.search_s, x.step_s - x.search_s) for x in runs["sync"]]
    return {
        "speedup": statistics.median(ratios),
        "speedups": ratios,
        "limit": statistics.median(sum(x) / max(x) for x in halves),
        **{
            side: {
                name: statistics.median(getattr(x, name) for x in found) for name in Figures._fields
            }
            for side, found in runs.items()
        },
        "steps": args.num_steps - args.skip,
        "model": args.model,
        "hardware": processes.hardware({"platform": "cpu", "device": "cpu"}),
    }


def read(workdir: Path, skip: int) -> Figures:
    """Return the figures of a finished run.

    Args:
        skip: number of steps at the start to ignore.

    Raises:
        ValueError: the logs of the run are incomplete.
    """

    with (workdir / "metrics.jsonl").open() as file:
        steps = [x for x in map(json.loads, file) if "train/loss" in x and x["step"] >= skip]
    if len(steps) < 2:
        raise ValueError(
            f"{workdir} has {len(steps)} steps after --skip={skip}; wanted two. Raise --num_steps"
        )
    first, last, timed = steps[0], steps[-1], steps[1:]
    num = len(timed)
    step_s = (last["time_s"] - first["time_s"]) / num
    if "search/idle_s" in last:  # a searcher that works concurrently with the trainer
        search_s = step_s - (last["search/idle_s"] - first["search/idle_s"]) / num
    else:
        search_s = sum(x["search/ticket_s"] for x in timed) / num
    return Figures(
        step_s=step_s,
        search_s=search_s,
        train_s=sum(x["train/step_s"] for x in timed) / num,
        replay_ratio=last["buffer/replay_ratio"],
        staleness=statistics.mean(x["buffer/staleness_mean"] for x in timed),
    )


def write_model(folder: Path) -> None:
    """Write a model of random weights with the start model's tokenizer."""
    shutil.copytree(START_MODEL, folder)
    config = dataclasses.replace(models.describe(str(START_MODEL)).config, **_WIDER)
    write_checkpoint(folder, config)


def _run(
    side: str,
    args: argparse.Namespace,
    common: Mapping[str, Any],
    workdir: Path,
    cores: Sequence[int],
    num_steps: int,
) -> None:
    """Run one side from start to end, with one core for each process."""
    fields = {**common, **_SIDES[side], "num_steps": num_steps}
    command = [sys.executable, "-m", "tba_jax.main", "--config=math", f"--workdir={workdir}"]
    command += [f"--config.{name}={value}" for name, value in fields.items()] + args.overrides
    num = 2 if side == "async" else 1
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    output = workdir.with_suffix(".txt")
    with output.open("w") as out:
        children = []
        for i in range(num):
            who = [f"--coordinator=127.0.0.1:{port}", f"--num_processes={num}", f"--process_id={i}"]
            children.append(
                subprocess.Popen(
                    ["taskset", "-c", str(cores[i]), *command, *(who if num > 1 else [])],
                    stdout=out,
                    stderr=out,
                    env=env,
                    start_new_session=True,
                )
            )
        _wait(side, children, output)


def _wait(side: str, children: Sequence["subprocess.Popen[bytes]"], output: Path) -> None:
    """Wait until all processes have ended; raise ValueError if one failed."""
    deadline = time.monotonic() + processes.TIMEOUT_S
    try:
        while time.monotonic() < deadline:
            codes = [child.poll() for child in children]
            if any(codes) or None not in codes:
                break
            time.sleep(_POLL_S)
        if failed := [child.poll() for child in children if child.returncode != 0]:
            raise processes.failure(side, next((x for x in failed if x), None), output)
    finally:
        for child in children:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def table(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a table of both sides, and the speedup with its limit."""
    yield from reporting.columns(
        ({"side": side, **result[side]} for side in _SIDES),
        {
            "side": "{side}",
            "s a step": "{step_s:.3f}",
            "searching": "{search_s:.3f}",
            "training": "{train_s:.3f}",
            "draws/merged": "{replay_ratio:.2f}",
            "staleness": "{staleness:.2f}",
        },
    )
    low, high = result["speedups"][0], result["speedups"][-1]
    yield (
        f"speedup {result['speedup']:.2f} ({low:.2f} to {high:.2f}); limit for this workload "
        f"{result['limit']:.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
