# SPDX-License-Identifier: Apache-2.0
"""Command: time of a whole RL step and its parts, compared with TRL's GRPO on the same work.

    python -m tba_jax.bench.rl_step --json
    python -m tba_jax.bench.rl_step --peers=trl --peer_python=trl/bin/python --json

A step samples responses to a batch of prompts, scores them under the reference, and trains on them
once, in one thread. Our side is the main command's synchronous driver, with its own choices unless
flags say otherwise. TRL gets the same checkpoint, prompts, reward,
optimiser and KL coefficient, without gradient checkpointing, and its own micro-batches. Responses
are sampled, so the sides have equal shapes and not equal texts; their mean length is reported.
Every repeat of a side runs in a fresh process, and sides alternate; first steps (which compile) are
excluded, and medians are over all other steps. `rest` is publication, merge and other work. Use a
quiet machine: `step_s_of_repeats` shows disturbed repeats.
"""

import argparse
import itertools
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from tba_jax.bench import harness, trl_peer
from tba_jax.bench.harness import SHAPES, Figures
from tba_jax.config.rules import validate
from tba_jax.config.schema import Config, get_field, make_config
from tba_jax.decoding.session import Session
from tba_jax.models import transformer
from tba_jax.planning.choices import choose
from tba_jax.run import build
from tba_jax.run.run import train

_SIZES = {"prompts": 8, "group": 16, "prompt_tokens": 256, "response_tokens": 81}
_PARTS = ("step_s", "decode_s", "reference_s", "train_s", "rest_s")
_COLUMNS = (*_PARTS, "ratio", "mean_response_tokens", "max_rss_bytes")

# A number that differs between responses and costs nothing.
REWARD = """
def share_of_even(completion_ids, **columns):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = harness.make_parser("rl_step", __doc__)
    parser.add_argument("--model_shape", default="39m", choices=SHAPES, help="a Qwen2 shape")
    harness.add_integers(parser, _SIZES | {"repeats": 3, "warm_steps": 1, "steps": 1}, group=2)
    parser.add_argument(
        "--micro_batch_rows", type=int, default=0, help="of our side; 0: chosen by the run"
    )
    parser.add_argument("--peer_micro_batch_rows", type=harness.at_least(1), default=16)
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
    """Return all figures by name.

    Args:
        folder: empty folder for the checkpoint, the runs and files between processes.

    Raises:
        ValueError: an option or an environment cannot be measured, or a side failed.
    """
    rows = args.prompts * args.group
    for name in ("micro_batch_rows", "peer_micro_batch_rows"):
        if rows % (getattr(args, name) or rows):
            raise ValueError(
                f"got --{name}={getattr(args, name)}, which does not divide the {rows} rows of a "
                "step; give a divisor of --prompts times --group"
            )
    if args.peers:  # fail before anything is measured
        harness.peer_versions(args.peer_python, trl_peer.PACKAGES)
    names = (*_SIZES, "micro_batch_rows", "peer_micro_batch_rows", "warm_steps", "steps", "seed")
    job = {name: getattr(args, name) for name in (*names, "model_shape", "remat")}
    job |= {"folder": str(folder), "beta": 0.05, "learning_rate": 1e-6}
    ours, theirs = harness.own_command("rl_step"), [args.peer_python, "-P", trl_peer.__file__]
    written = harness.run_side("write", job, folder, command=ours)

    def mine(repeat: int) -> Figures:
        own = {"workdir": str(folder / f"run-{repeat}")}
        return _with_medians(harness.run_side("tba_jax", job | own, folder, command=ours))

    def peer(repeat: int) -> Figures:
        env = harness.peer_env()
        return _with_medians(harness.run_side("trl", job, folder, command=theirs, env=env))

    sides = {"tba_jax": mine, **({"trl": peer} if args.peers else {})}
    figures = harness.repeated(sides, args.repeats, "step_s")
    found = figures.pop("tba_jax")
    return {
        **found,
        "peers": {
            name: {**x, "ratio": x["step_s"] / found["step_s"]} for name, x in figures.items()
        },
        "model_shape": args.model_shape,
        "num_params": written["num_params"],
        "workload": {name: job[name] for name in names},
        "remat": args.remat,
        "repeats": args.repeats,
        "hardware": harness.hardware(found),
    }


def _with_medians(report: Figures) -> Figures:
    """Return a report whose `steps` are replaced by the median of every part over them."""
    timed = report.pop("steps")
    return report | {part: statistics.median(step[part] for step in timed) for part in _PARTS}


# --- sides -------------------------------------------------------------------


def write(job: Figures) -> Figures:
    """Write a model folder of random weights with a tokenizer of words, prompts and the reward."""
    folder, config = Path(job["folder"]), SHAPES[job["model_shape"]]
    model = folder / "model"
    harness.write_checkpoint(model, config)
    eos = config.vocab_size - 1
    words = ["<pad>", *(f"w{i}" for i in range(1, eos)), "<eos>"]  # word w7 is token 7
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.save(str(model / "tokenizer.json"))
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "padding_side": "left"}
    settings = {
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", **special},
        "generation_config": {"eos_token_id": eos, "pad_token_id": 0},
    }
    for name, content in settings.items():
        (model / f"{name}.json").write_text(json.dumps(content))
    rng = np.random.default_rng(job["seed"])
    num_prompts = (job["warm_steps"] + job["steps"]) * job["prompts"]
    ids = rng.integers(1, eos, (num_prompts + 1, job["prompt_tokens"]))
    rows = [json.dumps({"prompt": " ".join(f"w{i}" for i in row)}) + "\n" for row in ids]
    (folder / "data").mkdir()
    (folder / "data" / "test.jsonl").write_text(rows[0])
    (folder / "data" / "train.jsonl").write_text("".join(rows[1:]))
    (folder / "reward.py").write_text(REWARD)
    return {"num_params": transformer.num_params(config)}


def steps(job: Figures) -> Figures:
    """Return the seconds of the parts of each timed step of our side."""
    config = run_config(job)
    validate(config)
    config = choose(config, {})
    validate(config)
    parts = Parts()
    session: Any = Session
    builder: Any = build
    make_pass = build.make_reference_pass
    session.step = parts.timed("decode_s", Session.step)
    builder.make_reference_pass = lambda *given: parts.timed("reference_s", make_pass(*given))
    train(config, Path(job["workdir"]), callbacks=[parts.note])
    timed = parts.of_steps()[job["warm_steps"] - 1 :]
    num_responses = job["prompts"] * job["group"]
    return {
        "steps": timed,
        "mean_response_tokens": statistics.mean(x["tokens"] for x in timed) / num_responses,
        "chosen": {name: get_field(config, name) for name, _ in config.chosen},
        "max_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "versions": harness.versions("jax", "jaxlib"),
        **harness.here(),
    }


class Parts:
    """Seconds that a run of one thread spends in the parts of its steps.

    Attributes:
        spent: part -> seconds since the start.
        notes: after each step: seconds of each part so far, the time, and the step's tokens.
    """

    def __init__(self) -> None:
        self.spent = {"decode_s": 0.0, "reference_s": 0.0, "train_s": 0.0}
        self.notes: list[dict[str, float]] = []

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function; its calls wait for their results and count as seconds of a part."""

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            found = jax.block_until_ready(function(*args, **kwargs))
            self.spent[part] += time.perf_counter() - start
            return found

        return call

    def note(self, step: int, values: Mapping[str, float]) -> None:
        """Note the end of a step; a callback of the run, with its metrics."""
        self.spent["train_s"] += values["train/step_s"]
        self.notes.append(
            {
                **self.spent,
                "step_s": time.perf_counter(),
                "tokens": values["train/response_tokens"],
            }
        )

    def of_steps(self) -> list[dict[str, float]]:
        """Return the seconds of the parts of each step but the first, and its response tokens."""
        out = []
        for before, after in itertools.pairwise(self.notes):
            x = {name: after[name] - before[name] for name in (*self.spent, "step_s")}
            x["train_s"] -= x["reference_s"]  # the run counts the reference as part of its step
            x["rest_s"] = x["step_s"] - sum(x[name] for name in self.spent)
            out.append({**x, "tokens": after["tokens"]})
        return out


def run_config(job: Mapping[str, Any]) -> Config:
    """Return the config of a job."""
    folder = Path(job["folder"])
    return make_config(
        {
            "name": "bench/rl_step",
            "driver": "sync",
            "seed": job["seed"],
            "num_steps": job["warm_steps"] + job["steps"],
            "task.name": "custom",
            "task.data_path": str(folder / "data"),
            "task.reward": f"{folder / 'reward.py'}:share_of_even",
            "task.max_prompt_tokens": job["prompt_tokens"],
            "task.num_eval_prompts": 1,
            "model.path": str(folder / "model"),
            "model.remat": job["remat"],
            "batch.num_prompts": job["prompts"],
            "batch.micro_batch_rows": job["micro_batch_rows"],
            "objective.group_size": job["group"],
            "objective.beta": job["beta"],
            "optimizer.learning_rate": job["learning_rate"],
            "search.samples_per_prompt": job["group"],
            "search.num_slots": job["prompts"] * job["group"],
            "search.max_new_tokens": job["response_tokens"],
            "replay.recency_prob": 1.0,
            "reward.num_workers": 1,
            "checkpoint.period": 0,
            # The evaluations are before and after all steps, of one response each.
            "eval.period": 0,
        }
    )


if __name__ == "__main__":
    sys.exit(main())
