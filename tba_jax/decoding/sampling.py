# SPDX-License-Identifier: Apache-2.0
"""Sampling of one token per row of logits, with the token's log-prob.

Invariants: a log-prob is that of the sampling distribution (after temperature, top-k and top-p,
renormalised; 0 for a greedy draw). A token with weight 0 is never drawn. The draw of a row depends
only on the row's logits, settings and two random words.

A draw inverts the cumulative distribution in two levels, first a block of about sqrt(v) tokens,
then a token of that block. Cumulative sums are integers, hence exact: a float32 running sum over
152,064 tokens gives most of them no probability at all. Remaining rounding errors are the float32
exponential and block sums, and the fixed-point masses of `_FULL` units per level. The total
variation distance to the exact softmax stays below 1e-6 for 152,064 tokens. Every token can be
drawn if its block has at least 2.4e-10 of the probability and the token at least that share of its
block.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, Integer, UInt32

# Integer mass of one level. Rounding adds at most half a unit per entry, and the float32 shares of
# n entries sum to 1 within n / 2^24: cumulative sums stay below 2^31 up to 7,000 entries a level.
_FULL = 2**31 - 2**20

# Weights lie in [0, 1]. The float32 bit patterns of such values have 30 bits and the same order.
_WEIGHT_BITS = 30

# Constants of threefry.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def fold_in(
    key: Array | UInt32[np.ndarray, "2"], numbers: int | Integer[np.ndarray, " n"]
) -> UInt32[np.ndarray, "*n 2"]:
    """Return key data of `jax.random.fold_in(key, number)`, for one number or several, bit for bit.

    The host computes the keys: a searcher needs a few per prompt while its device is busy, and
    launching a program would take longer.

    Args:
        key: JAX PRNG key, or its key data.
        numbers: integers from 0 to 2**32 - 1.

    References:
        Threefry-2x32 with 20 rounds, Salmon et al., 2011.
    """
    first, second = key if isinstance(key, np.ndarray) else np.asarray(jax.random.key_data(key))
    low = np.asarray(numbers).astype(np.uint32)
    keys = (first, second, first ^ second ^ _PARITY)
    with np.errstate(over="ignore"):  # sums are modulo 2**32
        x, y = np.zeros_like(low) + keys[0], low + keys[1]
        for i in range(5):
            for turns in _ROTATIONS[i % 2]:
                x = x + y
                y = (y << np.uint32(turns)) | (y >> np.uint32(32 - turns))
                y = x ^ y
            x = x + keys[(i + 1) % 3]
            y = y + keys[(i + 2) % 3] + np.uint32(i + 1)
    return np.stack([x, y], axis=-1)


def random_bits(
    row_keys: UInt32[Array, "b 2"], first_step: Int32[Array, " b"], num_steps: int
) -> UInt32[Array, "t b 2"]:
    """Return two random 32-bit words per row and step: the threefry hash of row key and step.

    The words of a row do not depend on the other rows, the number of steps or the start of a chunk.
    They are the key data of fold_in(row_key, step), so no other code may fold numbers into a row
    key. They are computed before a chunk of steps, because hashes in the loop make it slower to
    run and to compile.

    Args:
        row_keys: threefry key data of each row.
        first_step: index in the response of each row's token at the first of these steps.
        num_steps: t, number of steps.
    """
    keys = jax.random.wrap_key_data(row_keys, impl="threefry2x32")
    steps = first_step[None] + jnp.arange(num_steps, dtype=jnp.int32)[:, None]
    folded = jax.vmap(jax.vmap(jax.random.fold_in), in_axes=(None, 0))(keys, steps)
    return jax.random.key_data(folded)


def sample_tokens(
    logits: Float32[Array, "b v"],
    bits: UInt32[Array, "b 2"],
    temperature: Float32[Array, " b"],
    top_p: Float32[Array, " b"],
    top_k: Int32[Array, " b"],
) -> tuple[Int32[Array, " b"], Float32[Array, " b"]]:
    """Return (token, its log-prob) of each row.

    weight = exp((logits - max) / temperature), zero outside the top-k and then the top-p set
    log-prob = log(weight[token] / sum of the weights)

    Tokens that tie with the last token kept by top-k or top-p are kept, too. The set is exact for
    the float32 weights. If the mass of a set is within about 1e-6 of top_p, exact arithmetic might
    keep more or fewer tokens, of about that mass. Greedy rows take the first of the largest logits.

    Args:
        logits: unnormalised log-probabilities. -inf forbids a token; at least one logit of a row
            must be finite. NaN or +inf gives the log-prob NaN.
        bits: return value of `random_bits`.
        temperature: divides the logits; 0 is greedy.
        top_p: number in (0, 1]. The smallest set of most probable tokens with at least this mass is
            kept, always with the first token; 1 keeps all.
        top_k: number of most probable tokens kept, applied before top_p; 0 keeps all.

    Returns:
        Tokens, and log-probs in float32, within 1e-6 of the exact value (relative, below -10).
    """
    (b, v), size = logits.shape, _block_size(logits.shape[1])
    # Every use begins with this padding, so that XLA fuses it and stores no array of size v.
    filled = jnp.pad(logits, ((0, 0), (0, -v % size)), constant_values=-jnp.inf)
    blocks = filled.reshape(b, -1, size)
    block_max = jax.lax.optimization_barrier(jnp.max(blocks, axis=-1))
    peak = jnp.max(block_max, axis=-1)[:, None, None]
    is_greedy = temperature == 0
    divisor = jnp.where(is_greedy, 1, temperature)[:, None, None]

    # Only the draw with top-k or top-p stores its [b v] weights, because the search reads them many
    # times. The plain draw recomputes the exponentials of one block, which costs less than a store.
    def tempered(x: Float32[Array, "b n e"]) -> Float32[Array, "b n e"]:
        return jnp.exp((x - peak) / divisor)

    def truncated() -> tuple[Array, Array]:
        # The barrier keeps one copy: a second exponential may differ in the last bit, and then a
        # token at the threshold would be in the set of the search but not in that of the draw.
        source = jax.lax.optimization_barrier(tempered(blocks))
        least = _least_kept_weight(source, top_p, top_k)[:, None, None]
        return _draw(source, lambda w: jnp.where(w >= least, w, 0), bits)

    # Every row has the plain draw, so that neighbours with top-k or top-p change no bit of it.
    plain, is_truncated = _draw(blocks, tempered, bits), (top_p < 1) | (top_k > 0)
    found = jax.lax.cond(jnp.any(is_truncated), truncated, lambda: plain)
    token, logprob = (jnp.where(is_truncated, x, y) for x, y in zip(found, plain, strict=True))
    # The first of the largest logits by blocks: XLA's argmax is ten times slower on CPU.
    block = jnp.argmax(block_max, axis=-1).astype(jnp.int32)
    entry = jnp.argmax(_entries(blocks, block), axis=-1).astype(jnp.int32)
    return jnp.where(is_greedy, block * size + entry, token), jnp.where(is_greedy, 0, logprob)


def _draw(
    blocks: Float32[Array, "b n e"], weights: Callable[[Array], Array], bits: UInt32[Array, "b 2"]
) -> tuple[Int32[Array, " b"], Float32[Array, " b"]]:
    """Return (token, log-prob) of a draw in proportion to weights(blocks)."""
    sums = _block_sums(weights(blocks))
    block = _invert(_fixed_point(sums), bits[:, 0])
    entries = weights(_entries(blocks, block)[:, None])[:, 0]
    entry = _invert(_fixed_point(entries), bits[:, 1])
    weight = jnp.take_along_axis(entries, entry[:, None], axis=-1)[:, 0]
    return block * blocks.shape[2] + entry, jnp.log(weight / jnp.sum(sums, axis=-1))


def _least_kept_weight(
    weights: Float32[Array, "b n e"], top_p: Float32[Array, " b"], top_k: Int32[Array, " b"]
) -> Float32[Array, " b"]:
    """Return the smallest weight that top-k and then top-p keep; the largest weight of a row is 1.

    Nothing is sorted: each filter keeps a set {w >= t}, and the largest t whose count or mass is at
    least the wanted amount is found bit by bit, with 30 reads of the weights. A filter that no row
    uses reads nothing.
    """

    def total(t: Float32[Array, " b"], counts: bool) -> Float32[Array, " b"]:
        """Return the count or the mass of the weights that are at least t."""
        # Counts up to 2^24 are exact in float32, and CPUs sum float32 faster than integers.
        kept = jnp.where(weights >= t[:, None, None], 1 if counts else weights, 0.0)
        return jnp.sum(_block_sums(kept), axis=-1)

    def largest(wanted: Float32[Array, " b"], counts: bool) -> Float32[Array, " b"]:
        def refine(i: Array, pattern: Array) -> Array:
            candidate = pattern | (1 << (_WEIGHT_BITS - 1 - i))
            t = jax.lax.bitcast_convert_type(candidate, jnp.float32)
            return jnp.where(total(t, counts) >= wanted, candidate, pattern)

        pattern = jax.lax.fori_loop(0, _WEIGHT_BITS, refine, jnp.zeros(wanted.shape, jnp.int32))
        return jax.lax.bitcast_convert_type(pattern, jnp.float32)

    def by_count() -> Float32[Array, " b"]:
        return jnp.where(top_k > 0, largest(top_k.astype(jnp.float32), True), 0.0)

    least = jax.lax.cond(jnp.any(top_k > 0), by_count, lambda: jnp.zeros_like(top_p))

    def by_mass() -> Float32[Array, " b"]:
        # At top_p 0 the token with the largest weight, which is 1, remains.
        wanted = jnp.maximum(top_p * total(least, False), jnp.finfo(jnp.float32).tiny)
        return jnp.where(top_p < 1, largest(wanted, False), least)

    return jax.lax.cond(jnp.any(top_p < 1), by_mass, lambda: least)


def _fixed_point(weights: Float32[Array, "b n"]) -> Int32[Array, "b n"]:
    """Return integers proportional to the weights, with a sum of about `_FULL`; 0 stays 0."""
    share = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return jnp.round(share * _FULL).astype(jnp.int32)


def _invert(masses: Int32[Array, "b n"], word: UInt32[Array, " b"]) -> Int32[Array, " b"]:
    """Return the first index whose cumulative mass exceeds floor(word * total / 2^32), exactly.

    All 2^32 words are equally likely, and each belongs to one unit of mass. The number of words of
    an index is therefore proportional to its mass, rounded to a whole number; mass 0 has no word.
    """
    cumulative = jnp.cumsum(masses, axis=-1)
    target = _high_product(word, cumulative[:, -1].astype(jnp.uint32)).astype(jnp.int32)
    index = jnp.sum(cumulative <= target[:, None], axis=-1, dtype=jnp.int32)
    return jnp.minimum(index, masses.shape[-1] - 1)  # a row without mass (NaN) stays in range


def _high_product(a: UInt32[Array, " b"], b: UInt32[Array, " b"]) -> UInt32[Array, " b"]:
    """Return the upper 32 bits of a 64-bit product, from 16-bit halves: devices lack int64."""
    # XLA cannot compile `jax.lax.mulhi` in a program that is divided over devices.
    a_low, a_high = a & 0xFFFF, a >> 16
    b_low, b_high = b & 0xFFFF, b >> 16
    cross_a, cross_b = a_high * b_low, a_low * b_high
    carry = ((a_low * b_low) >> 16) + (cross_a & 0xFFFF) + (cross_b & 0xFFFF)
    return a_high * b_high + (cross_a >> 16) + (cross_b >> 16) + (carry >> 16)


def _block_sums(blocks: Float32[Array, "b n e"]) -> Float32[Array, "b n"]:
    # The barrier prevents XLA from merging this sum with a later sum over the blocks: the merged
    # sum would read all v entries again, as one long float32 sum.
    return jax.lax.optimization_barrier(jnp.sum(blocks, axis=-1))


def _entries(blocks: Float32[Array, "b n e"], block: Int32[Array, " b"]) -> Float32[Array, "b e"]:
    return jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]


def _block_size(vocab_size: int) -> int:
    """Return the tokens per block: a divisor of v and a multiple of 128 if possible, near sqrt(v).

    A divisor of v needs no padding; 128 is the width of a TPU vector register. The 151,936 tokens
    of Qwen2.5 are 1,187 blocks of 128, and the 128,256 tokens of Llama 334 blocks of 384. The
    50,257 tokens of GPT-2 have no such divisor, and the block size is 256.
    """
    root = math.isqrt(vocab_size - 1) + 1 if vocab_size > 1 else 1
    sizes = range(max(root // 4, 1), min(4 * root, vocab_size) + 1)
    return min(sizes, key=lambda s: (vocab_size % s > 0, s % 128 > 0, abs(math.log(s / root))))
