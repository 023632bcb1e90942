# SPDX-License-Identifier: Apache-2.0
"""Log-probs of given tokens from hidden states and output table, without all logits at once.

    logits = hidden @ table.T / temperature
    logprob = logits[target] - logsumexp(logits)

The forward pass visits the table block by block, with a running maximum and sum for each token.
The backward pass, written by hand, recomputes the blocks, so logits exist for one block of the
vocabulary at a time. The recomputation adds a fourth product to the three necessary ones. Small
logits are therefore kept for the backward pass. Invariant: no array has a token axis and the whole
vocabulary, unless its size is at most `kept_bytes`.

A block of logits is [vocabulary, tokens], so that sums over the vocabulary run over the major axis,
with one token per lane of a vector unit. The table gradient of a block is complete in float32
before it is rounded to the table's dtype, and the whole gradient exists only once, in that dtype.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from tba_jax.models.attention import NO_TOKEN, capped

# Logits of a block, unless its table rows would be fewer or more than `_BLOCK_ROWS`. Each block
# adds to the hidden gradient [n, d]; reading and writing that array costs less than the products
# only if a block has a thousand rows or more.
_BLOCK_LOGITS, _BLOCK_ROWS = 2**24, (1024, 8192)


class _Static(NamedTuple):
    """Static arguments of the compiled program besides shapes."""

    temperature: float
    block: int
    keeps_logits: bool
    cap: float | None
    num_tokens: int
    excluded: tuple[int, ...]


def fused_logprobs(
    hidden: Float[Array, "b t d"],
    table: Float[Array, "v d"],
    targets: Int[Array, "b t"],
    *,
    temperature: float,
    vocab_shards: int = 1,
    vocab_block: int | None = None,
    kept_bytes: int = 0,
    cap: float | None = None,
    num_tokens: int = 0,
    excluded: tuple[tuple[int, ...], Bool[Array, "b t"]] | None = None,
) -> Float32[Array, "b t"]:
    """Return log softmax(hidden @ table.T / temperature)[targets], float32.

    Gradients flow to `hidden` and `table`; there is no forward-mode derivative. Products have
    inputs of the dtype of `hidden` and accumulate in float32.

    Args:
        hidden: states after the last norm. The axis b may be divided over devices; rows stay on
            their devices.
        table: one row per token id, tied to the embedding or not; cast to the dtype of `hidden`
            block by block.
        targets: token ids in [0, v).
        temperature: divides the logits, > 0.
        vocab_shards: number of equal parts into which devices divide the axis v of `table`. Blocks
            are within the parts; a wrong number costs communication, not correctness.
        vocab_block: number of rows of each part in a block; None: chosen from the sizes.
        kept_bytes: logits up to this size, over all devices, are computed once and kept for the
            backward pass, without blocks.
        cap: c of c tanh(logit / c), applied before the temperature; None: no cap.
        num_tokens: number of the first rows that are tokens; the others have probability 0. 0: all.
        excluded: tokens, and the targets at which these tokens have probability 0; None: none.
    """
    (b, t, d), v = hidden.shape, table.shape[0]
    keeps, part = 4 * b * t * v <= kept_bytes, v // vocab_shards
    if vocab_block is None:
        least, most = _BLOCK_ROWS
        vocab_block = min(max(_BLOCK_LOGITS // (b * t), least), most)
    block = part if keeps else vocab_block
    static = _Static(temperature, block, keeps, cap, num_tokens, excluded[0] if excluded else ())
    short = excluded[1].reshape(b * t) if excluded else None
    table, hidden = table.reshape(vocab_shards, part, d), hidden.reshape(b * t, d)
    found: Array = _fused(hidden, table, targets.reshape(b * t), short, static)
    return found.reshape(b, t)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _fused(
    hidden: Float[Array, "n d"],
    table: Float[Array, "m w d"],
    targets: Int[Array, " n"],
    short: Bool[Array, " n"] | None,
    static: _Static,
) -> Float32[Array, " n"]:
    """Return the log-probs of n tokens; the table has m parts of w rows."""
    return _forward(hidden, table, targets, short, static)[0]


def _forward(hidden: Array, table: Array, targets: Array, short: Any, static: _Static) -> Any:
    """Return (result of `_fused`, what its gradient needs)."""
    (m, w, _), n = table.shape, len(targets)
    kept = _block(hidden, table, short, 0, w, static)[2] if static.keeps_logits else None

    def visit(start: Any, size: int, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        """Add a block to the log-sum-exp of each part, and to the logits of the targets."""
        logsumexp, chosen = sums
        ids, _, logits = _block(hidden, table, short, start, size, static, kept)
        found = jnp.where(_is_target(ids, targets), logits, 0.0)
        of_block = jax.nn.logsumexp(logits, axis=1)
        return jnp.logaddexp(logsumexp, of_block), chosen + jnp.sum(found, axis=1)

    first = jnp.full((m, n), -jnp.inf, jnp.float32), jnp.zeros((m, n), jnp.float32)
    parts, chosen = _each_block(w, static.block, visit, first)
    # Only this merge communicates between devices with different parts.
    logsumexp = jax.nn.logsumexp(parts, axis=0)
    return jnp.sum(chosen, axis=0) - logsumexp, (hidden, table, targets, short, logsumexp, kept)


def _backward(static: _Static, saved: Any, cotangent: Array) -> tuple[Array, Array, None, None]:
    """Return the gradients of hidden and table; `saved` is from `_forward`.

    d logprob / d logits = onehot(target) - p
    """
    hidden, table, targets, short, logsumexp, kept = saved
    weight = (cotangent / static.temperature)[None, None]

    def visit(start: Any, size: int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        d_hidden, d_table = carry
        ids, rows, logits = _block(hidden, table, short, start, size, static, kept)
        chosen = jnp.where(_is_target(ids, targets), weight, 0.0)
        d_logits = chosen - jnp.exp(logits - logsumexp[None, None]) * weight
        if static.cap is not None:  # multiply by the derivative of the cap
            d_logits = d_logits * (1 - (logits * static.temperature / static.cap) ** 2)
        d_logits = d_logits.astype(hidden.dtype)
        d_rows = _matmul("mwn,nd->mwd", d_logits, hidden).astype(table.dtype)
        d_table = jax.lax.dynamic_update_slice_in_dim(d_table, d_rows, start, axis=1)
        return d_hidden + _matmul("mwn,mwd->mnd", d_logits, rows), d_table

    # Each part of the table has a separate sum, so that devices add up once, not per block.
    d_hidden = jnp.zeros((len(table), *hidden.shape), jnp.float32)
    first = d_hidden, jnp.zeros_like(table)
    d_hidden, d_table = _each_block(table.shape[1], static.block, visit, first)
    return jnp.sum(d_hidden, axis=0).astype(hidden.dtype), d_table, None, None


_fused.defvjp(_forward, _backward)


def _each_block(
    width: int, block: int, visit: Callable[[Any, int, Any], tuple[Array, Array]], carry: Any
) -> tuple[Array, Array]:
    """Call `carry = visit(start, size, carry)` for each block; return the last `carry`."""
    if block >= width:
        return visit(0, width, carry)
    whole, rest = divmod(width, block)
    # The smaller block is first: after a loop, XLA:CPU would copy the table gradient for an update.
    if rest:
        carry = visit(whole * block, rest, carry)
    if whole:
        carry = jax.lax.fori_loop(0, whole, lambda i, x: visit(i * block, block, x), carry)
    return carry


def _block(
    hidden: Float[Array, "n d"],
    table: Float[Array, "m w d"],
    short: Bool[Array, " n"] | None,
    start: Any,
    size: int,
    static: _Static,
    kept: Float32[Array, "m w n"] | None = None,
) -> tuple[Int[Array, "m x"], Float[Array, "m x d"], Float32[Array, "m x n"]]:
    """Return (token ids, rows of the table, logits) of one block: `size` rows of each part."""
    m, w, _ = table.shape
    ids, rows = (jnp.arange(m) * w)[:, None] + (start + jnp.arange(size))[None], table
    if size < w:
        rows = jax.lax.dynamic_slice_in_dim(table, start, size, axis=1)
        # Multiply by a 1 that the compiler does not know. Otherwise it would move the rounding
        # to bfloat16 out of the loop and keep a rounded copy of the whole table.
        rows = rows * jax.lax.optimization_barrier(jnp.ones((), rows.dtype))
    rows = rows.astype(hidden.dtype)
    if kept is not None:
        return ids, rows, kept
    logits = capped(_matmul("mwd,nd->mwn", rows, hidden), static.cap) / static.temperature
    if static.num_tokens:
        logits = jnp.where((ids < static.num_tokens)[..., None], logits, NO_TOKEN)
    if short is not None:
        is_end = jnp.isin(ids, jnp.asarray(static.excluded, jnp.int32))
        logits = jnp.where(is_end[..., None] & short[None, None], NO_TOKEN, logits)
    return ids, rows, logits


def _is_target(ids: Int[Array, "m w"], targets: Int[Array, " n"]) -> Bool[Array, "m w n"]:
    # Use a comparison, because a gather of rows from a sharded table would communicate.
    return ids[..., None] == targets[None, None]


def _matmul(equation: str, x: Array, y: Array) -> Float32[Array, "..."]:
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)
