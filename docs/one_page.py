# SPDX-License-Identifier: Apache-2.0
"""Trajectory Balance on one page: sample groups, grade, compute the loss, update.

    python docs/one_page.py [--steps=40]
    python docs/one_page.py --data=rows.jsonl --reward=my_rewards.py:score [--model=FOLDER]

The algorithm of `python -m tba_jax.main --config=math` with one searcher, one thread and a small
replay buffer: no placement, checkpoints or logs. Start here with a new idea: change the reward, the
loss or the way groups are drawn, and run the file. It takes about half a minute on two CPU cores.
The model is embedded in the package; `--model` takes any Hugging Face folder. A row of the data has
a `prompt` and other columns, which the reward gets by their names, as in TRL.

Reference: Trajectory Balance with Asynchrony, arXiv 2503.18929, section 3.
"""

import argparse
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.flow.padding import left_pad
from tba_jax.models import model as models
from tba_jax.models.logprobs import Scoring, row_token_logprobs
from tba_jax.rewards.functions import imported
from tba_jax.tasks.arithmetic import problem
from tba_jax.train.groups import of_sums
from tba_jax.train.losses import tb

PROMPTS = 16  # p: prompts of a batch
GROUP = 8  # K: responses to each prompt
BETA = 0.05  # coefficient of the KL term; the target is reference * exp(reward / BETA)
RESPONSE_TOKENS = 24  # longest response
SYNC_PERIOD = 2  # steps for which the searcher keeps its weights
FRESH = 0.5  # m: share of the batches that hold the newest groups; the others are replayed
LEARNING_RATE = 2e-4


class Groups(NamedTuple):
    """Responses to p prompts, K to each, as arrays.

    Attributes:
        tokens: int32 [p k s], prompt left-padded and response right-padded.
        prompt_lengths, response_lengths: int32 [p k].
        rewards: float32 [p k].
        reference: float32 [p k], log-probability of each response under the start model.
    """

    tokens: np.ndarray
    prompt_lengths: np.ndarray
    response_lengths: np.ndarray
    rewards: np.ndarray
    reference: Any


Reward = Callable[..., Sequence[float]]
"""(prompts, completions, further columns of the rows) -> a number for each completion."""


def reward(prompts: list[str], completions: list[str], answer: list[int]) -> list[float]:
    """1 where the last integer of a completion is the answer of its prompt."""
    last = [text.replace(":", ",").replace("=", ",").split(",")[-1] for text in completions]
    return [float(text == str(right)) for text, right in zip(last, answer, strict=True)]


def sums() -> list[dict[str, Any]]:
    """Return the embedded problems: sums of six digits."""
    problems = (problem(index, "train") for index in range(1024))
    return [{"prompt": text, "answer": answer} for text, answer in problems]


def make_logprob(config: Any) -> Any:
    """Return (params, groups) -> log pi(y|x), float32 [p k], summed over the response tokens."""

    def logprob(params: Any, groups: Groups) -> jax.Array:
        p, k, s = groups.tokens.shape
        by_token = row_token_logprobs(
            params,
            groups.tokens.reshape(p * k, s),
            groups.prompt_lengths.reshape(p * k),
            groups.response_lengths.reshape(p * k, 1),
            response_bucket=RESPONSE_TOKENS,
            config=config,
            scoring=Scoring(),
        )
        return by_token.sum(-1).reshape(p, k)

    return logprob


def sample(
    decoder: Decoder,
    params: Any,
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any]],
    grade: Reward,
    longest: int,
    key: jax.Array,
) -> Groups:
    """Sample K responses to the prompt of each row, of at most `longest` tokens; grade them."""
    prompts = [tokenizer.encode(row["prompt"], add_bos=True) for row in rows]
    drawn = decoder.decode(
        params,
        prompts,
        num_samples=GROUP,
        key=key,
        settings=SamplingSettings(RESPONSE_TOKENS, temperature=1.0),
    )
    columns = {name: [row[name] for row in rows for _ in range(GROUP)] for name in rows[0]}
    texts = [tokenizer.decode(y.tokens) for own in drawn for y in own]
    rewards = grade(prompts=columns.pop("prompt"), completions=texts, **columns)
    responses = np.full((len(prompts), GROUP, RESPONSE_TOKENS), tokenizer.pad_id, np.int32)
    for i, j in np.ndindex(len(prompts), GROUP):
        responses[i, j, : len(drawn[i][j].tokens)] = drawn[i][j].tokens
    padded = left_pad(prompts, longest, tokenizer.pad_id)
    return Groups(
        tokens=np.concatenate([np.repeat(padded[:, None], GROUP, 1), responses], -1),
        prompt_lengths=np.repeat([[len(x)] for x in prompts], GROUP, 1),
        response_lengths=np.array([[len(y.tokens) for y in row] for row in drawn]),
        rewards=np.array(rewards, np.float32).reshape(len(prompts), GROUP),
        reference=np.zeros((len(prompts), GROUP), np.float32),
    )


def train(
    model: str,
    num_steps: int,
    seed: int = 0,
    *,
    rows: Sequence[Mapping[str, Any]] = (),
    grade: Reward = reward,
) -> list[float]:
    """Train the model; return the mean reward of the new groups of each publication.

    Args:
        rows: rows of the data, each with a `prompt`; none: `sums`.
        grade: the reward.
    """
    found = models.load(model)
    config, params, tokenizer = found.config, found.params, found.tokenizer
    reference_params, rows = params, rows or sums()
    longest = max(len(tokenizer.encode(row["prompt"], add_bos=True)) for row in rows)
    decoder = Decoder(
        config,
        compute_dtype=jnp.float32,
        eos_ids=tokenizer.eos_ids,
        pad_id=tokenizer.pad_id,
        prompt_tokens=longest,
        max_length=longest + RESPONSE_TOKENS,
    )
    logprob = make_logprob(config)
    reference_logprob = jax.jit(logprob)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(LEARNING_RATE))

    def loss_fn(params: Any, groups: Groups) -> jax.Array:
        # residual = log pi - log pi_ref - r / beta; the loss is its variance in a group (eq. 3).
        data = of_sums(logprob(params, groups), groups.reference, groups.rewards)
        return tb(data, BETA).loss.mean()

    @jax.jit
    def update(params: Any, state: Any, groups: Groups) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.grad(loss_fn)(params, groups), state, params)
        return optax.apply_updates(params, updates), state

    state, draws = optimizer.init(params), np.random.default_rng(seed)
    buffer: deque[Groups] = deque(maxlen=16)
    means: list[float] = []
    for step in range(num_steps):
        if step % SYNC_PERIOD == 0:  # publish, search, merge
            key = jax.random.fold_in(jax.random.key(seed), step)
            numbers = range(step * PROMPTS, (step + 1) * PROMPTS)
            chosen = [rows[i % len(rows)] for i in numbers]
            groups = sample(decoder, params, tokenizer, chosen, grade, longest, key)
            buffer.append(groups._replace(reference=reference_logprob(reference_params, groups)))
            means.append(float(groups.rewards.mean()))
            print(f"step {step:3d}  reward {means[-1]:.3f}", flush=True)
        is_fresh = draws.random() < FRESH
        batch = buffer[-1] if is_fresh else buffer[draws.integers(len(buffer))]
        params, state = update(params, state, batch)
    return means


def main() -> None:
    """Read the flags and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="embedded:start_model", help="Hugging Face folder")
    parser.add_argument("--data", type=Path, help="rows in JSON, one a line; default: sums")
    parser.add_argument("--reward", help="package.module:function or FILE.py:function")
    parser.add_argument("--steps", type=int, default=40, help="optimiser steps")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    lines = args.data.read_text().splitlines() if args.data else ()
    rows, grade = [json.loads(line) for line in lines], reward
    if args.data and not rows:
        parser.error(f"{args.data} has no rows; wanted one JSON object a line")
    if args.reward:
        grade = imported(args.reward)
    train(args.model, args.steps, args.seed, rows=rows, grade=grade)


if __name__ == "__main__":
    main()
