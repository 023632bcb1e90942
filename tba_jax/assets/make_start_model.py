# SPDX-License-Identifier: Apache-2.0
"""Make the embedded start model: a small character-level Llama that usually guesses sums.

    python -m tba_jax.assets.make_start_model --out=DIR [--seed=0] [--num_steps=1500]

It is pretrained on sums of six digits. Three in four have a direct, often wrong answer
(`hasty_response`); one in four has a correct step-by-step answer (`worked_response`). The model
therefore prefers hasty answers, and reinforcement learning can raise the share of worked ones. The
folder is an ordinary Hugging Face model. No evaluation problem of the task is in the training text.

Measured with seed 0 on 2 cores that others used as well: 15 minutes (900 s of training). On the
1,024 evaluation problems, greedy pass@1 is 37.9 %, and every greedy response is hasty
(38.1 % of hasty answers without slips are right). Four responses to each problem at temperature 1:
pass@1 49.7 %; 26.2 % of the responses are worked; 100.0 % of the worked and 31.7 % of the hasty
responses are right.

Invariant: the same seed on the same machine writes the same folder.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from tba_jax.models import transformer
from tba_jax.models.hf import config_json, hf_weights
from tba_jax.tasks import arithmetic

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD, BOS, EOS, _ = range(len(SPECIAL_TOKENS))
# All printable ASCII characters, so that the tokenizer can encode any English text.
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
_CHARACTER_IDS = {c: len(SPECIAL_TOKENS) + i for i, c in enumerate(CHARACTERS)}

CONFIG = transformer.TransformerConfig(
    vocab_size=len(SPECIAL_TOKENS) + len(CHARACTERS),
    hidden_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=24,
    mlp_size=256,
    rope_theta=10000.0,
    norm_eps=1e-5,
    tie_embeddings=True,
    max_positions=512,
)

# How often a hasty answer is off by a little more: sampled ones are right less often than greedy.
SLIP_PROB = 0.1
MATRIX_LEARNING_RATE, OTHER_LEARNING_RATE = 0.01, 2e-3  # peaks: Muon, Adam
NUM_ROWS = 256  # of a batch; 1 in 4 is worked
PROMPT_TOKENS = 1 + arithmetic.MAX_PROMPT_CHARS  # of every prompt


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="root of the random numbers")
    parser.add_argument("--num_steps", type=int, default=1500, help="optimiser steps")
    args = parser.parse_args(argv)
    start = time.monotonic()
    params = pretrain(args.seed, args.num_steps)
    write_tokenizer(args.out)
    hf_config = config_json.hf_config(CONFIG, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    hf_weights.save(args.out, CONFIG, params, hf_config)
    print(f"{args.out}: written after {time.monotonic() - start:.0f} s")
    return 0


def pretrain(seed: int, num_steps: int) -> transformer.Params:
    """Return parameters after `num_steps` of cross-entropy on responses of both kinds."""
    params = transformer.init_params(CONFIG, jax.random.key(seed))
    tx = _optimizer(num_steps)
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, worked, hasty):
        loss = jax.value_and_grad(_loss, has_aux=True)
        (_, losses), grads = loss(params, worked, hasty)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, losses

    batches = text_batches(seed, NUM_ROWS)
    start = time.monotonic()
    for i in range(num_steps):
        params, opt_state, losses = step(params, opt_state, *next(batches))
        if i % 100 == 0 or i == num_steps - 1:
            worked, hasty = map(float, losses)  # waits for the step, so that the time is true
            print(
                f"step {i} of {num_steps}, {time.monotonic() - start:.0f} s: nats per token "
                f"(without first tokens): worked {worked:.4f}, hasty {hasty:.4f}",
                flush=True,
            )
    return params


def text_batches(seed: int, num_rows: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield batches forever: worked and hasty rows, int32 [rows, s], <bos> prompt response <eos>.

    Every problem is drawn once. Its response is worked with probability `worked_share`, else hasty.
    A row waits until a batch has room for its kind.
    """
    rng = np.random.default_rng(seed)
    # Other problems than the task's own training set, though these could be met as well.
    index = arithmetic.TRAIN_SIZE * (1 + 16 * seed)
    num_worked = num_rows // 4
    num_hasty = num_rows - num_worked
    worked: list[str] = []
    hasty: list[str] = []
    while True:
        while len(worked) < num_worked or len(hasty) < num_hasty:
            prompt, _ = arithmetic.problem(index, "train")
            index += 1
            if rng.random() < arithmetic.worked_share(prompt):
                worked.append(prompt + arithmetic.worked_response(prompt))
            else:
                response = arithmetic.hasty_response(prompt, rng, slip_prob=SLIP_PROB)
                hasty.append(prompt + response)
        yield token_rows(worked[:num_worked]), token_rows(hasty[:num_hasty])
        del worked[:num_worked], hasty[:num_hasty]


def token_rows(texts: Sequence[str]) -> np.ndarray:
    """Return int32 [rows, s] with <bos> text <eos>, padded to the longest possible response.

    Args:
        texts: prompts with responses, all of them worked or all of them hasty.
    """
    is_worked = arithmetic.is_worked(texts[0][arithmetic.MAX_PROMPT_CHARS :])
    longest = arithmetic.MAX_WORKED_CHARS if is_worked else arithmetic.MAX_HASTY_CHARS
    rows = np.full((len(texts), PROMPT_TOKENS + longest + 1), PAD, np.int32)
    for row, text in zip(rows, texts, strict=True):
        ids = [BOS, *(_CHARACTER_IDS[c] for c in text), EOS]
        row[: len(ids)] = ids
    return rows


def write_tokenizer(folder: Path) -> None:
    """Write the character-level tokenizer's files and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {token: i for i, token in enumerate(SPECIAL_TOKENS)} | _CHARACTER_IDS
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
    )
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = ("pad_token", "bos_token", "eos_token", "unk_token")
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **dict(zip(roles, SPECIAL_TOKENS, strict=True)),
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONFIG.max_positions,
            "padding_side": "left",
        },
    )
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD},
    )


def _loss(params: transformer.Params, worked: jax.Array, hasty: jax.Array) -> tuple[Any, Any]:
    """Return cross-entropies per response token.

    Returns:
        The mean over all response tokens, and [worked, hasty] means without first tokens.
    """
    totals, counts, after_first = [], [], []
    for tokens in (worked, hasty):
        num_rows, length = tokens.shape
        hidden = transformer.apply(
            params,
            tokens[:, :-1],
            jnp.broadcast_to(jnp.arange(length - 1), (num_rows, length - 1)),
            jnp.ones((num_rows, length - 1), bool),  # causal; padding is only ever after the end
            config=CONFIG,
            compute_dtype=jnp.float32,
        )
        targets = tokens[:, PROMPT_TOKENS:]
        logits = transformer.unembed(
            params, hidden[:, PROMPT_TOKENS - 1 :], config=CONFIG, compute_dtype=jnp.float32
        )
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        is_token = (targets != PAD).astype(jnp.float32)
        nats = nats * is_token
        totals.append(nats.sum())
        counts.append(is_token.sum())
        # The first token decides the kind; its entropy would hide what the others have learned.
        after_first.append(nats[:, 1:].sum() / is_token[:, 1:].sum())
    return sum(totals) / sum(counts), jnp.stack(after_first)


def _optimizer(num_steps: int) -> optax.GradientTransformation:
    """Return the optimiser: Adam for embedding and norms, Muon for matrices.

    Muon needs a tenth of the steps that AdamW needs.
    """

    def schedule(peak: float) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(0.0, peak, num_steps // 10, num_steps, peak / 100)

    from_width = optax.contrib.MuonDimensionNumbers(1, (2, 3))
    to_width = optax.contrib.MuonDimensionNumbers((1, 2), 3)
    axes = {
        **dict.fromkeys(("q", "k", "v"), from_width),
        "o": to_width,
        **dict.fromkeys(("gate", "up", "down"), optax.contrib.MuonDimensionNumbers(1, 2)),
    }
    return optax.contrib.muon(
        schedule(MATRIX_LEARNING_RATE),
        weight_decay=0.05,
        adam_b2=0.98,
        adam_learning_rate=schedule(OTHER_LEARNING_RATE),
        muon_weight_dimension_numbers=lambda params: jax.tree_util.tree_map_with_path(
            lambda path, _: axes.get(path[-1].key), params
        ),
    )


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
