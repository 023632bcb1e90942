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
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tba_jax.bench import harness, trl_peer
from tba_jax.bench.harness import Figures
from tba_jax.run.model_parts import START_MODEL
from tba_jax.tasks.arithmetic import TRAIN_SIZE, Arithmetic

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
_COLUMNS = (
    "from_command_s",
    "first_step_s",
    "after_first_step_s",
    "steps",
    "over_trl.from_command",
    "over_trl.after_first_step",
)


class Reached(NamedTuple):
    """Times of one process; seconds count from its start.

    Attributes:
        from_command_s: end of the first evaluation at the accuracy; nan: never reached.
        first_step_s: end of the first step.
        step: step of the evaluation that reached the accuracy, or None.
        accuracies: (step, accuracy, seconds) of every evaluation except that of the start model.
    """

    from_command_s: float
    first_step_s: float
    step: int | None
    accuracies: list[tuple[int, float, float]]

    @property
    def after_first_step_s(self) -> float:
        """Seconds from the end of the first step to the accuracy."""
        return self.from_command_s - self.first_step_s


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = harness.make_parser("time_to_accuracy", __doc__)
    harness.add_peer_flags(parser)
    parser.add_argument(
        "--peer_learning_rates",
        default="1e-4,3e-4,1e-3",
        type=numbers,
        help="learning rates to try; the fastest is used",
    )
    parser.add_argument("--config", choices=_WORKLOADS, default="math", help="preset of the task")
    parser.add_argument("--accuracy", type=float, default=0.95, help="held-out accuracy to reach")
    integers = {"seeds": 5, "num_steps": 150, "eval_period": 10, "num_held_out": 512}
    harness.add_integers(parser, integers | {"num_prompts": 16, "group_size": 16}, group_size=2)
    return harness.run(
        parser,
        argv,
        measure,
        columns=_COLUMNS,
        rows=lambda x: {"ours_cold": x["ours_cold"], "ours_warm": x["ours_warm"], **x["peers"]},
    )


def numbers(text: str) -> list[float]:
    """Return the numbers of a flag, which are separated by commas."""
    return [float(x) for x in text.split(",")]


def measure(args: argparse.Namespace, folder: Path) -> Figures:
    """Return all figures by name.

    Args:
        folder: empty folder for the runs.

    Raises:
        ValueError: a side failed, or no process of a side reached the accuracy.
    """
    versions = {"ours": harness.versions("jax", "jaxlib")}
    runs: dict[str, list[Reached]] = {"ours_cold": [], "ours_warm": []}
    trials: dict[float, float] = {}
    if args.peers:
        versions["trl"] = harness.peer_versions(args.peer_python, trl_peer.PACKAGES)
        runs["trl"] = []
    print("filling the compilation cache", file=sys.stderr)
    warm = folder / "warm"
    _ours(args, folder / "first", warm, seed=0, stop_at=None)
    for rate in args.peer_learning_rates if args.peers else ():
        trials[rate] = _trl(args, folder / f"trl-{rate:g}", rate, seed=0).from_command_s
    fastest = min(trials, key=lambda x: np.nan_to_num(trials[x], nan=np.inf), default=0.0)
    for seed in range(args.seeds):
        for side, found in runs.items():
            at = folder / f"{side}-{seed}"
            if side == "trl":
                reached = _trl(args, at, fastest, seed)
            else:
                cache = warm if side == "ours_warm" else folder / f"cold-{seed}"
                reached = _ours(args, at, cache, seed, stop_at=args.accuracy)
            found.append(reached)
    figures = {side: figures_of(side, found, args.accuracy) for side, found in runs.items()}
    if args.peers:
        for side in ("ours_cold", "ours_warm"):
            figures[side]["over_trl"] = ratios(runs[side], runs["trl"])
        tried = {f"{x:g}": None if np.isnan(s) else s for x, s in trials.items()}
        figures["trl"] |= {"learning_rate": fastest, "from_command_s_of_learning_rates": tried}
    sizes = ("config", "accuracy", "seeds", "num_steps", "eval_period", "num_held_out")
    return {
        "ours_cold": figures["ours_cold"],
        "ours_warm": figures["ours_warm"],
        "peers": {"trl": figures["trl"]} if args.peers else {},
        "workload": {name: getattr(args, name) for name in (*sizes, "num_prompts", "group_size")},
        "versions": versions,
        "hardware": harness.hardware({"platform": "cpu", "device": "cpu"}),
    }


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
    command = [sys.executable, "-m", "tba_jax.main", f"--config={args.config}"]
    command += [f"--workdir={workdir}"]
    command += [f"--config.{name}={value}" for name, value in overrides.items()]
    env = {k: v for k, v in os.environ.items() if "CACHE" not in k or not k.startswith("JAX_")}
    env |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(cache)}
    return watch("tba_jax", command, env, workdir / "metrics.jsonl", "eval/pass_at_1", stop_at)


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
        "problems": [problem(*task.problem("train", int(i))) for i in chosen],
        "held_out": [problem(*task.problem("eval", i)) for i in range(args.num_held_out)],
        "log": str(folder / "log.jsonl"),
    }
    (folder / "job.json").write_text(json.dumps(job))
    command = [args.peer_python, "-P", trl_peer.__file__, str(folder / "job.json")]
    log = folder / "log.jsonl"
    return watch("trl", command, harness.peer_env(), log, "accuracy", args.accuracy)


def watch(
    side: str,
    command: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    accuracy: str,
    stop_at: float | None,
) -> Reached:
    """Run a command and read its growing log.

    Args:
        side: name of the side in errors.
        command, env: command line and environment of the process.
        log: JSON lines with a `step`; the line of step 1 marks the end of the first step.
        accuracy: name of the accuracy in lines that have one.
        stop_at: accuracy at which the process is ended; None: run to the end.

    Raises:
        ValueError: the process failed, made no step or took too long; its last lines go to stderr.
    """
    output = log.parent.with_name(f"{log.parent.name}.txt")
    found, first_step_s, accuracies, num_bytes = None, None, [], 0
    start = time.perf_counter()
    with harness.started(command, output, env) as process:
        is_over = False
        while not is_over and found is None:
            # checked before the read, so that the last lines are read, too
            is_over = process.poll() is not None
            now = time.perf_counter() - start
            if now > harness.TIMEOUT_S:
                raise ValueError(f"{side} took more than {harness.TIMEOUT_S} s. Lower --num_steps")
            lines = _complete_lines(log, num_bytes)
            num_bytes += sum(map(len, lines))
            for line in map(json.loads, lines):
                if accuracy not in line:
                    first_step_s = now if line["step"] == 1 else first_step_s
                elif line["step"]:  # not the evaluation of the start model
                    accuracies.append((line["step"], line[accuracy], now))
                    if stop_at is not None and line[accuracy] >= stop_at:
                        found = line["step"]
            time.sleep(0 if is_over else _POLL_S)
    if first_step_s is None or (process.returncode and found is None):
        raise harness.failure(side, process.returncode, output)
    seconds = float("nan") if found is None else accuracies[-1][2]
    name = log.parent.name
    print(f"{name}: {seconds:.1f} s, first step after {first_step_s:.1f} s", file=sys.stderr)
    return Reached(seconds, first_step_s, found, accuracies)


def _complete_lines(log: Path, start: int) -> list[bytes]:
    """Return the complete lines of a file after its first `start` bytes; [] if it is missing."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(start)
        data = file.read()
    return data[: data.rfind(b"\n") + 1].splitlines(keepends=True)


def figures_of(side: str, runs: Sequence[Reached], accuracy: float) -> Figures:
    """Return the medians over the runs of one side that reached the accuracy."""
    there = [x for x in runs if x.step is not None]
    if not there:
        best = max((value for x in runs for _, value, _ in x.accuracies), default=0.0)
        raise ValueError(
            f"{side} never reached an accuracy of {accuracy}, {best} at most; give a lower "
            "--accuracy or more --num_steps"
        )
    names = ("from_command_s", "after_first_step_s", "first_step_s")
    return {
        **{name: statistics.median(getattr(x, name) for x in there) for name in names},
        "steps": statistics.median(x.step or 0 for x in there),
        "reached": f"{len(there)} of {len(runs)}",
        "runs": [{**x._asdict(), "after_first_step_s": x.after_first_step_s} for x in there],
    }


def ratios(ours: Sequence[Reached], theirs: Sequence[Reached]) -> Figures:
    """Return the medians over seeds of our time divided by the peer's time."""
    pairs = [(x, y) for x, y in zip(ours, theirs, strict=True) if None not in (x.step, y.step)]
    if not pairs:
        raise ValueError("no seed has both sides at the accuracy. Give more --seeds or --num_steps")
    return {
        name: statistics.median(getattr(x, f"{name}_s") / getattr(y, f"{name}_s") for x, y in pairs)
        for name in ("from_command", "after_first_step")
    }


if __name__ == "__main__":
    sys.exit(main())
