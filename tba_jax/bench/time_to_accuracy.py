# SPDX-License-Identifier: Apache-2.0
"""Command: time of the main job to an accuracy, compared with TRL's GRPO, from process start.

    python -m tba_jax.bench.time_to_accuracy --peers=trl --peer_python=trl/bin/python --json

Both sides train the embedded start model on the embedded sums, with equal batches, the same reward
and equal linear schedules, and evaluate the same held-out problems greedily at equal intervals.
`ours_cold` begins with an empty compilation cache, `ours_warm` with the cache of an earlier run.
Trials choose the fastest of the given learning rates for the peer, and load the peer's files into
the file cache. Then each side runs once per seed, alternating, on the cores of this
process. A process ends when it reaches the accuracy.

`from_command_s` counts from the start of the process to the evaluation that reached the accuracy,
`after_first_step_s` from the end of the first step; a run that never reaches it counts as infinite.
`over_trl` are ratios of the medians. Use a quiet machine.

The peer needs torch and TRL, best in a separate environment:

    python -m venv trl && trl/bin/pip install torch trl transformers

With --config=agent both sides train in the preset's environment, an object of one class; TRL calls
the class as a tool, through its environment_factory.
"""

import argparse
import functools
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.bench import harness
from tba_jax.bench.harness import Figures
from tba_jax.commands.entry_point import make_parser
from tba_jax.run.model_parts import START_MODEL
from tba_jax.tasks.arithmetic import TRAIN_SIZE, Arithmetic

_WORKLOADS: Mapping[str, Mapping[str, Any]] = {
    "math": {"max_new_tokens": 16},
    "agent": {
        "max_new_tokens": 24,
        "environment": "tba_jax.tasks.arithmetic:Calculator",
        "stop": ":",
        "max_turns": 4,
        "package": str(Path(__file__).parents[2]),
    },
}
_BATCH = {"num_prompts": 16, "group_size": 16}
_RUN = {"num_steps": 60, "eval_period": 10}
_INTEGERS = {"seeds": 5, **_RUN, "num_held_out": 512, **_BATCH}
_TIMES = ("from_command_s", "first_step_s", "after_first_step_s", "steps")
_COLUMNS = (*_TIMES, "over_trl.from_command", "over_trl.after_first_step")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = make_parser("bench.time_to_accuracy", __doc__)
    harness.add_peer_flags(parser)
    parser.add_argument(
        "--peer_learning_rates",
        default="2e-4,3e-4,4e-4,6e-4,1e-3",
        help="learning rates to try; the fastest is used",
    )
    parser.add_argument("--config", choices=_WORKLOADS, default="math", help="preset of the task")
    parser.add_argument("--accuracy", type=float, default=0.95, help="held-out accuracy to reach")
    harness.add_integers(parser, _INTEGERS, group_size=2)
    return harness.run(
        parser,
        argv,
        measure,
        columns=_COLUMNS,
        rows=lambda x: {"ours_cold": x["ours_cold"], "ours_warm": x["ours_warm"], **x["peers"]},
    )


def measure(args: argparse.Namespace, folder: Path) -> Figures:
    """Return all figures by name; `folder` is empty. What cannot be measured is a ValueError."""
    warm, machine = folder / "warm", harness.here("cpu")

    def ours(side: str, repeat: int) -> Figures:
        cache = warm if side == "ours_warm" else folder / f"cold-{repeat}"
        return _ours(args, folder / f"{side}-{repeat}", cache, repeat, args.accuracy)

    sides: dict[str, Callable[..., Figures]] = {
        side: functools.partial(ours, side) for side in ("ours_cold", "ours_warm")
    }
    tried: dict[str, float] = {}
    if args.peers:
        *peer, versions = harness.peer(args.peer_python)
        machine["versions"] |= versions
        trl = functools.partial(_trl, args, *peer)
        for rate in args.peer_learning_rates.split(","):
            tried[rate] = trl(folder / f"rate-{rate}", rate, repeat=0)["from_command_s"]
        best = min(tried, key=lambda rate: tried[rate])
        sides["trl"] = lambda repeat: trl(folder / f"trl-{repeat}", best, repeat)
    print("filling the compilation cache", file=sys.stderr)
    _ours(args, folder / "first", warm, repeat=0, stop_at=math.inf)
    figures = harness.repeated(sides, args.seeds, "from_command_s")
    peers = {name: figures.pop(name) | {"tried": tried} for name in [args.peers] if name}
    for found, other in itertools.product(figures.values(), peers.values()):
        found["over_trl"] = {
            name: found[f"{name}_s"] / other[f"{name}_s"]
            for name in ("from_command", "after_first_step")
        }
    return {
        **figures,
        "peers": peers,
        "workload": {name: getattr(args, name) for name in ("config", "accuracy", *_INTEGERS)},
        **machine,
    }


def _ours(
    args: argparse.Namespace, workdir: Path, cache: Path, repeat: int, stop_at: float
) -> Figures:
    """Run the main job in a new work directory, with a compilation cache below `cache`."""
    fields = {
        "num_steps": args.num_steps,
        "seed": repeat,
        "eval.period": args.eval_period,
        "task.num_eval_prompts": args.num_held_out,
        "batch.num_prompts": args.num_prompts,
        "objective.group_size": args.group_size,
        "search.samples_per_prompt": args.group_size,
        "search.max_new_tokens": _WORKLOADS[args.config]["max_new_tokens"],
    }
    command = harness.main_command(args.config, workdir, fields)
    env = {k: v for k, v in os.environ.items() if "CACHE" not in k or not k.startswith("JAX_")}
    # Installed packages, such as the peer, have their bytecode.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    env |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(cache)}
    return watch("tba_jax", command, env, workdir / "metrics.jsonl", "eval/pass_at_1", stop_at)


def _trl(
    args: argparse.Namespace, command: list[str], env: Any, folder: Path, rate: str, repeat: int
) -> Figures:
    """Run GRPO of TRL in a process of the peer's interpreter; its first arguments are the peer."""
    folder.mkdir()
    task, rng = Arithmetic(), np.random.default_rng(repeat)
    chosen = rng.choice(TRAIN_SIZE, args.num_prompts * args.num_steps)

    def problem(split: Any, index: int) -> dict[str, Any]:
        text, columns = task.problem(split, index)
        return {"prompt": text, **columns}

    log, path = folder / "log.jsonl", folder / "job.json"
    job = {
        **{name: getattr(args, name) for name in (*_BATCH, *_RUN)},
        **_WORKLOADS[args.config],
        "model": str(START_MODEL),
        "seed": repeat,
        "learning_rate": float(rate),
        "warmup_steps": 3,  # as of the presets
        "problems": [problem("train", int(i)) for i in chosen],
        "held_out": [problem("eval", i) for i in range(args.num_held_out)],
        "log": str(log),
    }
    path.write_text(json.dumps(job))
    return watch("trl", [*command, str(path)], env, log, "accuracy", args.accuracy)


def watch(
    side: str,
    command: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    accuracy: str,
    stop_at: float,
) -> Figures:
    """Run a command and read its growing log; return times in seconds from its start.

    `steps` is the step of the first evaluation at the accuracy, and `accuracies` lists (step,
    accuracy, seconds) of every evaluation but that of the start model.

    Args:
        side, command, env: arguments of `harness.run_processes`.
        log: JSON lines with a `step`; the line of step 1 marks the end of the first step.
        accuracy: name of the accuracy in lines that have one.
        stop_at: accuracy at which the process is ended.
    """
    first_step_s, accuracies, num_lines = None, [], 0
    start = time.perf_counter()

    def is_done() -> bool:
        nonlocal first_step_s, num_lines
        now = time.perf_counter() - start
        *lines, _ = log.read_text().split("\n") if log.exists() else [""]  # complete lines
        for line in map(json.loads, lines[num_lines:]):
            if accuracy not in line:
                first_step_s = now if line["step"] == 1 else first_step_s
            elif line["step"]:  # not the evaluation of the start model
                accuracies.append((line["step"], line[accuracy], now))
        num_lines = len(lines)
        return bool(accuracies) and accuracies[-1][1] >= stop_at

    output = log.parent.with_name(f"{log.parent.name}.txt")
    harness.run_processes(side, [command], output, env, is_done=is_done)
    if first_step_s is None:
        raise ValueError(f"{side} ended before its first step. Give more --num_steps")
    steps, _, end_s = accuracies[-1] if is_done() else (math.inf, None, math.inf)
    return {
        "from_command_s": end_s,
        "first_step_s": first_step_s,
        "after_first_step_s": end_s - first_step_s,
        "steps": float(steps),
        "accuracies": accuracies,
    }


if __name__ == "__main__":
    sys.exit(main())
