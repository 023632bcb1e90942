# SPDX-License-Identifier: Apache-2.0
"""Processes of `tba_jax.bench.rl_step` that run tba_jax: the workload and the synchronous driver.

    python -m tba_jax.bench.rl_step_sides JOB.json

Invariant: prompts have the requested number of tokens under the tokenizer written here, and every
side gets the same reward.
"""

import itertools
import json
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tba_jax.bench.decode_engine import SHAPES
from tba_jax.bench.processes import run_job, versions
from tba_jax.bench.synthetic import write_checkpoint
from tba_jax.config.rules import validate
from tba_jax.config.schema import Config, get_field, make_config
from tba_jax.models import transformer
from tba_jax.planning.choices import choose
from tba_jax.report.jsonl import read_jsonl
from tba_jax.run.session import train

REWARD = '''"""A number that differs between responses and costs nothing."""


def share_of_even(completion_ids, **columns):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]
'''


def main(argv: Sequence[str]) -> int:
    """Run one job."""
    return run_job(argv[0], lambda job: (write if job["side"] == "write" else measure)(job))


def write(job: dict[str, Any]) -> dict[str, Any]:
    """Write a model folder of random weights with a tokenizer of words, prompts and the reward."""
    folder, config = Path(job["folder"]), SHAPES[job["shape"]]
    model = folder / "model"
    write_checkpoint(model, config)
    eos = config.vocab_size - 1
    for name, content in tokenizer_files(config.vocab_size).items():
        (model / name).write_text(json.dumps(content))
    (model / "generation_config.json").write_text(
        json.dumps({"eos_token_id": eos, "pad_token_id": 0})
    )
    rng = np.random.default_rng(job["seed"])
    steps = job["warm_steps"] + job["steps"]
    ids = rng.integers(1, eos, (steps * job["prompts"] + 1, job["prompt_tokens"]))
    rows = [json.dumps({"prompt": " ".join(f"w{i}" for i in row)}) + "\n" for row in ids]
    (folder / "data").mkdir()
    (folder / "data" / "test.jsonl").write_text(rows[0])
    (folder / "data" / "train.jsonl").write_text("".join(rows[1:]))
    (folder / "reward.py").write_text(REWARD)
    return {"num_params": transformer.num_params(config)}


def tokenizer_files(vocab_size: int) -> dict[str, Any]:
    """Return file name -> contents of a tokenizer: word w7 is token 7, the last token is EOS."""
    words = ["<pad>", *(f"w{i}" for i in range(1, vocab_size - 1)), "<eos>"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": i, "content": words[i], "special": True, **plain}
                for i in (0, vocab_size - 1)
            ],
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {
                "type": "WordLevel",
                "vocab": {word: i for i, word in enumerate(words)},
                "unk_token": "<pad>",
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<pad>",
            "eos_token": "<eos>",
            "clean_up_tokenization_spaces": False,
            "padding_side": "left",
        },
    }


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of the parts of each timed step."""
    workdir = Path(job["workdir"])
    config = run_config(job)
    validate(config)
    config = choose(config, {})
    validate(config)
    train(config, workdir)
    steps = step_times(read_jsonl(workdir / "metrics.jsonl"))[max(0, job["warm_steps"] - 1) :]
    return {
        "steps": steps,
        "mean_response_tokens": float(np.mean([x["response_length"] for x in steps])),
        "chosen": {name: get_field(config, name) for name, _ in config.chosen},
        "max_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "versions": versions("jax", "jaxlib"),
    }


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
            # There are two evaluations, before and after all steps, each of one response with one
            # token.
            "eval.period": 0,
            **job["overrides"],
        }
    )


def step_times(records: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Return the seconds of the parts of each step but the first, and its mean response length.

    Args:
        records: metrics of a synchronous run that publishes at every step and has no evaluation
            between its steps.
    """
    steps = [x for x in records if "train/loss" in x]
    out = []
    for before, step in itertools.pairwise(steps):
        parts = {
            "decode_s": step["search/decode_s"],
            "reference_s": step["search/reward_s"],
            "train_s": step["train/step_s"],
        }
        step_s = step["time_s"] - before["time_s"]
        length = step["search/response_length_mean"]
        rest_s = step_s - sum(parts.values())
        out.append({"step_s": step_s, **parts, "rest_s": rest_s, "response_length": length})
    return out


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
