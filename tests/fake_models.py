# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of every family, their Hugging Face folders and tokenizers."""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.decoding.engine import Decoder
from tba_jax.models import lora, transformer
from tba_jax.models import model as models
from tba_jax.models.hf import families, hf_weights
from tba_jax.models.logprobs import Scoring, row_token_logprobs
from tba_jax.models.transformer import TransformerConfig

GOLDEN = Path(__file__).parent / "golden"
# Two float32 implementations of these models agree to 4e-6 of the largest logit; the last digits
# depend on the order of sums. A wrong scaling, bias or norm is off by 1e-2 and more.
TOLERANCE = 1e-5
# bfloat16 has 8 bits: the mean divergence of its next-token distribution from that of float32 is
# 0.3e-4 to 7e-4 nats over golden models and other seeds; torch's own bfloat16 loses as much.
BFLOAT16_KL = 1e-3

# Largest logit of the embedded start model over the texts of the tests, rounded up.
START_MODEL_LOGIT = 16.0
# Largest logit of `random_params` of the tiny models (1.1 to 1.6), rounded up.
TINY_LOGIT = 2.0


def logprob_bound(config, length, largest_logit):
    """Bound of the difference of a token's log-prob in two float32 programs of one model.

    The programs add the same terms in other orders. A logit ends a chain of n sums: of a layer, the
    projections of its input (hidden_size terms), attention (length), its output (num_heads times
    head_dim), and both halves of the MLP (hidden_size, mlp_size); then the logit (hidden_size) and
    the normaliser (vocab_size). Each sum rounds by at most 2^-24 of a partial sum, which is about
    as large as the largest logit. Roundings are independent of each other, so n of them add up as a
    random walk, to sqrt(n) of one (Higham and Mary, 2019). A log-prob is a logit less a normaliser,
    and there are two programs: four such errors, which add up to twice one.

    Args:
        config: of a transformer, or of an encoder with a classifier.
        length: number of tokens of prompt and response.
        largest_logit: absolute value, over the texts that are compared; divided by the temperature.
    """
    heads = config.num_heads * getattr(config, "head_dim", config.hidden_size // config.num_heads)
    of_layer = 2 * config.hidden_size + length + heads + config.mlp_size
    num_sums = config.num_layers * of_layer + config.hidden_size + config.vocab_size
    return 2 * num_sums**0.5 * 2.0**-24 * largest_logit


_SCORING = Scoring()


def token_logprobs(params, tokens, prompt_lengths, response_lengths, **kwargs):
    """Log-probs [p k t] of responses [p k], each in a row [prompt | response] of its own."""
    p, k, s = tokens.shape
    rows = tokens.reshape(p * k, s), prompt_lengths.reshape(-1), response_lengths.reshape(-1, 1)
    return row_token_logprobs(params, *rows, **kwargs).reshape(p, k, -1)


score = jax.jit(token_logprobs, static_argnames=("response_bucket", "config", "scoring"))


def scored_tokens(config, params, prompt, response, scoring=_SCORING, multiple=64):
    """Log-probs float32 [t] of the tokens of a response, by the trainer's scorer.

    Args:
        prompt, response: token IDs, one-dimensional.
        multiple: of the row's length, so that responses share a program.
    """
    n, t = len(prompt), -(-len(response) // multiple) * multiple
    row = np.zeros((1, 1, -(-n // 16) * 16 + t), np.int32)
    row[0, 0, -t - n : -t] = prompt
    row[0, 0, row.shape[-1] - t : row.shape[-1] - t + len(response)] = response
    lengths = np.array([[n]]), np.array([[len(response)]])
    found = score(params, row, *lengths, response_bucket=t, config=config, scoring=scoring)
    return np.asarray(found)[0, 0, : len(response)]


def bfloat16_kl(config):
    """Bound of that divergence.

    Larger with experts, because rounding changes some routes; and with delta layers, because they
    amplify the rounding of their inputs, in torch too. Random models of qwen3_5 with seeds 0 to 3
    (`make_golden`) lose 1.5e-3, 2.1e-3, 0.3e-3, 1.6e-3 nats here, and 2.3e-3, 6.3e-3, 0.5e-3,
    13e-3 in torch. With float32 inside of the delta layers: 1.0e-3, 1.7e-3, 0.1e-3, 1.2e-3.
    """
    return BFLOAT16_KL * (10 if config.num_experts or "delta" in config.pattern else 1)


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def _logits(params, tokens, mask, config, dtype):
    kwargs = {"config": config, "compute_dtype": dtype}
    positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
    hidden = transformer.apply(params, tokens, positions, mask, **kwargs)
    return transformer.unembed(params, hidden, **kwargs)


def logits_of(config, params, tokens, mask, dtype=jnp.float32):
    return np.asarray(_logits(params, tokens, mask, config=config, dtype=dtype))


def teacher_forced(config, params, prompt, response, temperature=1.0, length=64, num_rows=1):
    """Log-probs float64 [t v] of all tokens at each token of a response: one row, then padding."""
    n, end = len(prompt), len(prompt) + len(response)
    row = np.zeros((num_rows, length), np.int32)
    row[0, :end] = np.concatenate([prompt, response])
    logits = logits_of(config, params, row, row >= 0)[0, n - 1 : end - 1].astype(np.float64)
    logits = logits / temperature
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def logprobs_of(config, params, prompt, response, temperature=1.0, length=64, num_rows=1):
    """Log-probs float64 [t] of the tokens of a response, as in `teacher_forced`."""
    of_all = teacher_forced(config, params, prompt, response, temperature, length, num_rows)
    return of_all[np.arange(len(response)), response]


def assert_close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * np.abs(want).max())


def golden_settings(name, **changes):
    """The config.json of a golden model, with other settings."""
    return json.loads((GOLDEN / name / "config.json").read_text()) | changes


# The plainest golden model of each family.
FAMILIES = {
    golden_settings(path.parent.name)["model_type"]: path.parent.name
    for path in sorted(GOLDEN.glob("*/config.json"), reverse=True)
}
FAMILIES = {family: name for family, name in FAMILIES.items() if family in families.FAMILIES}

# A family for each kind of layer (windows, sinks and experts, delta), and layers that have them.
KINDS = {"qwen2": 2, "gemma3_text": 3, "gpt_oss": 2, "qwen3_5_text": 2}


def tiny_config(family="", **changes):
    """A transformer of two layers, 16 wide, 4 query heads on 2 key/value heads, 23 tokens.

    Without `family` it is a Qwen2 when it has a query bias, else a Llama. With one it has the
    architecture of its golden model.
    """
    sizes = {"vocab_size": 23, "max_positions": 64}
    if family:
        golden = families.transformer_config(golden_settings(FAMILIES[family]))
        return replace(golden, **(sizes | changes))
    sizes |= {"hidden_size": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    sizes |= {"head_dim": 6, "mlp_size": 20}
    sizes["family"] = "qwen2" if changes.get("qkv_bias") else "llama"
    return TransformerConfig(**(sizes | changes))


def random_params(config, seed=0):
    """Parameters from numpy: what `init_params` gives, without its compile time."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape, scale=0.3), x.dtype),
        transformer.abstract_params(config),
    )


ONE_LAYER = tiny_config(num_layers=1, tie_embeddings=False)


@functools.cache
def tiny_decoder(config=ONE_LAYER, **changes):
    """A decoder in float32: tokens 0 and 1 end a response, 2 pads.

    One for all tests of a session, so that each of its programs is traced once.
    """
    arguments = {
        "compute_dtype": jnp.float32,
        "eos_ids": (0, 1),
        "pad_id": 2,
        "prompt_tokens": 6,
        "max_length": 26,
        "chunk_steps": 4,
    }
    return Decoder(config, **(arguments | changes))


class Decoded(NamedTuple):
    """Responses to p prompts, k each, in arrays of t = max_new_tokens columns."""

    tokens: Any  # [p k t], pad_id after the end
    lengths: Any  # [p k]
    token_logprobs: Any  # [p k t], 0 at padding
    has_eos: Any  # [p k]


def decode(decoder, params, prompts, *, settings, **options):
    """Responses of `Decoder.decode`, padded."""
    rows = decoder.decode(params, prompts, settings=settings, **options)
    shape = len(rows), len(rows[0]), settings.max_new_tokens
    tokens, logprobs = np.full(shape, decoder.pad_id, np.int32), np.zeros(shape, np.float32)
    for i, j in np.ndindex(shape[:2]):
        y = rows[i][j]
        tokens[i, j, : len(y.tokens)], logprobs[i, j, : len(y.tokens)] = y.tokens, y.token_logprobs
    lengths = np.array([[len(y.tokens) for y in row] for row in rows], np.int32)
    return Decoded(tokens, lengths, logprobs, np.array([[y.has_eos for y in row] for row in rows]))


def make_folder(path, name="llama", **changes):
    """A folder of random weights with the settings of a golden model and these; what it holds."""
    settings = golden_settings(name, **changes)
    config = families.transformer_config(settings)
    params = random_params(config)
    hf_weights.save(path, config, params, settings)
    return config, params


def start_model():
    """(architecture, float32 parameters, tokenizer) of the embedded start model."""
    config, params, _ = load_folder("embedded:start_model", param_dtype=jnp.float32)
    return config, params, models.Tokenizer.load("embedded:start_model")


def load_folder(path, **settings):
    """(architecture, parameters, contents of config.json) of a folder that may lack a tokenizer."""
    found = models.describe(path)
    return found.config, found.load_params(**settings), found.hf_config


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def trained_adapters(config, seed=7):
    """Adapters as after training: B is not zero."""
    rng, shapes = np.random.default_rng(seed), lora.abstract_adapters(config)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape, scale=0.2), jnp.float32), shapes
    )


def logits(params, config):
    return logits_of(config, params, np.arange(12).reshape(2, 6), np.ones((2, 6), bool))


def adapted(base, adapters, config):
    """Logits of base and adapters, not merged."""
    return logits(lora.combine(base, adapters), config)
