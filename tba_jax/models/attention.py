# SPDX-License-Identifier: Apache-2.0
"""Attention of grouped queries: over whole sequences, and of one new token over a cache.

`Kernels.select` selects the implementation from the platform that a program is compiled for, never
from the process's devices. "xla" is an einsum. Scoring, prefill and decoding use the same
`score`, `softmax` and `average`, and round at the same points. Invariant: a masked key has weight
exactly 0, and a row without any valid key gives finite numbers.
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int

from tba_jax.devices.platform import Platform
from tba_jax.models import cudnn_attention as cudnn
from tba_jax.models.kv_cache import KVCache

MASKED = -1e30  # finite, so that a row with no valid key gives a uniform softmax and not nan
NO_TOKEN = -1e15
"""Logit of a row of the vocabulary that is no token: probability 0, and a finite square."""
LEAST_SPLASH = 256
"""Least number of positions for which `splash`, whose blocks have at least 128, is chosen."""

Implementation = Literal["xla", "cudnn", "splash"]
"""Implementation of attention of whole sequences. One token over a cache is always an einsum.

xla: einsum and softmax, on every device; the scores of a layer are materialised.
cudnn: flash attention of whole sequences by `jax.nn.dot_product_attention`: bfloat16 or float16,
    head_dim a multiple of 8 up to 128; a mesh that divides query heads must divide key/value heads.
    Rows of several sequences use a mask of two bytes per pair of positions, the same for all heads.
splash: JAX's splash attention for TPU (`splash`) of at least 256 positions, head_dim at least 64.
"""


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
        """Whether cuDNN needs a mask, because a window would hide the key that stands for sinks."""
        return self.window is not None and self.sinks is not None

    def sinks_like(self, shape: tuple[int, ...], axes: tuple[int, int]) -> Array | None:
        """Return the sinks as scores of one more position, [*shape 1], with g and r on `axes`."""
        if self.sinks is None:
            return None
        return jax.lax.broadcast_in_dim(self.sinks, (*shape, 1), axes)


PLAIN = Scores()


class Kernels(NamedTuple):
    """Settings and devices that, with the arrays, select the kernel of attention.

    Attributes:
        wanted: setting model.attention: auto; or an implementation that supports the arguments.
        platform: platform that the program is compiled for.
        sharding: sharding of keys and values as a cache [b g s e] on a mesh; None: one device, or
            each device calls the kernel for its own part.
    """

    wanted: Literal["auto"] | Implementation = "auto"
    platform: Platform = "any"
    sharding: NamedSharding | None = None

    def select(
        self, dtype: Any, head_dim: int, scores: Scores = PLAIN, length: int = LEAST_SPLASH
    ) -> Implementation:
        """Return the implementation of attention of whole sequences.

        Args:
            dtype: dtype of queries, keys and values.
            head_dim: e.
            scores: treatment of scores.
            length: number of positions that the last query sees.
        """
        if self.wanted != "auto":
            return self.wanted
        is_narrow = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16) and head_dim % 8 == 0
        if not is_narrow or not _divides_heads_alike(self.sharding):
            return "xla"
        if self.platform == "cuda" and scores.cap is None:
            columns = head_dim + cudnn.SINK_COLUMNS * (scores.sinks is not None)
            return "cudnn" if columns <= cudnn.MOST_COLUMNS else "xla"
        if self.platform == "tpu" and head_dim >= 64 and length >= LEAST_SPLASH:
            return "splash"
        return "xla"


NO_KERNELS = Kernels("xla")


def _divides_heads_alike(sharding: NamedSharding | None) -> bool:
    """Return whether a mesh divides key/value heads into as many parts as query heads.

    If they are divided differently, JAX refuses to compile cuDNN's attention, and each device would
    compute splash attention of all heads.
    """
    if sharding is None:
        return True
    _, heads, *_ = (*sharding.spec, None, None)
    # A decoder's mesh may divide the axis `model` into two (`decoding.shardings.cache_sharding`).
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
    kernels: Kernels = NO_KERNELS,
) -> Float[Array, "b s g r e"]:
    """Return softmax attention of whole sequences; r queries of a group share a key/value head.

    The output at a padded position is finite but has no meaning.

    Args:
        q, k, v: q and k rotated.
        visible: return value of `causal` or `packed`.
        scores: treatment of scores.
        kernels: settings and devices that select the implementation.
    """
    implementation = kernels.select(q.dtype, q.shape[-1], scores, q.shape[1])
    if implementation == "cudnn":
        how: Any = {"first": visible.first, "window": scores.window}
        if visible.segments is not None or scores.needs_mask:
            how = {"seen": visible.seen(scores.window)}
        return cudnn.attend(q, k, v, visible.mask, sinks=scores.sinks, **how)
    if implementation == "splash":
        # Imported here: only a TPU needs Pallas, and the import takes a third of a second.
        from tba_jax.models import splash

        return splash.attend(q, k, v, visible, scores, kernels.sharding)
    return attend(q, k, v, visible.seen(scores.window), scores)


def attend(
    q: Float[Array, "b s g r e"],
    k: Float[Array, "b c g e"],
    v: Float[Array, "b c g e"],
    seen: Bool[Array, "b s c"],
    scores: Scores = PLAIN,
) -> Float[Array, "b s g r e"]:
    """Return softmax attention with any visibility, by einsum.

    Args:
        q, k, v: q and k rotated.
        seen: whether each query sees each key, which contains the window.
        scores: cap and sinks of the scores.
    """
    (b, s, g, r, e), c = q.shape, k.shape[1]
    # Heads before queries: with another order, XLA:CPU transposes the scores, the largest array.
    k, v, rows = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), jnp.transpose(q, (0, 2, 3, 1, 4))
    found = score(rows.reshape(b, g, r * s, e), k, scores.cap).reshape(b, g, r, s, c)
    found = found + jnp.where(seen, 0.0, MASKED)[:, None, None]
    weights = softmax((found,), scores.sinks_like((b, g, r, s), (1, 2)))[0]
    out = average(weights.reshape(b, g, r * s, c), v, v.dtype).reshape(b, g, r, s, e)
    return jnp.transpose(out.astype(q.dtype), (0, 3, 1, 2, 4))


def score(
    q: Float[Array, "*b m e"], keys: Float[Array, "*b c e"], cap: float | None
) -> Float[Array, "*b m c"]:
    """Return the scores of queries and keys before the mask, in float32 or wider."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    products = jnp.einsum("...me,...ce->...mc", q, keys, preferred_element_type=wide)
    return capped(products * q.shape[-1] ** -0.5, cap)


def average(
    weights: Float[Array, "*b m c"], values: Float[Array, "*b c e"], dtype: Any = None
) -> Float[Array, "*b m e"]:
    """Return the weighted sums of values; weights are rounded to their dtype.

    Args:
        dtype: dtype of the sums, and of their gradient; None: that of the weights, for sums that
            are added to others.
    """
    narrow, dtype = weights.astype(values.dtype), dtype or weights.dtype
    return jnp.einsum("...mc,...ce->...me", narrow, values, preferred_element_type=dtype)


def softmax(parts: tuple[Array, ...], sinks: Array | None = None) -> tuple[Array, ...]:
    """Return the softmax over the last axes of all parts together, without concatenation.

    Args:
        parts: scores of sets of positions, [*b c] each.
        sinks: further scores [*b 1], which take weight but have no value; None: no sinks.
    """
    if sinks is None:
        return _softmax(parts)
    return _softmax((*parts, sinks.astype(parts[0].dtype)))[:-1]


@jax.custom_jvp
def _softmax(parts: tuple[Array, ...]) -> tuple[Array, ...]:
    most = functools.reduce(jnp.maximum, (jnp.max(x, axis=-1, keepdims=True) for x in parts))
    exp = tuple(jnp.exp(x - most) for x in parts)
    total = functools.reduce(jnp.add, (jnp.sum(x, axis=-1, keepdims=True) for x in exp))
    return tuple(x / total for x in exp)


@_softmax.defjvp
def _softmax_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    # Like the rule of `jax.nn.softmax`, it keeps only the weights for the backward pass.
    weights = _softmax(*primals)
    pairs = list(zip(weights, tangents[0], strict=True))
    means = (jnp.sum(w * x, axis=-1, keepdims=True) for w, x in pairs)
    mean = functools.reduce(jnp.add, means)
    return weights, tuple(w * (x - mean) for w, x in pairs)


def capped(scores: Float[Array, "*b"], cap: float | None) -> Float[Array, "*b"]:
    """Return the scores, smoothly limited to [-cap, cap]; None: unchanged."""
    return scores if cap is None else cap * jnp.tanh(scores / cap)


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
        history_length: number of positions of each slot in earlier chunks.
        recent: keys and values of this chunk, [n g m e].
        index: column of this token; columns up to it are visible.
        scores: as in `attend_causal`.
    """
    at = (0, 0, index, 0)

    def write(part: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice(part, new[:, :, None].astype(part.dtype), at)

    recent = KVCache(write(recent.keys, k), write(recent.values, v))

    def scored(cache: KVCache, length: Array, query: Array) -> Array:
        seen = cache.seen(length, query, scores.window)
        return score(q, cache.keys, scores.cap) + jnp.where(seen[:, None], 0.0, MASKED)

    num = jnp.broadcast_to(index + 1, (len(q), 1))
    before = scored(history, history_length, history_length[:, None] + index)
    old, new = softmax(
        (before, scored(recent, num[:, 0], num - 1)), scores.sinks_like(q.shape[:3], (1, 2))
    )
    return (average(old, history.values) + average(new, recent.values)).astype(q.dtype), recent
