# SPDX-License-Identifier: Apache-2.0
"""Flash attention of cuDNN, by `jax.nn.dot_product_attention`: rows, packed rows, and sinks.

Invariant: the results are those of `attention.attend`, whatever the padding contains.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tba_jax.models.permutation import permuted

MOST_COLUMNS = 128
"""Largest head_dim that cuDNN supports on every GPU; from Hopper on it could be 256."""
SINK_COLUMNS = 8
"""Columns that sinks add to head_dim, which must be a multiple of 8."""


def attend(
    q: Float[Array, "b s g r e"],
    k: Float[Array, "b s g e"],
    v: Float[Array, "b s g e"],
    mask: Bool[Array, "b s"],
    *,
    first: Int[Array, " b"] | None = None,
    seen: Bool[Array, "b s s"] | None = None,
    window: int | None = None,
    sinks: Float[Array, "g r"] | None = None,
    implementation: Literal["xla", "cudnn"] = "cudnn",
) -> Float[Array, "b s g r e"]:
    """Attend within rows of one sequence, or with a mask of pairs.

    Args:
        mask, first: as in `attention.Visible`.
        seen: whether each query sees each key; cuDNN reads it once per head, as a dense bias.
            None: each row has one sequence with causal attention, and cuDNN skips the keys that
            the causal mask and the lengths hide.
        window, sinks: as in `attention.Scores`; the window is part of `seen` if that is given.
    """
    b, s, g, r, e = q.shape
    valid = mask[:, :, None, None]
    # Padding may contain nan, which would spread, so set it to 0 on input and output.
    q, k, v = (jnp.where(valid, x, 0) for x in (q.reshape(b, s, g * r, e), k, v))
    if first is not None and seen is None:
        q, k, v = (_turned(x, first) for x in (q, k, v))
    # JAX refuses odd lengths in a gradient.
    before = 0 if sinks is None else 1
    after = (s + before) % 2
    q, k, v = (jnp.pad(x, ((0, 0), (before, after), (0, 0), (0, 0))) for x in (q, k, v))
    options: dict[str, Any]
    if seen is not None:
        # A padded position sees itself, so that no row of the softmax is empty.
        seen = jnp.pad(seen, ((0, 0), *[(before, after)] * 2))
        index = jnp.arange(seen.shape[1])
        seen = seen | ((index[:, None] == index[None]) | (index < before)[None])[None]
        options = {"mask": seen[:, None]}
    else:
        length = jnp.maximum(jnp.sum(mask, axis=1, dtype=jnp.int32), 1) + before
        options = dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), length)
        options["local_window_size"] = None if window is None else (window - 1, 0)
    out = jax.nn.dot_product_attention(
        *_with_sinks(q, k, v, sinks),
        scale=e**-0.5,
        is_causal=True,
        implementation=implementation,
        **options,
    )
    out = out[:, before : before + s, :, :e]
    if first is not None and seen is None:
        out = _turned(out, -first)
    return jnp.where(valid, out, 0).reshape(b, s, g, r, e)


def _with_sinks(
    q: Float[Array, "b t h e"],
    k: Float[Array, "b c g e"],
    v: Float[Array, "b c g e"],
    sinks: Float[Array, "g r"] | None,
) -> tuple[Array, Array, Array]:
    """Return q, k, v with columns that make key 0 the sink of every head; None: unchanged.

    cuDNN has no sinks. Each query holds the sink of its head in columns that key 0 alone reads, and
    key 0 has no value. With two columns, bfloat16 keeps 16 bits of a sink.
    """
    if sinks is None:
        return q, k, v
    wide = (*q.shape[:3], SINK_COLUMNS)
    # The scale of scores removes the factor.
    exact = sinks.astype(jnp.float32).reshape(-1) * q.shape[-1] ** 0.5
    # XLA may drop a conversion to bfloat16 and back, but never this operation. The second column
    # has the whole gradient.
    bits = jnp.finfo(q.dtype)
    high = jax.lax.stop_gradient(jax.lax.reduce_precision(exact, bits.nexp, bits.nmant))
    columns = jnp.pad(jnp.stack([high, exact - high], axis=-1), ((0, 0), (0, SINK_COLUMNS - 2)))
    # Broadcast in float32, so that the gradient of all positions adds up in it.
    of_queries = jnp.broadcast_to(columns[None, None], wide).astype(q.dtype)
    is_first, is_sink = jnp.arange(k.shape[1]) == 0, jnp.arange(SINK_COLUMNS) < 2
    is_read = (is_first[:, None] & is_sink[None])[:, None]
    of_keys = jnp.broadcast_to(is_read[None], (*k.shape[:3], SINK_COLUMNS)).astype(k.dtype)
    return (
        jnp.concatenate([q, of_queries], axis=-1),
        jnp.concatenate([k, of_keys], axis=-1),
        jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, SINK_COLUMNS))),
    )


def _turned(x: Float[Array, "b s h e"], by: Int[Array, " b"]) -> Float[Array, "b s h e"]:
    """Rotate each row to the left by `by`."""
    index, by = jnp.arange(x.shape[1])[None], by[:, None]
    return permuted(x, (index + by) % x.shape[1], (index - by) % x.shape[1])
