# SPDX-License-Identifier: Apache-2.0
"""Attention of grouped queries: over whole sequences, and of one new token over a cache.

`choose` selects the implementation from the platform that a program is compiled for, never from the
process's devices. "xla" is an einsum. On 2 CPU cores its gradient takes 5 % less processor
time than that of `jax.nn.dot_product_attention` with the same masks (256 rows of 28, 4 heads of 16;
and 8 rows of 256, 8 query on 2 key/value heads of 64); the forward pass takes the same. Invariant:
a masked key has weight exactly 0, and a row without any valid key gives finite numbers.
"""

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Float32, Int

from tba_jax.devices.platform import Platform
from tba_jax.models import cudnn_attention as cudnn
from tba_jax.models.kv_cache import KVCache
from tba_jax.models.partial_softmax import Partial, capped, merge, with_sinks
from tba_jax.models.per_shard import cache_axes

MASKED = -1e30  # finite, so that a row with no valid key gives a uniform softmax and not nan
LEAST_SPLASH = 256
"""Least number of positions for which `splash`, whose blocks have at least 128, is chosen."""

Implementation = Literal["xla", "xla_tpu", "cudnn", "splash"]
"""Implementation of attention of whole sequences. One token over a cache is always an einsum.

xla: einsum and softmax, on every device; the scores of a layer are materialised.
xla_tpu: as xla with another order of axes. XLA:CPU is fastest with heads before queries, but with
    that order XLA:TPU moves more data.
cudnn: flash attention of whole sequences by `jax.nn.dot_product_attention`: bfloat16 or float16,
    head_dim a multiple of 8 up to 128; a mesh that divides query heads must divide key/value heads.
    Rows of several sequences use a mask of two bytes per pair of positions, the same for all heads.
splash: JAX's splash attention for TPU (`splash`) of at least 256 positions; the einsum for others.
"""


Wanted = Literal["auto", "xla"]
"""Values of model.attention; see `choose`."""


class Scores(NamedTuple):
    """Treatment of scores in one kind of layer.

    Attributes:
        window: number of positions that a query sees, including its own; None: all earlier ones.
        cap: c of c tanh(score / c), applied before the mask; None: no cap.
        sinks: [g r], a score per query head with weight but with value 0; None: no sinks.
    """

    window: int | None = None
    cap: float | None = None
    sinks: Array | None = None

    @property
    def needs_mask(self) -> bool:
        """Whether cuDNN needs a mask: the key that stands for sinks is outside of every window."""
        return self.window is not None and self.sinks is not None

    def allowed(
        self,
        implementation: Implementation,
        head_dim: int,
        *,
        length: int = LEAST_SPLASH,
        sharding: NamedSharding | None = None,
    ) -> Implementation:
        """Return the implementation, or the einsum if its kernels do not support these arguments.

        Args:
            implementation: return value of `choose`.
            head_dim: columns of a head.
            length: number of positions that the last query sees.
            sharding: sharding of keys and values as a cache on a mesh; None: one device, or each
                device calls the kernel for its own part.
        """
        if implementation in ("cudnn", "splash") and not _divides_heads_alike(sharding):
            return "xla" if implementation == "cudnn" else "xla_tpu"
        columns = head_dim if self.sinks is None else head_dim + cudnn.SINK_COLUMNS
        if implementation == "cudnn":
            return "cudnn" if self.cap is None and columns <= cudnn.MOST_COLUMNS else "xla"
        if implementation == "splash":
            is_plain = self.window is None and self.cap is None and self.sinks is None
            return "splash" if is_plain and length >= LEAST_SPLASH else "xla_tpu"
        return implementation


PLAIN = Scores()


def _divides_heads_alike(sharding: NamedSharding | None) -> bool:
    """Return whether a mesh divides key/value heads into as many parts as query heads.

    If they are divided differently, JAX refuses to compile cuDNN's attention, and each device would
    compute splash attention of all heads.
    """
    if sharding is None:
        return True
    _, heads = cache_axes(sharding)
    # A decoder's mesh may divide the axis `model` into two (`decoding.compiled.cache_sharding`).
    sizes = dict(sharding.mesh.shape)
    parts = math.prod(size for axis, size in sizes.items() if axis.startswith("model"))
    return parts == (1 if heads is None else sizes[heads])


class Visible(NamedTuple):
    """Visibility of keys: a query sees the valid positions of its row up to its own position.

    Attributes:
        mask: bool [b s], the valid positions; adjacent in each row.
        first: int32 [b], index of the first valid position; None: 0 in every row.
        segments: int32 [b s], index of each position's sequence in rows of several sequences, which
            do not see one another; 0 at padding. None: one sequence per row.
        prompts: for sequences that also see an earlier prompt: (index of the prompt that each query
            sees, 0 without one; index of the prompt that each key belongs to, -1 without one), each
            [b s].
        positions: int32 [b s], positions in the sequences, for windows if responses share a prompt.
            None: neighbours in a row are neighbours in the sequence.
    """

    mask: Array
    first: Array | None
    segments: Array | None = None
    prompts: tuple[Array, Array] | None = None
    positions: Array | None = None

    def seen(self, window: int | None = None) -> Bool[Array, "b s s"]:
        """Return whether each query sees each key."""
        index = jnp.arange(self.mask.shape[1])
        seen = (index[None, :] <= index[:, None])[None] & self.mask[:, None, :]
        if self.segments is not None:
            related = self.segments[:, None, :] == self.segments[:, :, None]
            if self.prompts is not None:
                of_queries, of_keys = self.prompts
                related = related | (of_keys[:, None, :] == of_queries[:, :, None])
            seen = seen & related
        if window is not None:
            at = index[None] if self.positions is None else self.positions
            seen = seen & (at[:, :, None] - at[:, None, :] < window)
        return seen


def causal(mask: Bool[Array, "b s"], *, is_right_padded: bool = False) -> Visible:
    """Return causal visibility within rows.

    Args:
        mask: the valid positions, adjacent in each row; padding on either side.
        is_right_padded: whether no row has padding at its start, which saves a shift for cuDNN.
    """
    return Visible(mask, None if is_right_padded else jnp.argmax(mask, axis=1))


def packed(
    segments: Int[Array, "b s"],
    contexts: Int[Array, "b s"] | None = None,
    is_prompt: Bool[Array, "b s"] | None = None,
) -> Visible:
    """Return causal visibility within the sequences of rows with several sequences.

    Args:
        segments: index of each position's sequence, adjacent in a row; 0 at padding.
        contexts: index of the prompt that each position belongs or responds to; None: each prompt
            is part of the only sequence that sees it.
        is_prompt: which positions are prompts; given together with `contexts`.
    """
    if contexts is None or is_prompt is None:
        return Visible(segments > 0, None, segments)
    # A prompt is a separate sequence.
    segments = jnp.where(segments > 0, 2 * segments + is_prompt, 0)
    prompts = jnp.where(is_prompt, 0, contexts), jnp.where(is_prompt, contexts, -1)
    return Visible(segments > 0, None, segments, prompts)


def attend_causal(
    q: Float[Array, "b s g r e"],
    k: Float[Array, "b s g e"],
    v: Float[Array, "b s g e"],
    visible: Visible,
    *,
    scores: Scores = PLAIN,
    implementation: Implementation = "xla",
    sharding: NamedSharding | None = None,
) -> Float[Array, "b s g r e"]:
    """Return softmax attention of whole sequences; r queries of a group share a key/value head.

    The output at a padded position is finite but has no meaning.

    Args:
        q, k, v: q and k rotated.
        visible: return value of `causal` or `packed`.
        scores: treatment of scores; the einsum replaces kernels that do not support it.
        implementation: return value of `choose`.
        sharding: sharding of keys and values as a cache [b g s e] on a mesh; None: one device.
    """
    implementation = scores.allowed(
        implementation, q.shape[-1], length=q.shape[1], sharding=sharding
    )
    if implementation == "cudnn":
        if visible.segments is not None or scores.needs_mask:
            seen = visible.seen(scores.window)
            return cudnn.attend_masked(q, k, v, visible.mask, seen, scores.sinks)
        return cudnn.attend_rows(
            q, k, v, visible.mask, visible.first, window=scores.window, sinks=scores.sinks
        )
    if implementation == "splash":
        # Imported here: only a TPU needs Pallas, and the import takes a third of a second.
        from tba_jax.models import splash

        if visible.prompts is not None:
            return splash.attend_masked(q, k, v, visible.seen(), sharding)
        segments = visible.mask if visible.segments is None else visible.segments
        return splash.attend_causal(q, k, v, segments, sharding)
    bias = causal_bias(visible, scores.window)
    return attend(q, k, v, bias, scores, heads_first=implementation != "xla_tpu")


def choose(
    wanted: Wanted,
    platform: Platform,
    dtype: Any,
    head_dim: int,
) -> Implementation:
    """Return the implementation of attention for a program.

    Args:
        wanted: "xla", or "auto": cudnn on an NVIDIA GPU that supports it, splash on a TPU for
            16-bit numbers and heads of at least 64 columns, else xla. On a TPU, xla becomes
            xla_tpu.
        platform: platform that the program is compiled for.
        dtype: dtype of queries, keys and values.
        head_dim: e.
    """
    is_narrow = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    if wanted == "auto" and is_narrow and head_dim % 8 == 0:
        if platform == "cuda" and head_dim <= cudnn.MOST_COLUMNS:
            return "cudnn"
        if platform == "tpu" and head_dim >= 64:
            return "splash"
    return "xla_tpu" if platform == "tpu" else "xla"


def causal_bias(visible: Visible, window: int | None = None) -> Float32[Array, "b s s"]:
    """Return 0 for visible keys (valid positions up to the query's own), MASKED elsewhere."""
    return jnp.where(visible.seen(window), 0.0, MASKED)


def attend(
    q: Float[Array, "b s g r e"],
    k: Float[Array, "b c g e"],
    v: Float[Array, "b c g e"],
    bias: Float32[Array, "b s c"],
    scores: Scores = PLAIN,
    *,
    heads_first: bool = True,
) -> Float[Array, "b s g r e"]:
    """Return softmax attention with any additive bias, by einsum.

    Args:
        q, k, v: q and k rotated.
        bias: added to scores.
        scores: cap and sinks of the scores; `bias` contains the window.
        heads_first: whether to move the heads of queries to the front before the product. With
            another order, XLA:CPU transposes the scores, the largest array. XLA:TPU chooses
            layouts itself, and moves more data if an order is given.
    """
    k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    rows, axes = (jnp.transpose(q, (0, 2, 3, 1, 4)), "bgrse") if heads_first else (q, "bsgre")
    products = jnp.einsum(f"{axes},bgce->bgrsc", rows, k, preferred_element_type=_wide(q))
    found = capped(products * q.shape[-1] ** -0.5, scores.cap) + bias[:, None, None]
    if scores.sinks is None:
        weights = jax.nn.softmax(found, axis=-1)
    else:
        sinks = scores.sinks.astype(found.dtype)[None, :, :, None, None]
        sinks = jnp.broadcast_to(sinks, (*found.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([found, sinks], axis=-1), axis=-1)[..., :-1]
    out = jnp.einsum(f"bgrsc,bgce->{axes}", weights.astype(v.dtype), v).astype(q.dtype)
    return jnp.transpose(out, (0, 3, 1, 2, 4)) if heads_first else out


def _wide(x: Array) -> Any:
    """Return the dtype for sums over an array: its own dtype, but at least float32."""
    return jnp.promote_types(x.dtype, jnp.float32)


def attend_cached(
    q: Float[Array, "n g r e"],
    k: Float[Array, "n g e"],
    v: Float[Array, "n g e"],
    history: KVCache,
    history_length: Int[Array, " n"],
    recent: KVCache,
    index: Int[Array, ""],
    scores: Scores = PLAIN,
) -> tuple[Float[Array, "n g r e"], KVCache]:
    """Return attention of one new token per slot, and `recent` with its key and value.

    The cache has two parts, so that a step writes one column, the same for every slot: `history`
    is read-only, and `recent` has the tokens of this chunk of steps.

    Args:
        q, k, v: query, key and value of the new token; k rotated.
        history: keys and values of earlier chunks.
        history_length: valid positions of each slot in `history`.
        recent: keys and values of this chunk, [n g m e].
        index: column of this token; columns up to it are visible.
        scores: as in `attend_causal`.
    """
    at = (0, 0, index, 0)

    def write(part: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice(part, new[:, :, None].astype(part.dtype), at)

    recent = KVCache(write(recent.keys, k), write(recent.values, v))
    scaled = q * q.shape[-1] ** -0.5
    old = _partial(scaled, history, jnp.asarray(history_length), index + 1, scores)
    new = _partial(scaled, recent, jnp.broadcast_to(index + 1, (q.shape[0],)), 0, scores)
    if scores.sinks is not None:
        sinks = jnp.broadcast_to(scores.sinks.astype(jnp.float32)[None, :, :, None], new.most.shape)
        new = with_sinks(new, sinks)
    return merge(old, new).astype(q.dtype), recent


def _partial(
    scaled: Float[Array, "n g r e"],
    cache: KVCache,
    length: Int[Array, " n"],
    later: Int[Array, ""] | int,
    scores: Scores,
) -> Partial:
    """Return the softmax over the first `length` positions of each slot, by einsum.

    `later` further positions follow; the last one is the position of the query.
    """
    f32 = jnp.float32
    keys, values = cache
    column = jnp.arange(keys.shape[2])[None]
    seen = column < length[:, None]
    if scores.window is not None:
        seen = seen & (column >= length[:, None] + later - scores.window)
    found = jnp.einsum("ngre,ngce->ngrc", scaled, keys, preferred_element_type=f32)
    found = capped(found, scores.cap) + jnp.where(seen, 0.0, MASKED)[:, None, None]
    most = jnp.max(found, axis=-1, keepdims=True)
    weights = jnp.exp(found - most)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum(
        "ngrc,ngce->ngre", weights.astype(values.dtype), values, preferred_element_type=f32
    )
    return Partial(out, most, total)
