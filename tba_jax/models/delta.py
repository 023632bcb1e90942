# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet: attention with a fixed-size state in place of keys and values.

The state of a head is a matrix S [k f] that maps keys to values. Each token decays the state,
corrects the state's value for the token's key, and reads the state with the token's query:

    S <- exp(decay) S;  S <- S + rate key (value - key S);  output = query S

`mix` computes the outputs in chunks of tokens; a decode step is a chunk of one token. Invariant: up
to rounding, the output of a token depends only on the earlier tokens of its sequence, not on the
division into chunks or on other sequences of the row.

Reference: arXiv:2412.06464; the products within a chunk are those of arXiv:2406.06484.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from tba_jax.models.attention import Visible
from tba_jax.models.kv_cache import State

CHUNK = 64
"""Longest chunk, a power of two: within a chunk all pairs of tokens are computed."""


class Inputs(NamedTuple):
    """Projections of tokens, for h key heads with r value heads each.

    Attributes:
        qkv: [*b s h w], queries, keys and values of each key head, w = 2 k + r f.
        taps: [h w t], kernel of the convolution over the last t tokens.
        decay: float32 [*b s h r], at most 0.
        rate: float32 [*b s h r], from 0 to 1.
        key_dim: k, size of a key.
    """

    qkv: Array
    taps: Array
    decay: Array
    rate: Array
    key_dim: int


def mix(
    x: Inputs,
    visible: Visible,
    state: State | None = None,
    ends: Int[Array, " b"] | None = None,
) -> tuple[Float[Array, "b s h r f"], State]:
    """Return (output of every token, state after each row).

    The output at a padded position is finite but has no meaning.

    Args:
        x: projections of rows.
        visible: return value of `attention.causal` or `attention.packed`; the state after a packed
            row has no meaning.
        state: state before each row, with one sequence per row; None: no tokens.
        ends: index after the last valid position of each row; None: the length of the rows.
    """
    (b, s, h, w), k = x.qkv.shape, x.key_dim
    valid = visible.mask[:, :, None, None]
    rows = jnp.where(valid, x.qkv, 0)  # zeros do not change a state
    decay, rate = (jnp.where(valid, y, 0) for y in (x.decay, x.rate))
    r = decay.shape[-1]
    wide = jnp.promote_types(jnp.float32, rows.dtype)
    if state is None:
        memory = jnp.zeros((b, h, r, k, (w - 2 * k) // r), wide)
        state = State(memory, jnp.zeros((b, h, x.taps.shape[-1] - 1, w), wide))
    extended = jnp.concatenate([jnp.swapaxes(state.inputs, 1, 2), rows.astype(wide)], axis=1)
    mixed = jax.nn.silu(_convolved(extended, x.taps.astype(wide), visible))
    q, keys, values = jnp.split(mixed, (k, 2 * k), axis=-1)
    q, keys, values = _unit(q) * k**-0.5, _unit(keys), values.reshape(b, s, h, r, -1)
    out, memory = _delta_rule(q, keys, values, decay, rate, visible, state.memory)
    ends = jnp.full((b,), s) if ends is None else ends
    last = ends[:, None] + jnp.arange(state.inputs.shape[2])[None]
    inputs = jnp.take_along_axis(extended, last[:, :, None, None], axis=1)
    return out.astype(x.qkv.dtype), State(memory, jnp.swapaxes(inputs, 1, 2))


def _unit(x: Float[Array, "*b e"]) -> Float[Array, "*b e"]:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _convolved(
    extended: Float[Array, "b before_and_s h w"], taps: Float[Array, "h w t"], visible: Visible
) -> Float[Array, "b s h w"]:
    """Return the causal convolution along each sequence, for each channel separately."""
    s, width = visible.mask.shape[1], taps.shape[-1]
    index = jnp.broadcast_to(jnp.arange(s), visible.mask.shape)
    previous, at = _previous(visible, index), index
    total = jnp.zeros_like(extended[:, :s])
    for back in range(width):
        first = width - 1 - back
        tokens = jax.lax.slice_in_dim(extended, first, first + s, axis=1)
        if visible.prompts is not None:  # a response may not be next to its prompt
            tokens = jnp.take_along_axis(
                extended[:, width - 1 :], jnp.maximum(at, 0)[:, :, None, None], axis=1
            )
        if visible.segments is not None:
            tokens = jnp.where((at >= 0)[:, :, None, None], tokens, 0)
            before = jnp.take_along_axis(previous, jnp.maximum(at, 0), axis=1)
            at = jnp.where(at >= 0, before, -1)
        total = total + tokens * taps[None, None, ..., first]
    return total


def _previous(visible: Visible, index: Int[Array, "b s"]) -> Int[Array, "b s"]:
    """Return the index of the previous token of the same sequence; -1 for a first token."""
    if visible.segments is None:
        return index - 1
    goes_on = jnp.pad(visible.segments[:, 1:] == visible.segments[:, :-1], ((0, 0), (1, 0)))
    if visible.prompts is None:
        return jnp.where(goes_on, index - 1, -1)
    of_queries, of_keys = visible.prompts
    last = jax.lax.cummax(jnp.where(of_keys > 0, index, -1), axis=1)
    return jnp.where(goes_on, index - 1, jnp.where(of_queries > 0, last, -1))


class _Chunks(NamedTuple):
    """Dependencies of the tokens in n chunks of c tokens: earlier tokens and a state.

    Attributes:
        seen: bool [b n c c], the tokens of the chunk that each token depends on, including itself.
        starts: float32 [b n c], 1 if a token depends on the state after the previous chunk; for
            rows with shared prompts also on the state after the last prompt before the chunk.
        prompt_end: int32 [b n], index of the last token of a prompt in each chunk; -1 without one.
    """

    seen: Array
    starts: tuple[Array, ...]
    prompt_end: Array | None


def _chunks(visible: Visible, c: int) -> _Chunks:
    def divided(x: Array, filler: int) -> Array:
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % c)), constant_values=filler)
        return x.reshape(x.shape[0], -1, c)

    causal = jnp.tril(jnp.ones((1, 1, c, c), bool))
    if visible.segments is None:
        num = -(-visible.mask.shape[1] // c)
        return _Chunks(causal, (jnp.ones((1, num, c)),), None)
    segments = divided(visible.segments, 0)
    related = segments[..., None] == segments[..., None, :]
    before = jnp.pad(segments[:, :-1, -1:], ((0, 0), (1, 0), (0, 0)), constant_values=-1)
    from_last = segments == before
    if visible.prompts is None:
        return _Chunks(causal & related, (from_last.astype(jnp.float32),), None)
    of_queries, of_keys = divided(visible.prompts[0], 0), divided(visible.prompts[1], -1)
    related = related | (of_queries[..., None] == of_keys[..., None, :])
    newest = jax.lax.cummax(jnp.max(of_keys, axis=2), axis=1)
    newest = jnp.pad(newest[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    from_prompt = ~from_last & (of_queries == newest[..., None])
    prompt_end = jnp.max(jnp.where(of_keys > 0, jnp.arange(c)[None, None], -1), axis=2)
    starts = from_last.astype(jnp.float32), from_prompt.astype(jnp.float32)
    return _Chunks(causal & related, starts, prompt_end)


def _delta_rule(
    q: Float[Array, "b s h k"],
    keys: Float[Array, "b s h k"],
    values: Float[Array, "b s h r f"],
    decay: Float[Array, "b s h r"],
    rate: Float[Array, "b s h r"],
    visible: Visible,
    memory: Float32[Array, "b h r k f"],
) -> tuple[Float[Array, "b s h r f"], Float32[Array, "b h r k f"]]:
    """Return (output of every token, state after each row)."""
    (b, s, h, _), (r, f) = q.shape, values.shape[-2:]
    c = min(CHUNK, 1 << (s - 1).bit_length())
    of = _chunks(visible, c)

    def divided(x: Array, axis: int) -> Array:
        """Reshape [b s ...] to [b n ...] with the c tokens of a chunk on this axis."""
        x = jnp.pad(x, ((0, 0), (0, -s % c), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(b, -1, c, *x.shape[2:]), 2, axis)

    q, keys = (divided(x, -2)[:, :, :, None] for x in (q, keys))  # for all value heads of a key
    values, decay, rate = divided(values, -2), divided(decay, -1), divided(rate, -1)
    seen = of.seen[:, :, None, None]
    # Decay from the state on which a token depends, and between two dependent tokens.
    total = jnp.einsum("bnij,bnhrj->bnhri", of.seen.astype(decay.dtype), decay, precision="highest")
    pairs = jnp.exp(jnp.where(seen, total[..., :, None] - total[..., None, :], -jnp.inf))
    # The corrections of a chunk's tokens solve a triangular system.
    transposed = jnp.swapaxes(keys, -1, -2)
    before = jnp.tril(_product(keys, transposed) * pairs * rate[..., None], -1)
    inverse = _unit_lower_inverse(before)
    new = _product(inverse, values * rate[..., None])
    kept, scaled = jnp.exp(total)[..., None], keys * rate[..., None]
    own = _product(q, transposed) * pairs

    def from_state(continues: Array) -> tuple[Array, Array, Array]:
        """Return the factors by which a state enters corrections, outputs and later states."""
        factor = kept * continues[:, :, None, None, :, None]
        return _product(inverse, scaled * factor), q * factor, factor

    starts = tuple(map(from_state, of.starts))
    states = (memory.astype(new.dtype),) * len(starts)
    chunks = (new, own, keys, pairs, starts, of.prompt_end)
    if keys.shape[1] == 1:
        states, out = _run_chunk(states, jax.tree.map(lambda x: x[:, 0], chunks))
        out = out[:, None]
    else:
        chunks = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), chunks)
        states, out = jax.lax.scan(_run_chunk, states, chunks)
        out = jnp.moveaxis(out, 0, 1)
    out = jnp.moveaxis(out, -2, 2).reshape(b, -1, h, r, f)
    return out[:, :s], states[0]


def _run_chunk(states: tuple[Array, ...], chunk: Any) -> tuple[tuple[Array, ...], Array]:
    """Return (states after one chunk, outputs of the chunk); only this step is sequential."""
    new, own, keys, pairs, starts, prompt_end = chunk
    out = jnp.zeros_like(new)
    for state, (corrected, read, _) in zip(states, starts, strict=True):
        new = new - _product(corrected, state)
        out = out + _product(read, state)
    out = out + _product(own, new)

    def after(at: Array | None) -> Array:
        """Return the state after token `at` [b] of the chunk; None: after the last token."""

        def row(x: Array) -> Array:
            if at is None:
                return x[..., -1:, :]
            return jnp.take_along_axis(x, at[:, None, None, None, None], axis=-2)

        found = _product(jnp.swapaxes(keys, -1, -2) * row(pairs), new)
        for state, (_, _, factor) in zip(states, starts, strict=True):
            found = found + row(factor) * state
        return found

    found = [after(None)]
    if prompt_end is not None:
        ends_here = (prompt_end >= 0)[:, None, None, None, None]
        found.append(jnp.where(ends_here, after(jnp.maximum(prompt_end, 0)), states[1]))
    return tuple(found), out


def _product(x: Array, y: Array) -> Array:
    """Return the matrix product in full float32, as rounding errors of all tokens add up."""
    return jnp.matmul(x, y, precision="highest")


@jax.custom_vjp
def _unit_lower_inverse(lower: Float[Array, "*b c c"]) -> Float[Array, "*b c c"]:
    """Return the inverse of 1 + `lower`, which is strictly lower triangular; c is a power of two.

    The matrix is divided into halves recursively. This method uses matrix products and is as exact
    as substitution. A series in powers of `lower` would have fewer steps, but the powers become
    large if keys are similar.
    """
    if lower.shape[-1] == 1:
        return jnp.ones_like(lower)
    half = lower.shape[-1] // 2
    halves = jnp.stack([lower[..., :half, :half], lower[..., half:, half:]])
    above, below = _unit_lower_inverse(halves)
    corner = -_product(below, _product(lower[..., half:, :half], above))
    top = jnp.concatenate([above, jnp.zeros_like(above)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner, below], axis=-1)], axis=-2)


def _inverse_forward(lower: Array) -> tuple[Array, Array]:
    inverse = _unit_lower_inverse(lower)
    return inverse, inverse


def _inverse_backward(inverse: Array, cotangent: Array) -> tuple[Array]:
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (-jnp.tril(_product(transposed, _product(cotangent, transposed)), -1),)


_unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)
