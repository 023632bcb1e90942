# SPDX-License-Identifier: Apache-2.0
"""Command: supervised fine-tuning of a language model on given responses, the stage before RL.

    python -m tba_jax.sft --model=DIR_OR_HUB_ID --data=FILE.jsonl --out=DIR [--num_steps=100] ...

Rows of the file have "response" and optionally "prompt". The loss is the mean negative log-prob of
response tokens, including end-of-sequence. Without a prompt, the response follows the
beginning-of-sequence token, as the attacks of task redteam do. AdamW; rows are shuffled in every
pass. Invariant: the same seed and file give the same model.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tba_jax.config.command_line import local_folder
from tba_jax.devices.platform import platform_of
from tba_jax.devices.site import any_device
from tba_jax.flow.padding import left_pad
from tba_jax.models import model as models
from tba_jax.models.hf import hf_weights
from tba_jax.models.logprobs import token_logprobs
from tba_jax.models.scoring import Scoring
from tba_jax.models.shardings import ComputeSharding
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import TransformerConfig
from tba_jax.settings import Schedule
from tba_jax.train.config import OptimizerSettings
from tba_jax.train.optimizers import learning_rate_schedule, make_optimizer

# Steps between two printed losses.
_PRINT_STEPS = 20


def load_rows(path: Path, tokenizer: Tokenizer) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (prompt tokens, response tokens with end-of-sequence) of every line.

    Raises:
        ValueError: an unusable file or line; the message names it.
    """
    if not tokenizer.eos_ids:
        raise ValueError("this model has no end-of-sequence token, so responses could never end")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); want JSON lines") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON ({error}); got {line.strip()[:80]!r}") from None
        if not isinstance(row, dict) or not isinstance(row.get("response"), str):
            raise ValueError(f"{where}: want an object with text under 'response'; got {row!r:.80}")
        prompt = tokenizer.encode(row.get("prompt", ""), add_bos=True)
        if not len(prompt):
            raise ValueError(
                f"{where}: no prompt, and this model has no beginning-of-sequence token to stand "
                "in for one; give a 'prompt'"
            )
        response = tokenizer.encode(row["response"], add_bos=False)
        rows.append((prompt, np.append(response, tokenizer.eos_ids[0]).astype(np.int32)))
    if not rows:
        raise ValueError(f"{path} holds no rows; want one JSON object per line")
    return rows


def batches(
    rows: Sequence[tuple[np.ndarray, np.ndarray]], batch_size: int, pad_id: int, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield (tokens [b 1 s], prompt lengths [b 1], response lengths [b 1]) forever, one shape."""
    rng = np.random.default_rng(seed)
    prompt_len = max(len(prompt) for prompt, _ in rows)
    response_len = max(len(response) for _, response in rows)
    waiting: list[int] = []
    while True:
        while len(waiting) < batch_size:
            waiting += rng.permutation(len(rows)).tolist()
        chosen = [rows[i] for i in waiting[:batch_size]]
        del waiting[:batch_size]
        prompts = left_pad([prompt for prompt, _ in chosen], prompt_len, pad_id)
        responses = np.full((batch_size, response_len), pad_id, np.int32)
        for out, (_, response) in zip(responses, chosen, strict=True):
            out[: len(response)] = response
        lengths = np.array([[len(prompt), len(response)] for prompt, response in chosen], np.int32)
        tokens = np.concatenate([prompts, responses], axis=1)[:, None]
        yield tokens, lengths[:, :1], lengths[:, 1:]


def fine_tune(
    params: Any,
    config: TransformerConfig,
    rows: Sequence[tuple[np.ndarray, np.ndarray]],
    *,
    num_steps: int,
    batch_size: int,
    learning_rate: float,
    warmup_steps: int,
    weight_decay: float,
    pad_id: int,
    seed: int,
) -> tuple[Any, list[float]]:
    """Return (parameters, loss of every step); `params` are donated."""
    settings = OptimizerSettings(
        learning_rate=Schedule(learning_rate, shape="cosine", warmup=warmup_steps),
        weight_decay=weight_decay,
    )
    schedule = learning_rate_schedule(settings.learning_rate, num_steps)
    optimizer = make_optimizer(settings, schedule)
    device = next(iter(jax.tree.leaves(params)[0].devices()))
    sharding = ComputeSharding(config, any_device(platform_of(device)))
    response_len = max(len(response) for _, response in rows)

    def step(params: Any, opt_state: Any, tokens: Any, prompts: Any, responses: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            logprobs = token_logprobs(
                params,
                tokens,
                prompts,
                responses,
                response_bucket=response_len,
                config=config,
                scoring=Scoring(),
                remat="layers",
                sharding=sharding,
            )
            return -jnp.sum(logprobs) / jnp.sum(responses)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    jitted = jax.jit(step, donate_argnums=(0, 1))
    opt_state = optimizer.init(params)
    losses = []
    stream = batches(rows, batch_size, pad_id, seed)
    for i in range(num_steps):
        params, opt_state, loss = jitted(params, opt_state, *next(stream))
        losses.append(float(loss))
        if i % _PRINT_STEPS == 0 or i == num_steps - 1:
            print(f"step {i + 1} of {num_steps}: {losses[-1]:.4f} nats per token", flush=True)
    return params, losses


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tba_jax.sft",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, help="Hugging Face folder or hub id")
    parser.add_argument("--data", type=Path, required=True, help="JSON lines")
    parser.add_argument("--out", required=True, help="folder to write, new or empty")
    parser.add_argument("--num_steps", type=int, default=100, help="optimiser steps")
    parser.add_argument("--batch_size", type=int, default=64, help="rows per step")
    parser.add_argument("--learning_rate", type=float, default=3e-5, help="peak; cosine to 0")
    parser.add_argument("--warmup_steps", type=int, default=0, help="linear warm-up from 0")
    parser.add_argument("--weight_decay", type=float, default=0.0, help="weight decay of matrices")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of rows")
    args = parser.parse_args(argv)
    try:
        if args.num_steps < 1 or args.batch_size < 1 or args.learning_rate <= 0:
            raise ValueError("--num_steps, --batch_size and --learning_rate want positive numbers")
        out = local_folder(args.out, "--out")
        if out.exists() and any(out.iterdir()):
            raise ValueError(f"--out={out}: the folder is not empty. Give a new one")
        source = models.describe(args.model)
        config, tokenizer = source.config, source.load_tokenizer()
        rows = load_rows(args.data, tokenizer)
        longest = max(len(p) for p, _ in rows) + max(len(r) for _, r in rows)
        if longest > config.max_positions:
            raise ValueError(
                f"{args.data}: prompt and response take up to {longest} tokens, the model at "
                f"{args.model} was made for {config.max_positions}; shorten them"
            )
        params, _ = fine_tune(
            source.load_params(),
            config,
            rows,
            num_steps=args.num_steps,
            batch_size=args.batch_size,
            learning_rate=args.learning_rate,
            warmup_steps=args.warmup_steps,
            weight_decay=args.weight_decay,
            pad_id=tokenizer.pad_id,
            seed=args.seed,
        )
        hf_weights.save(out, config, params, source.hf_config, tokenizer_files_from=source.folder)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{out}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
