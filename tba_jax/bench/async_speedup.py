# SPDX-License-Identifier: Apache-2.0
"""Command: speed of the asynchronous job on two cores relative to the synchronous job on one core.

    python -m tba_jax.bench.async_speedup [--repeats=5] [--json] [-- OVERRIDES OF BOTH SIDES]

Both sides train a model of 5M random weights on the embedded sums, through the main command. The
model is large enough that a step is mostly arithmetic, and responses have at least 16 tokens, so
that steps are alike. `sync` is one process on one core: it searches, then trains, on data of the
newest version. `async` is two processes on one core each (`placement=hosts`): one trains
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
import contextlib
import dataclasses
import os
import shutil
import socket
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tba_jax.bench import harness
from tba_jax.bench.harness import Figures
from tba_jax.models import model as models
from tba_jax.report.jsonl import read_jsonl
from tba_jax.run.model_parts import START_MODEL

# Config fields of each side; steps do only the measured work.
_COMMON = {"eval.period": 0, "task.num_eval_prompts": 16, "checkpoint.period": 0}
_SIDES = {
    "sync": {"driver": "sync", "placement": "shared", **_COMMON},
    "async": {"placement": "hosts", **_COMMON},
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
_HEADS = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 64}
_WIDER = {"hidden_size": 256, "num_layers": 6, "mlp_size": 768, **_HEADS}
_COLUMNS = ("step_s", "search_s", "train_s", "replay_ratio", "staleness")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = harness.make_parser("async_speedup", __doc__)
    harness.add_integers(parser, {"repeats": 5, "num_steps": 60, "skip": 20})
    parser.add_argument("--model", default="random", choices=("random", "start"))
    parser.add_argument("overrides", nargs="*", help="after --: --config.NAME=VALUE for both sides")
    return harness.run(
        parser,
        argv,
        measure,
        columns=(*_COLUMNS, "speedup", "limit"),
        rows=lambda x: {
            "sync": x["sync"],
            "async": {**x["async"], "speedup": x["speedup"], "limit": x["limit"]},
        },
    )


def measure(args: argparse.Namespace, folder: Path) -> Figures:
    """Return all figures by name.

    Raises:
        ValueError: there are fewer than two cores or too few steps, or a run failed.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ValueError(f"this process may use {len(cores)} core; wanted two")
    if args.skip >= args.num_steps:
        raise ValueError(
            f"got --skip={args.skip} --num_steps={args.num_steps}; wanted --num_steps above --skip"
        )
    fields: dict[str, Any] = {}
    if args.model == "random":
        write_model(folder / "model")
        fields = _BALANCED | {"model.path": str(folder / "model")}
    runs: dict[str, list[Figures]] = {side: [] for side in _SIDES}
    for number in range(-1, args.repeats):  # the first run of each side fills the compilation cache
        num_steps = args.num_steps if number >= 0 else args.skip
        for side, found in runs.items():
            workdir = folder / f"{side}-{number}"
            given = {**_SIDES[side], **fields, "num_steps": num_steps}
            overrides = [f"--config.{name}={value}" for name, value in given.items()]
            _run(side, [*overrides, *args.overrides], workdir, cores)
            if number >= 0:
                found.append(read(workdir, args.skip))
                print(f"{side} {number}: {found[-1]['step_s']:.3f} s a step", file=sys.stderr)
    pairs = zip(runs["sync"], runs["async"], strict=True)
    ratios = sorted(sync["step_s"] / other["step_s"] for sync, other in pairs)
    halves = [(x["search_s"], x["step_s"] - x["search_s"]) for x in runs["sync"]]
    return {
        "speedup": statistics.median(ratios),
        "speedups": ratios,
        "limit": statistics.median(sum(x) / max(x) for x in halves),
        **{
            side: {name: statistics.median(x[name] for x in found) for name in _COLUMNS}
            for side, found in runs.items()
        },
        "steps": args.num_steps - args.skip,
        "model": args.model,
        "hardware": harness.hardware({"platform": "cpu", "device": "cpu"}),
    }


def read(workdir: Path, skip: int) -> Figures:
    """Return figures of a finished run.

    `step_s` is the time of a step; `train_s` and `search_s` are the seconds of training and
    searching in it, where a synchronous run searches while it does not train; `replay_ratio` counts
    draws per merged response over the whole run; `staleness` is the mean in steps.

    Args:
        skip: number of steps at the start to ignore.

    Raises:
        ValueError: the run has too few steps.
    """
    records = read_jsonl(workdir / "metrics.jsonl")
    steps = [x for x in records if "train/loss" in x and x["step"] >= skip]
    if len(steps) < 2:
        raise ValueError(
            f"{workdir} has {len(steps)} steps after --skip={skip}; wanted two. Raise --num_steps"
        )
    first, last, timed = steps[0], steps[-1], steps[1:]
    step_s = (last["time_s"] - first["time_s"]) / len(timed)
    train_s = statistics.mean(x["train/step_s"] for x in timed)
    not_s = train_s
    if "search/idle_s" in last:  # a searcher that works concurrently with the trainer
        not_s = (last["search/idle_s"] - first["search/idle_s"]) / len(timed)
    return {
        "step_s": step_s,
        "search_s": step_s - not_s,
        "train_s": train_s,
        "replay_ratio": last["buffer/replay_ratio"],
        "staleness": statistics.mean(x["buffer/staleness_mean"] for x in timed),
    }


def write_model(folder: Path) -> None:
    """Write a model of random weights with the start model's tokenizer."""
    shutil.copytree(START_MODEL, folder)
    config = dataclasses.replace(models.describe(str(START_MODEL)).config, **_WIDER)
    harness.write_checkpoint(folder, config)


def _run(side: str, overrides: Sequence[str], workdir: Path, cores: Sequence[int]) -> None:
    """Run one side from start to end, with one core and one device for each process."""
    command = [sys.executable, "-m", "tba_jax.main", "--config=math", f"--workdir={workdir}"]
    env: Mapping[str, str] = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = [f"--coordinator=127.0.0.1:{port}", "--num_processes=2"]
    own = [[*job, f"--process_id={i}"] for i in range(2)] if side == "async" else [[]]
    log = workdir.with_suffix(".txt")
    with contextlib.ExitStack() as stack:
        pinned = (["taskset", "-c", str(core), *command] for core in cores)
        children = [
            stack.enter_context(harness.started([*start, *overrides, *more], log, env))
            for start, more in zip(pinned, own, strict=False)
        ]
        harness.wait(side, children, log)


if __name__ == "__main__":
    sys.exit(main())
