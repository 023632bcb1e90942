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
`after_first_step_s` from the end of the first step; `over_trl` are medians of ratios for equal
seeds. Use a quiet machine.

The peer needs torch and TRL, best in a separate environment:

    python -m venv trl && trl/bin/pip install torch trl transformers

With --config=agent both sides train in the preset's environment, an object of one class; TRL calls
the class as a tool, through its environment_factory.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tba_jax.bench import processes, reporting, trl_peer
from tba_jax.report.jsonl import read_blocks
from tba_jax.run.model_parts import START_MODEL
from tba_jax.tasks.arithmetic import TRAIN_SIZE, Arithmetic

_PACKAGES = {"trl": trl_peer.PACKAGES}
_POLL_S = 0.02
# Warmup steps of the preset; the peer gets the same number.
_WARMUP_STEPS = 5
_WORKLOADS: Mapping[str, Mapping[str, Any]] = {
    "math": {"max_new_tokens": 16},
    "agent": {
        "max_new_tokens": 24,
        "environment": "tba_jax.tasks.calculator:Calculator",
        "stop": ":",
        "max_turns": 4,
        "package": str(Path(__file__).parents[2]),
    },
}


class Reached(NamedTuple):
    """Times of one process; seconds count from its start.

    Attributes:
        from_command_s: end of the first evaluation at the accuracy; None: never reached.
        first_step_s: end of the first step.
        step: step of the evaluation that reached the accuracy, or None.
        accuracies: (step, accuracy, seconds) of every evaluation except that of the start model.
    """

    from_command_s: float | None
    first_step_s: float
    step: int | None
    accuracies: list[tuple[int, float, float]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = reporting.make_parser("time_to_accuracy", __doc__)
    parser.add_argument("--peers", default="", help="peer to compare with: trl; empty: none")
    parser.add_argument("--peer_python", default=sys.executable, help="interpreter with the peer")
    parser.add_argument(
        "--peer_learning_rates",
        default="1e-4,3e-4,1e-3",
        help="learning rates to try; the fastest is used",
    )
    parser.add_argument("--config", choices=_WORKLOADS, default="math", help="preset of the task")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each side")
    parser.add_argument("--accuracy", type=float, default=0.95, help="held-out accuracy to reach")
    parser.add_argument("--num_steps", type=int, default=150, help="steps of the schedule")
    parser.add_argument("--eval_period", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--num_held_out", type=int, default=512, help="held-out problems")
    parser.add_argument("--num_prompts", type=int, default=16, help="prompts of a batch")
    parser.add_argument("--group_size", type=int, default=16, help="responses per prompt")
    return reporting.run_in_folder(parser, argv, measure, _table)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return all figures by name.

    Args:
        folder: empty folder for the runs.

    Raises:
        ValueError: an option or an environment cannot be measured, a side failed, or no process of
            a side reached the accuracy.
    """
    least = ("seeds", "num_steps", "eval_period", "num_held_out", "num_prompts")
    reporting.check_least(args, dict.fromkeys(least, 1) | {"group_size": 2})
    peers = processes.peers_of(args.peers, _PACKAGES, args.peer_python)
    rates = _rates(args.peer_learning_rates)
    warm = folder / "warm"
    print("filling the compilation cache", file=sys.stderr)
    _ours(args, folder / "first", warm, seed=0, stop_at=None)
    trials = {
        rate: _say(f"trl at {rate:g}", _trl(args, folder / f"trl-{rate:g}", rate, seed=0))
        for rate in rates
        if peers
    }
    rate = min(trials, key=lambda x: trials[x].from_command_s or np.inf, default=None)
    runs: dict[str, list[Reached]] = {"ours_cold": [], "ours_warm": [], **{n: [] for n in peers}}
    for seed in range(args.seeds):
        for side, found in runs.items():
            at = folder / f"{side}-{seed}"
            if rate is not None and side == "trl":
                reached = _trl(args, at, rate, seed)
            else:
                cache = warm if side == "ours_warm" else folder / f"cold-{seed}"
                reached = _ours(args, at, cache, seed, stop_at=args.accuracy)
            found.append(_say(f"{side}, seed {seed}", reached))
    figures = {side: _figures(side, found, args.accuracy) for side, found in runs.items()}
    for side in ("ours_cold", "ours_warm"):
        figures[side] |= {f"over_{name}": _ratios(runs[side], runs[name]) for name in peers}
    if rate is not None:
        tried = {f"{x:g}": reached.from_command_s for x, reached in trials.items()}
        figures["trl"] |= {"learning_rate": rate, "from_command_s_of_learning_rates": tried}
    sizes = ("config", "accuracy", "seeds", "num_steps", "eval_period", "num_held_out")
    return {
        "ours_cold": figures["ours_cold"],
        "ours_warm": figures["ours_warm"],
        "peers": {name: figures[name] for name in peers},
        "workload": {name: getattr(args, name) for name in (*sizes, "num_prompts", "group_size")},
        "versions": {"ours": _versions(sys.executable, ("jax", "jaxlib"))}
        | {name: _versions(args.peer_python, _PACKAGES[name]) for name in peers},
        "hardware": processes.hardware({"platform": "cpu", "device": "cpu"}),
    }


def _rates(text: str) -> list[float]:
    try:
        return [float(x) for x in text.split(",")]
    except ValueError:
        raise ValueError(
            f"got --peer_learning_rates={text}; wanted numbers, separated by commas"
        ) from None


def _ours(
    args: argparse.Namespace, workdir: Path, cache: Path, seed: int, stop_at: float | None
) -> Reached:
    """Run the main job in a new work directory, with a compilation cache below `cache`."""
    overrides = {
        "num_steps": args.num_steps,
        "seed": seed,
        "eval.period": args.eval_period,
        "task.num_eval_prompts": args.num_held_out,
        "batch.num_prompts": args.num_prompts,
        "objective.group_size": args.group_size,
        "search.samples_per_prompt": args.group_size,
        "search.max_new_tokens": _WORKLOADS[args.config]["max_new_tokens"],
        "optimizer.learning_rate": f"linear(2e-4, 0, warmup={_WARMUP_STEPS})",
    }
    command = [
        sys.executable,
        "-m",
        "tba_jax.main",
        f"--config={args.config}",
        f"--workdir={workdir}",
    ]
    command += [f"--config.{name}={value}" for name, value in overrides.items()]
    env = {k: v for k, v in os.environ.items() if "CACHE" not in k or not k.startswith("JAX_")}
    env |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(cache)}

    def accuracy_in(line: Mapping[str, Any]) -> float | None:
        return line.get("eval/pass_at_1")

    return watch("tba_jax", command, env, workdir / "metrics.jsonl", accuracy_in, stop_at)


def _trl(args: argparse.Namespace, folder: Path, learning_rate: float, seed: int) -> Reached:
    """Run GRPO of TRL in a process of the peer's interpreter."""
    folder.mkdir()
    task, rng = Arithmetic(), np.random.default_rng(seed)
    chosen = rng.choice(TRAIN_SIZE, args.num_prompts * args.num_steps)

    def problem(text: str, columns: Mapping[str, Any]) -> dict[str, Any]:
        return {"prompt": text, **columns}

    names = ("num_prompts", "group_size", "num_steps", "eval_period")
    job = {name: getattr(args, name) for name in names} | {
        "model": str(START_MODEL),
        "seed": seed,
        "learning_rate": learning_rate,
        "warmup_steps": _WARMUP_STEPS,
        **_WORKLOADS[args.config],
        "problems": [problem(*task.train_problem(int(i))) for i in chosen],
        "held_out": [problem(*task.eval_problem(i)) for i in range(args.num_held_out)],
        "log": str(folder / "log.jsonl"),
    }
    (folder / "job.json").write_text(json.dumps(job))
    command = [args.peer_python, "-P", trl_peer.__file__, str(folder / "job.json")]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    env.pop("PYTHONPATH", None)

    def accuracy_in(line: Mapping[str, Any]) -> float | None:
        return line.get("accuracy")

    return watch("trl", command, env, folder / "log.jsonl", accuracy_in, args.accuracy)


def watch(
    side: str,
    command: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    accuracy_of: Callable[[Mapping[str, Any]], float | None],
    stop_at: float | None,
) -> Reached:
    """Run a command and read its growing log.

    Args:
        side: name of the side in errors.
        command, env: command line and environment of the process.
        log: JSON lines with a `step`; the line of step 1 marks the end of the first step.
        accuracy_of: returns the accuracy in a line, or None.
        stop_at: accuracy at which the process is ended; None: run to the end.

    Raises:
        ValueError: the process failed, made no step or took too long; its last lines go to stderr.
    """
    output = log.parent.with_name(f"{log.parent.name}.txt")
    first_step_s, accuracies, offset = None, [], 0
    with output.open("w") as out:
        start = time.perf_counter()
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out)
        try:
            is_over = False
            while not is_over:
                # checked before the read, so that the last lines are read, too
                is_over = process.poll() is not None
                now = time.perf_counter() - start
                if now > processes.TIMEOUT_S:
                    raise ValueError(
                        f"{side} took more than {processes.TIMEOUT_S} s. Lower --num_steps"
                    )
                for text in (x for _, lines in read_blocks(log, offset) for x in lines):
                    offset += len(text)
                    line = json.loads(text)
                    value, step = accuracy_of(line), int(line["step"])
                    if value is None:
                        first_step_s = now if step == 1 else first_step_s
                    elif step:  # not the evaluation of the start model
                        accuracies.append((step, float(value), now))
                        is_over = is_over or (stop_at is not None and value >= stop_at)
                time.sleep(0 if is_over else _POLL_S)
        finally:
            _end(process)
    was_ended = stop_at is not None and any(value >= stop_at for _, value, _ in accuracies)
    if first_step_s is None or (process.returncode and not was_ended):
        raise processes.failure(side, process.returncode, output)
    reached = [x for x in accuracies if stop_at is not None and x[1] >= stop_at]
    step, _, seconds = reached[0] if reached else (None, None, None)
    return Reached(seconds, first_step_s, step, accuracies)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _say(what: str, reached: Reached) -> Reached:
    end = "never" if reached.from_command_s is None else f"{reached.from_command_s:.1f} s"
    print(
        f"{what}: {end}, step {reached.step}, first step after {reached.first_step_s:.1f} s",
        file=sys.stderr,
    )
    return reached


def _figures(side: str, runs: Sequence[Reached], accuracy: float) -> dict[str, Any]:
    """Return the medians over the runs of one side that reached the accuracy."""
    there = [x for x in runs if x.from_command_s is not None]
    if not there:
        best = max((value for x in runs for _, value, _ in x.accuracies), default=0.0)
        raise ValueError(
            f"{side} never reached an accuracy of {accuracy}, {best} at most; give a lower "
            "--accuracy or more --num_steps"
        )
    return {
        "from_command_s": statistics.median(x.from_command_s or 0.0 for x in there),
        "after_first_step_s": statistics.median(_after_first_step_s(x) for x in there),
        "first_step_s": statistics.median(x.first_step_s for x in there),
        "steps": statistics.median(x.step or 0 for x in there),
        "reached": f"{len(there)} of {len(runs)}",
        "runs": [{**x._asdict(), "after_first_step_s": _after_first_step_s(x)} for x in there],
    }


def _after_first_step_s(run: Reached) -> float:
    return (run.from_command_s or 0.0) - run.first_step_s


def _ratios(ours: Sequence[Reached], theirs: Sequence[Reached]) -> dict[str, float]:
    """Return the medians over seeds of our time divided by the peer's time."""
    pairs = [
        (x, y)
        for x, y in zip(ours, theirs, strict=True)
        if x.from_command_s is not None and y.from_command_s is not None
    ]
    if not pairs:
        raise ValueError("no seed has both sides at the accuracy. Give more --seeds or --num_steps")
    return {
        "from_command": statistics.median(
            (x.from_command_s or 0.0) / (y.from_command_s or 1.0) for x, y in pairs
        ),
        "after_first_step": statistics.median(
            _after_first_step_s(x) / _after_first_step_s(y) for x, y in pairs
        ),
    }


def _versions(python: str, packages: Sequence[str]) -> dict[str, str]:
    code = (
        "import importlib.metadata as m, json, sys; "
        f"print(json.dumps({{'python': sys.version.split()[0], **{{n: m.version(n) for n in "
        f"{tuple(packages)}}}}}))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def _table(result: Mapping[str, Any]) -> list[str]:
    w, hw = result["workload"], result["hardware"]
    sides = {"ours_cold": result["ours_cold"], "ours_warm": result["ours_warm"], **result["peers"]}
    return [
        f"{w['accuracy']:.0%} of {w['num_held_out']} held-out problems; batches of "
        f"{w['num_prompts']} x {w['group_size']}, evaluated every {w['eval_period']} of "
        f"{w['num_steps']} steps; medians of {w['seeds']} seeds",
        f"{hw['processor']}, {hw['num_cores']} cores",
        "",
        *reporting.columns(
            ({"side": side, **x} for side, x in sides.items()),
            {
                "": "{side}",
                "from command": "{from_command_s:.1f} s",
                "first step": "{first_step_s:.1f} s",
                "after it": "{after_first_step_s:.1f} s",
                "steps": "{steps:.0f}",
                "over trl: from command": "{over_trl[from_command]:.2f}",
                "after first step": "{over_trl[after_first_step]:.2f}",
            },
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
