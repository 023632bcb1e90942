# SPDX-License-Identifier: Apache-2.0
"""Roofline bounds: bytes and operations of a workload divided by the rates of this machine.

The module models the work of decode and train steps, and measures memory and arithmetic rates.

Invariant: only unavoidable work counts, so waste never raises a share of the roofline. A decode
step reads the weights once, each response reads its own live keys and values without padding, and a
train step computes nothing twice.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.models import experts, quantized
from tba_jax.models.transformer import TransformerConfig, abstract_params

_TRIALS = 5


@dataclasses.dataclass(frozen=True)
class Work:
    """Work of a phase: bytes read and floating-point operations."""

    num_bytes: float
    num_flops: float


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates of a device: bytes and floating-point operations per second."""

    bytes_per_s: float
    flops_per_s: float

    def bound_s(self, work: Work) -> float:
        """Return the time of `work` in seconds if memory and arithmetic overlap perfectly."""
        return max(work.num_bytes / self.bytes_per_s, work.num_flops / self.flops_per_s)


def decode_work(
    config: TransformerConfig,
    *,
    itemsize: int,
    num_steps: int,
    prompt_tokens: int,
    response_lengths: Sequence[int],
) -> Work:
    """Return the work of decoding some responses, without the prefill of their prompts.

        bytes = steps * weights + keys, values and states that each token reads
        FLOPs = tokens * 2 * matrix entries + scores and sums of attention
            + three products with each state

    Logits and activations are not counted; they are at most a few per cent of the measured shapes.

    Args:
        itemsize: bytes per entry of weights and cache.
        num_steps: model steps in which all responses were decoded together.
        prompt_tokens: length of each prompt.
        response_lengths: number of tokens of each response.
    """
    lengths = np.asarray(response_lengths, np.float64)
    # Token i of a response sees the prompt and the i tokens before it.
    seen = float(np.sum(lengths * prompt_tokens + lengths * (lengths - 1) / 2))
    num, states = _num_attention_layers(config), state_entries(config)
    cached = 2 * num * config.num_kv_heads * config.head_dim * itemsize
    attention = 4 * num * config.num_heads * config.head_dim
    tokens = float(lengths.sum())
    return Work(  # states are float32, read and written
        num_bytes=num_steps * step_entries(config) * itemsize + seen * cached + 8 * tokens * states,
        num_flops=tokens * 2 * (matrix_entries(config) + 3 * states) + seen * attention,
    )


def train_flops(
    config: TransformerConfig,
    *,
    num_rows: int,
    prompt_tokens: int,
    response_tokens: int,
    responses_per_prompt: int = 1,
) -> float:
    """Return the floating-point operations of forward and backward pass, without padding.

    A token takes 6 operations per matrix entry; the output matrix multiplies response tokens only.
    Attention counts visible pairs only. Recomputation in the backward pass does not count.

    Args:
        num_rows: number of responses.
        prompt_tokens, response_tokens: number of tokens in each row.
        responses_per_prompt: number of responses that share the computation of a prompt.
    """
    x, t, share = prompt_tokens, response_tokens, 1 / responses_per_prompt
    table = config.vocab_size * config.hidden_size
    inner = matrix_entries(config) - table
    tokens = x * share + t
    pairs = x * (x + 1) / 2 * share + x * t + t * (t + 1) / 2
    attention = 12 * _num_attention_layers(config) * config.num_heads * config.head_dim
    inner += 3 * state_entries(config)
    return num_rows * (6 * (inner * tokens + table * t) + attention * pairs)


def _num_attention_layers(config: TransformerConfig) -> int:
    return config.num_layers - config.layer_kinds.count("delta")


def state_entries(config: TransformerConfig) -> int:
    """Return the number of entries in the states of all delta layers."""
    size = config.delta_value_heads * config.delta_key_dim * config.delta_value_dim
    return config.layer_kinds.count("delta") * size


def matrix_entries(config: TransformerConfig) -> int:
    """Return the number of weights that multiply a token; only the token's experts count."""
    layers = abstract_params(config)["layers"]
    names = ("router", "delta_rate", "delta_decay", *quantized.MATRICES)
    entries = sum(layers[name].size for name in names if name in layers)
    if config.num_experts:
        each = sum(layers[name].size for name in experts.MATRICES) // config.num_experts
        entries -= each * (config.num_experts - config.experts_per_token)
    return entries + config.vocab_size * config.hidden_size


def step_entries(config: TransformerConfig) -> int:
    """Return the number of weights that a decode step reads, without tables that are indexed."""
    params = abstract_params(config)
    gathered = {"position_embed"} if config.tie_embeddings else {"position_embed", "embed"}
    return sum(
        x.size for x in jax.tree.leaves({k: v for k, v in params.items() if k not in gathered})
    )


def measure_rates(dtype: Any, num_bytes: int) -> Rates:
    """Measure the rates of the default device, as the best of a few large operations.

    Args:
        num_bytes: size of the array that is read; use the size of the weights for equal cache
            effects.
    """
    rows = 1024
    x = jnp.ones((rows, max(1, num_bytes // jnp.dtype(dtype).itemsize // rows)), dtype)
    size = 2048 if jax.devices()[0].platform == "cpu" else 8192
    a = jnp.ones((size, size), dtype)
    return Rates(
        bytes_per_s=max(
            x.nbytes / _best_s(lambda x: jnp.sum(x, axis=1), x),
            x.nbytes / _best_s(lambda x: jnp.sum(x, axis=0), x),
            2 * x.nbytes / _best_s(lambda x: -x, x),
        ),
        flops_per_s=2 * size**3 / _best_s(lambda a: a @ a, a),
    )


def _best_s(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    compiled = jax.jit(function)
    compiled(x).block_until_ready()
    times = []
    for _ in range(_TRIALS):
        start = time.perf_counter()
        compiled(x).block_until_ready()
        times.append(time.perf_counter() - start)
    return min(times)
