# SPDX-License-Identifier: Apache-2.0
"""Draw one token per row from logits, and say how probable it was.

It does not know models, caches or end-of-sequence tokens. The invariant it owns: the log-prob
returned is that of the distribution actually sampled from, softmax(logits / temperature) over the
full vocabulary; greedy draws are certain and have log-prob 0.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int


def row_uniforms(
    key: Array, first_row: int | Int[Array, ""], num_rows: int, num_steps: int
) -> Float32[Array, "t b"]:
    """One uniform in [0, 1) per step and row, from fold_in(fold_in(key, row), step).

    A row's numbers depend on its index and the step alone: not on how many rows or steps there
    are, nor on when another row ends. Drawn ahead of a decode loop, because a hash per step costs
    more than the arithmetic of sampling on CPU.

    Args:
        key: JAX PRNG key of the decode call.
        first_row: index of the first of these rows.
        num_rows: b.
        num_steps: t.
    """

    def one(step: Array, row: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, row), step))

    rows = first_row + jnp.arange(num_rows)
    return jax.vmap(lambda step: jax.vmap(lambda row: one(step, row))(rows))(jnp.arange(num_steps))


def sample_tokens(
    logits: Float32[Array, "*b v"],
    uniforms: Float32[Array, "*b"],
    temperature: Float[Array, ""] | float,
) -> tuple[Int[Array, "*b"], Float32[Array, "*b"]]:
    """(token, its log-prob) of each row, by inversion of the cumulative distribution.

    token = min { j : sum_{i <= j} w_i > u * sum_i w_i },  w = exp(logits / temperature - max)

    One uniform per row instead of one Gumbel number per vocabulary entry, and the cumulative sum
    is taken in two levels (block, then entry), so the only passes over the vocabulary are the
    maximum and the exponential. A token of weight 0 is never drawn. Probabilities are exact to the
    2^-23 grid of the uniforms.

    Args:
        logits: unnormalised log-probabilities.
        uniforms: in [0, 1), one per row.
        temperature: > 0, divides the logits.
    """
    num_blocks, size = _block_shape(logits.shape[-1])
    x = logits / temperature
    w = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    padding = num_blocks * size - logits.shape[-1]
    if padding:
        w = jnp.pad(w, [(0, 0)] * (w.ndim - 1) + [(0, padding)])
    w = w.reshape(*w.shape[:-1], num_blocks, size)
    block_weights = jnp.sum(w, axis=-1)
    total = jnp.sum(block_weights, axis=-1)
    block, rest = _invert(block_weights, uniforms * total)
    entries = jnp.take_along_axis(w, block[..., None, None], axis=-2)[..., 0, :]
    entry, _ = _invert(entries, rest)
    chosen = jnp.take_along_axis(entries, entry[..., None], axis=-1)[..., 0]
    return block * size + entry, jnp.log(chosen) - jnp.log(total)


def greedy_tokens(
    logits: Float32[Array, "*b v"],
) -> tuple[Int[Array, "*b"], Float32[Array, "*b"]]:
    """(most probable token, 0) of each row: temperature 0 is a point mass."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), jnp.zeros(logits.shape[:-1], jnp.float32)


def _invert(
    weights: Float32[Array, "*b n"], target: Float32[Array, "*b"]
) -> tuple[Int[Array, "*b"], Float32[Array, "*b"]]:
    """(first index whose cumulative weight exceeds target, target minus the weight before it)."""
    n = weights.shape[-1]
    # A triangular matmul: a scan of log2(n) small steps is slower everywhere. HIGHEST: the
    # accelerators' default would round the weights to bfloat16 or TF32.
    upper = jnp.triu(jnp.ones((n, n), jnp.float32))
    cumulative = jnp.matmul(weights, upper, precision=jax.lax.Precision.HIGHEST)
    hit = (cumulative > target[..., None]) & (weights > 0)
    index = jnp.min(jnp.where(hit, jnp.arange(n, dtype=jnp.int32), n), axis=-1)
    # Rounding can leave the target at or above the last sum: then the heaviest entry.
    index = jnp.where(index < n, index, jnp.argmax(weights, axis=-1).astype(jnp.int32))
    at = index[..., None]
    before = jnp.take_along_axis(cumulative - weights, at, axis=-1)[..., 0]
    return index, target - before


def _block_shape(vocab_size: int) -> tuple[int, int]:
    """(number of blocks, block size) near the square root; exact when a divisor lies close."""
    root = math.isqrt(vocab_size - 1) + 1 if vocab_size > 1 else 1
    for size in range(root, root // 4, -1):
        if vocab_size % size == 0:
            return vocab_size // size, size
    return -(-vocab_size // root), root
