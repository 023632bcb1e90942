# SPDX-License-Identifier: Apache-2.0
"""Command: time of a whole RL step and its halves, compared with TRL's GRPO on the same work.

    python -m tba_jax.bench.rl_step --json
    python -m tba_jax.bench.rl_step --peers=trl --peer_python=trl/bin/python --json

A step samples responses to a batch of prompts, scores them under the reference, and trains on them
once, in one thread. Our side is the main command with `driver=sync` and its own choices unless
flags say otherwise. TRL gets the same checkpoint, prompts, reward, optimiser and KL coefficient,
without gradient checkpointing, and its own micro-batches. Responses are sampled, so the sides have
equal shapes and not equal texts. Every repeat of a side runs in a fresh process, and sides
alternate; first steps (which compile) are excluded, and medians are over all other steps.

Of our side, `train_s` is the trainer's step with the pass of the reference, and `search_s` is all
other time. Of TRL, `search_s` is the generation, and `train_s` is all other time. Use a quiet
machine: `step_s_of_repeats` shows disturbed repeats.
"""

import argparse
import functools
import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.bench import harness
from tba_jax.bench.harness import SHAPES, Figures
from tba_jax.commands.entry_point import make_parser
from tba_jax.models import transformer

_SIZES = {"prompts": 8, "group": 16, "prompt_tokens": 256, "response_tokens": 81}
_ROWS = ("micro_batch_rows", "peer_micro_batch_rows")
_PARTS = ("step_s", "search_s", "train_s")
_COLUMNS = (*_PARTS, "ratio", "mean_response_tokens", "max_rss_bytes")

# A number that differs between responses and costs nothing.
REWARD = """
def share_of_even(completion_ids, **columns):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = make_parser("bench.rl_step", __doc__)
    parser.add_argument("--model_shape", default="39m", choices=SHAPES, help="a Qwen2 shape")
    integers = _SIZES | {"repeats": 3, "warm_steps": 1, "steps": 1, "peer_micro_batch_rows": 16}
    harness.add_integers(parser, integers, group=2)
    parser.add_argument(
        "--micro_batch_rows", type=int, default=0, help="of our side; 0: chosen by the run"
    )
    parser.add_argument("--remat", default="auto", choices=("auto", "none", "dots", "layers"))
    harness.add_peer_flags(parser)
    parser.add_argument("--seed", type=int, default=0)
    return harness.run(
        parser,
        argv,
        measure,
        columns=_COLUMNS,
        rows=lambda result: {"tba_jax": result, **result["peers"]},
        sides={"write": write, "tba_jax": steps},
    )


def measure(args: argparse.Namespace, folder: Path) -> Figures:
    """Return all figures by name; `folder` is empty. What cannot be measured is a ValueError."""
    rows = args.prompts * args.group
    for name in _ROWS:
        if rows % (getattr(args, name) or rows):
            raise ValueError(
                f"got --{name}={getattr(args, name)}, which does not divide the {rows} rows of a "
                "step; give a divisor of --prompts times --group"
            )
    job = {name: value for name, value in vars(args).items() if name != "json"}
    job |= {"folder": str(folder), "beta": 0.05, "learning_rate": 1e-6}
    command = harness.own_command("rl_step")
    sides = {"tba_jax": functools.partial(harness.run_side, "tba_jax", job, folder, command)}
    if args.peers:
        own, env, versions = harness.peer(args.peer_python)  # fails before anything is measured
        sides["trl"] = functools.partial(harness.run_side, "trl", job, folder, own, env)
    written = harness.run_side("write", job, folder, command)
    figures = harness.repeated(sides, args.repeats, "step_s")
    found = figures.pop("tba_jax")
    if args.peers:
        found["versions"] |= versions
    return {
        **found,
        "peers": {
            name: {**x, "ratio": x["step_s"] / found["step_s"]} for name, x in figures.items()
        },
        "model_shape": args.model_shape,
        "num_params": written["num_params"],
        "workload": {name: job[name] for name in (*_SIZES, *_ROWS, "warm_steps", "steps", "seed")},
        "remat": args.remat,
        "repeats": args.repeats,
    }


# --- sides -------------------------------------------------------------------


def write(job: Figures) -> Figures:
    """Write a model folder of random weights prompts and the reward."""
    folder, config = Path(job["folder"]), SHAPES[job["model_shape"]]
    harness.write_model(folder / "model", harness.MODELS[job["model_shape"]])
    rng = np.random.default_rng(job["seed"])
    num_prompts = (job["warm_steps"] + job["steps"]) * job["prompts"]
    # A token is a digit; the tokenizer adds one token to the front.
    digits = rng.integers(0, 10, (num_prompts + 1, job["prompt_tokens"] - 1))
    rows = [json.dumps({"prompt": "".join(map(str, row))}) + "\n" for row in digits]
    (folder / "data").mkdir()
    (folder / "data" / "test.jsonl").write_text(rows[0])
    (folder / "data" / "train.jsonl").write_text("".join(rows[1:]))
    (folder / "reward.py").write_text(REWARD)
    return {"num_params": transformer.num_params(config)}


def steps(job: Figures) -> Figures:
    """Run the main command; return the medians of its timed steps."""
    workdir = Path(job["folder"]) / f"run-{job['repeat']}"
    if code := subprocess.call(harness.main_command("custom", workdir, fields(job))):
        sys.exit(code)  # the last line of output is the reason
    timed = harness.timed_steps(workdir, job["warm_steps"])
    tokens = statistics.mean(x["train/response_tokens"] for x in timed)
    return {
        **{part: statistics.median(x[part] for x in timed) for part in _PARTS},
        "mean_response_tokens": tokens / (job["prompts"] * job["group"]),
        "max_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,
        **harness.here(),
    }


def fields(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields in which the config of a job differs from the preset `custom`."""
    folder = Path(job["folder"])
    return {
        "driver": "sync",
        "seed": job["seed"],
        "num_steps": job["warm_steps"] + job["steps"],
        "sync_period": 1,
        "num_searchers": 1,
        "task.data_path": folder / "data",
        "task.reward": f"{folder / 'reward.py'}:share_of_even",
        "task.max_prompt_tokens": job["prompt_tokens"],
        "task.num_eval_prompts": 1,
        "model.path": folder / "model",
        "model.compute_dtype": "float32",
        "model.remat": job["remat"],
        "batch.num_prompts": job["prompts"],
        "batch.micro_batch_rows": job["micro_batch_rows"],
        "objective.group_size": job["group"],
        "objective.beta": job["beta"],
        "optimizer.learning_rate": job["learning_rate"],
        "search.samples_per_prompt": job["group"],
        "search.num_slots": job["prompts"] * job["group"],
        "search.max_new_tokens": job["response_tokens"],
        "search.min_new_tokens": job["response_tokens"],  # as TRL's, which hardly ever end earlier
        "search.initial_fill": 0,
        "replay.recency_prob": 1.0,
        "reward.num_workers": 1,
        "checkpoint.period": 0,
        "eval.period": 0,  # evaluations before and after all steps, of one response each
    }


if __name__ == "__main__":
    sys.exit(main())
