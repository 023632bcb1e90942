# SPDX-License-Identifier: Apache-2.0
"""Command: speed of the asynchronous job on two cores relative to the synchronous job on one core.

    python -m tba_jax.bench.async_speedup [--repeats=5] [--json] [-- OVERRIDES OF BOTH SIDES]

Both sides train a model of 5M random weights on the embedded sums with equal steps, through the
main command. A step is mostly arithmetic, and responses have at least 16 tokens, so that steps are
alike. `sync` is one process on one core: it searches, then trains, on data of the newest version.
`async` is two processes on one core each (`placement=hosts`): one trains while the other searches.
Steps are timed from the end of step `--skip`, without start and compilation. Sides alternate, and
the ratio compares neighbouring runs.

Searching and training overlap, so the largest possible speedup, `limit`, is sync's step over the
longer of its two halves: 2 for equal halves. Needs two idle cores.
"""

import argparse
import functools
import os
import socket
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from tba_jax.bench import harness
from tba_jax.bench.harness import Figures
from tba_jax.commands.entry_point import make_parser
from tba_jax.models import model as models
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
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
_WIDER = {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 768, **_HEADS}
_COLUMNS = ("step_s", "search_s", "train_s", "replay_ratio", "staleness", "speedup", "limit")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = make_parser("bench.async_speedup", __doc__)
    harness.add_integers(parser, {"repeats": 5, "num_steps": 60, "skip": 20})
    parser.add_argument("overrides", nargs="*", help="after --: --config.NAME=VALUE for both sides")
    return harness.run(
        parser,
        argv,
        measure,
        columns=_COLUMNS,
        rows=lambda x: {side: x[side] for side in _SIDES},
    )


def measure(args: argparse.Namespace, folder: Path) -> Figures:
    """Return all figures by name. What cannot be measured is a ValueError."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ValueError(f"this process may use {len(cores)} core; wanted two")
    if args.skip >= args.num_steps:
        raise ValueError(
            f"got --skip={args.skip} --num_steps={args.num_steps}; wanted --num_steps above --skip"
        )
    settings = models.describe(str(START_MODEL)).hf_config | _WIDER
    harness.write_model(folder / "model", settings)

    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}

    def run(side: str, repeat: int, num_steps: int = args.num_steps) -> Figures:
        """Run one side from start to end, with one core and one device for each process."""
        workdir = folder / f"{side}-{repeat}"
        given = {**_SIDES[side], **_BALANCED, "model.path": folder / "model"}
        given["num_steps"] = num_steps
        command = [*harness.main_command("math", workdir, given), *args.overrides]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        job = [f"--coordinator=127.0.0.1:{port}", "--num_processes=2"]
        own = [[*job, f"--process_id={i}"] for i in range(2)] if side == "async" else [[]]
        pinned = [
            ["taskset", "-c", str(core), *command, *more]
            for core, more in zip(cores, own, strict=False)
        ]
        harness.run_processes(side, pinned, workdir.with_suffix(".txt"), env)
        return read(workdir, args.skip) if repeat >= 0 else {}

    for side in _SIDES:  # fills the compilation cache
        run(side, -1, args.skip)
    sides = {side: functools.partial(run, side) for side in _SIDES}
    figures = harness.repeated(sides, args.repeats, "step_s")
    steps = zip(*(figures[side]["step_s_of_repeats"] for side in _SIDES), strict=True)
    ratios = sorted(sync / other for sync, other in steps)
    speedup, limit = statistics.median(ratios), figures["sync"]["over_longer_half"]
    figures["async"] |= {"speedup": speedup, "limit": limit}
    return {
        **figures,
        "speedup": speedup,
        "speedups": ratios,
        "limit": limit,
        "steps": args.num_steps - args.skip,
        **harness.here("cpu"),
    }


def read(workdir: Path, skip: int) -> Figures:
    """Return means over the steps of a finished run after step `skip`.

    `over_longer_half` is the time of a step over the longer of searching and the rest;
    `replay_ratio` counts draws per merged response over the whole run; `staleness` is in steps.
    """
    steps = harness.timed_steps(workdir, skip)
    names = {name: name for name in ("step_s", "search_s", "train_s")}
    names["staleness"] = "buffer/staleness_mean"
    found = {name: statistics.mean(x[key] for x in steps) for name, key in names.items()}
    halves = found["search_s"], found["step_s"] - found["search_s"]
    found["over_longer_half"] = found["step_s"] / max(halves)
    return found | {"replay_ratio": steps[-1]["buffer/replay_ratio"]}


if __name__ == "__main__":
    sys.exit(main())
