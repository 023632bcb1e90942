# SPDX-License-Identifier: Apache-2.0
"""How fast it could be: the bytes and operations of a load over the rates of this machine.

Models of decode and train steps, and the two measurements they rest on. It does not know engines,
peers or workloads. The invariant it owns: only work that nobody can avoid is counted (a decode
step reads the weights once; each response reads its own live keys and values and no padding; a
train step computes nothing twice), so a share of the roofline is never flattered by waste.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.models.transformer import TransformerConfig, abstract_params

_TRIALS = 5


@dataclasses.dataclass(frozen=True)
class Work:
    """What a phase asks of the device: bytes it reads, floating-point operations."""

    num_bytes: float
    num_flops: float


@dataclasses.dataclass(frozen=True)
class Rates:
    """What the device can do: bytes and floating-point operations per second."""

    bytes_per_s: float
    flops_per_s: float

    def bound_s(self, work: Work) -> float:
        """Time of `work` if memory and arithmetic overlap perfectly: the larger of the two."""
        return max(work.num_bytes / self.bytes_per_s, work.num_flops / self.flops_per_s)

    def sum_s(self, work: Work) -> float:
        """Time of `work` if they do not overlap at all."""
        return work.num_bytes / self.bytes_per_s + work.num_flops / self.flops_per_s


def decode_work(
    config: TransformerConfig,
    *,
    itemsize: int,
    num_steps: int,
    prompt_tokens: int,
    response_lengths: Sequence[int],
) -> Work:
    """Everything that decoding some responses needs, without the prefill of their prompts.

    bytes = steps * weights + keys and values seen by each token
    FLOPs = tokens * 2 * matrix entries + attention scores and sums

    Logits and activations are left out: a few per cent at most for the shapes measured.

    Args:
        config: the architecture.
        itemsize: bytes per entry of weights and cache.
        num_steps: model steps that drew the responses together.
        prompt_tokens: length of each prompt.
        response_lengths: tokens of each response.
    """
    lengths = np.asarray(response_lengths, np.float64)
    # The token drawn as number i sees the prompt and the i tokens before it.
    seen = float(np.sum(lengths * prompt_tokens + lengths * (lengths - 1) / 2))
    cached = 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize
    attention = 4 * config.num_layers * config.num_heads * config.head_dim
    return Work(
        num_bytes=num_steps * step_entries(config) * itemsize + seen * cached,
        num_flops=float(lengths.sum()) * 2 * matrix_entries(config) + seen * attention,
    )


def train_flops(
    config: TransformerConfig,
    *,
    num_rows: int,
    prompt_tokens: int,
    response_tokens: int,
    responses_per_prompt: int = 1,
) -> float:
    """Floating-point operations of the forward and backward pass over rows without padding.

    6 per matrix entry and token; the output matrix for response tokens only; attention over
    visible pairs only. What is computed again in the backward pass does not count.

    Args:
        config: the architecture.
        num_rows: responses.
        prompt_tokens, response_tokens: of each.
        responses_per_prompt: so many share the computation of their prompt.
    """
    x, t, share = prompt_tokens, response_tokens, 1 / responses_per_prompt
    table = config.vocab_size * config.hidden_size
    inner = matrix_entries(config) - table
    tokens = x * share + t
    pairs = x * (x + 1) / 2 * share + x * t + t * (t + 1) / 2
    attention = 12 * config.num_layers * config.num_heads * config.head_dim
    return num_rows * (6 * (inner * tokens + table * t) + attention * pairs)


def matrix_entries(config: TransformerConfig) -> int:
    """Weights that multiply every token: all matrices, the output one included."""
    layers = abstract_params(config)["layers"]
    entries = sum(x.size for name, x in layers.items() if not name.endswith(("norm", "bias")))
    return entries + config.vocab_size * config.hidden_size


def step_entries(config: TransformerConfig) -> int:
    """Weights that a step reads: all but tables of which it gathers a few rows."""
    params = abstract_params(config)
    gathered = {"position_embed"} if config.tie_embeddings else {"position_embed", "embed"}
    return sum(
        x.size for x in jax.tree.leaves({k: v for k, v in params.items() if k not in gathered})
    )


def measure_rates(dtype: Any, num_bytes: int) -> Rates:
    """Rates of the default device: the best of a few big operations.

    Args:
        dtype: of the operands.
        num_bytes: size of the array that is read; that of the weights, so that it sits in caches
            as they would.
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
