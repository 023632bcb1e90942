# SPDX-License-Identifier: Apache-2.0
"""Attention of grouped queries: over whole sequences, and of one new token over a cache.

`choose` says who computes it, from the platform that a program is made for, never from the devices
of the process. "xla" is the einsum here, everywhere. On 2
CPU cores its gradient takes 5 % less processor time than that of `jax.nn.dot_product_attention`
with the same masks (256 rows of 28, 4 heads of 16; and 8 rows of 256, 8 query on 2 key/value heads
of 64), its forward pass the same. The invariant it owns: a masked key has weight exactly 0, and a
row without any valid key gives finite numbers.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Float32, Int

from tba_jax.devices.platform import Platform
from tba_jax.models.kv_cache import KVCache, Part, Rounded, open_part
from tba_jax.models.partial_softmax import Partial, merge

MASKED = -1e30  # finite, so that a row with no valid key gives a uniform softmax and not nan

Implementation = Literal["xla", "xla_tpu", "cudnn", "tpu_kernel"]
"""Who computes attention.

xla: einsum and softmax, on every device; the scores of a layer are materialised.
xla_tpu: the same, its axes in another order: with heads in front of the queries, as XLA:CPU wants
    them, XLA:TPU moves more.
cudnn: flash attention of whole sequences by `jax.nn.dot_product_attention`: bfloat16 or float16,
    head_dim a multiple of 8 up to 128. Rows of several sequences are masked, by two bytes for each
    pair of positions, the same for all heads. One token over a cache goes through `decode_kernel`:
    cuDNN wants another layout, and the copy would cost more than the attention.
tpu_kernel: `splash` for whole sequences, `attention_kernels` for one token; only where it is asked
    for, until somebody measures it on a TPU.
"""


Wanted = Literal["auto", "xla", "cudnn", "tpu_kernel"]
"""Who may be asked for; see `choose`."""


class Visible(NamedTuple):
    """What the queries of whole rows may look at: the valid positions up to their own.

    Attributes:
        mask: bool [b s], the valid positions; side by side in each row.
        first: int32 [b], where they begin; None: at 0 in every row, known without looking.
        segments: int32 [b s] where rows hold several sequences, which do not see one another: the
            number of each position's sequence, 0 at padding; None: one sequence a row.
        prompts: where sequences see a prompt before them too: the number of the prompt that each
            query sees, 0 for none, and of the one that each key belongs to, -1 for none; [b s]
            both.
    """

    mask: Array
    first: Array | None
    segments: Array | None = None
    prompts: tuple[Array, Array] | None = None


def causal(mask: Bool[Array, "b s"], *, is_right_padded: bool = False) -> Visible:
    """Causal attention within rows.

    Args:
        mask: the valid positions, side by side in each row; padding on either side.
        is_right_padded: no row has padding in front, which saves cuDNN a shift.
    """
    return Visible(mask, None if is_right_padded else jnp.argmax(mask, axis=1))


def packed(
    segments: Int[Array, "b s"],
    contexts: Int[Array, "b s"] | None = None,
    is_prompt: Bool[Array, "b s"] | None = None,
) -> Visible:
    """Causal attention within the sequences of rows that hold several.

    Args:
        segments: number of each position's sequence, side by side in a row; 0 at padding.
        contexts: number of the prompt that each position belongs or responds to; None: a prompt
            is a part of the one sequence that sees it.
        is_prompt: with contexts, which positions are prompts.
    """
    if contexts is None or is_prompt is None:
        return Visible(segments > 0, None, segments)
    # A prompt is a sequence of its own.
    segments = jnp.where(segments > 0, 2 * segments + is_prompt, 0)
    prompts = jnp.where(is_prompt, 0, contexts), jnp.where(is_prompt, contexts, -1)
    return Visible(segments > 0, None, segments, prompts)


def attend_causal(
    q: Float[Array, "b s g r e"],
    k: Float[Array, "b s g e"],
    v: Float[Array, "b s g e"],
    visible: Visible,
    *,
    implementation: Implementation = "xla",
    sharding: NamedSharding | None = None,
) -> Float[Array, "b s g r e"]:
    """Softmax attention of whole sequences; the r queries of a group share one key/value head.

    What comes out at a padded position is finite and meaningless.

    Args:
        q, k, v: q and k rotated.
        visible: from `causal` or `packed`.
        implementation: who computes it, from `choose`.
        sharding: on a mesh, of keys and values as a cache [b g s e]; tpu_kernel alone needs it.
    """
    if implementation == "cudnn" and visible.segments is not None:
        return _attend_masked(q, k, v, visible)
    if implementation == "cudnn":
        return _attend_cudnn(q, k, v, visible)
    if implementation == "tpu_kernel":
        # Here, not above: only a TPU needs Pallas, and its import takes a third of a second.
        from tba_jax.models import splash

        if visible.prompts is not None:
            seen = _seen(visible.mask, visible.segments, visible.prompts)
            return splash.attend_masked(q, k, v, seen, sharding)
        segments = visible.mask if visible.segments is None else visible.segments
        return splash.attend_causal(q, k, v, segments, sharding)
    bias = causal_bias(visible.mask, visible.segments, visible.prompts)
    return attend(q, k, v, bias, heads_first=implementation != "xla_tpu")


def choose(
    wanted: Wanted,
    platform: Platform,
    dtype: Any,
    head_dim: int,
) -> Implementation:
    """Who computes attention in a program.

    Args:
        wanted: an implementation, or "auto": cudnn on an NVIDIA GPU where it can, else xla. On a
            TPU xla is xla_tpu.
        platform: of the devices that the program is made for.
        dtype: of queries, keys and values.
        head_dim: e.

    Raises:
        ValueError: an implementation that does not exist or cannot do this.
    """
    by_einsum = "xla_tpu" if platform == "tpu" else "xla"
    if wanted == "tpu_kernel":
        return wanted
    if wanted == "xla":
        return by_einsum
    if wanted not in ("auto", "cudnn"):
        raise ValueError(
            f"attention implementation {wanted!r}; want 'auto', 'xla', 'cudnn' or 'tpu_kernel'"
        )
    # 128: what every supported GPU can do; from Hopper on it could be 256.
    is_narrow = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    fits = is_narrow and head_dim % 8 == 0 and head_dim <= 128
    if platform == "cuda" and fits:
        return "cudnn"
    if wanted == "cudnn":
        raise ValueError(
            f"attention implementation 'cudnn' got {jnp.dtype(dtype)} queries of head_dim "
            f"{head_dim} on {platform}; it needs an NVIDIA GPU, bfloat16 or float16, and a "
            "multiple of 8 up to 128. Use 'auto', which falls back to 'xla'"
        )
    return by_einsum


def _attend_cudnn(
    q: Float[Array, "b s g r e"],
    k: Float[Array, "b s g e"],
    v: Float[Array, "b s g e"],
    visible: Visible,
) -> Float[Array, "b s g r e"]:
    """Of rows of one sequence: cuDNN knows causal masks and lengths, and skips what they hide."""
    b, s, g, r, e = q.shape
    mask, first = visible.mask, visible.first
    valid = mask[:, :, None, None]
    # Padding is zeroed on both sides: nothing is promised about it, and one nan is enough.
    q, k, v = (jnp.where(valid, x, 0) for x in (q.reshape(b, s, g * r, e), k, v))
    if first is not None:
        q, k, v = (_turned(x, first) for x in (q, k, v))
    length = jnp.maximum(jnp.sum(mask, axis=1, dtype=jnp.int32), 1)
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=True,
        query_seq_lengths=length,
        key_value_seq_lengths=length,
        implementation="cudnn",
    )
    if first is not None:
        out = _turned(out, -first)
    return jnp.where(valid, out, 0).reshape(b, s, g, r, e)


@jax.custom_vjp
def _turned(x: Float[Array, "b s h e"], by: Int[Array, " b"]) -> Float[Array, "b s h e"]:
    """Rows moved to the left, around the end.

    Its gradient is the way back. That of the gather is a sum into places of which it does not know
    that each is met once.
    """
    index = (jnp.arange(x.shape[1])[None] + by[:, None]) % x.shape[1]
    return jnp.take_along_axis(x, index[:, :, None, None], axis=1)


def _turned_forward(x: Array, by: Array) -> tuple[Array, Array]:
    return _turned(x, by), by


def _turned_backward(by: Array, cotangent: Array) -> tuple[Array, None]:
    return _turned(cotangent, -by), None


_turned.defvjp(_turned_forward, _turned_backward)


def _attend_masked(
    q: Float[Array, "b s g r e"],
    k: Float[Array, "b s g e"],
    v: Float[Array, "b s g e"],
    visible: Visible,
    implementation: Literal["xla", "cudnn"] = "cudnn",
) -> Float[Array, "b s g r e"]:
    """Of rows of several sequences: a mask of pairs, which cuDNN adds to scores as a dense bias.

    A bias is read once for each head, where scores by einsum are written and read several times.
    """
    b, s, g, r, e = q.shape
    valid = visible.mask[:, :, None, None]
    # Padding is zeroed, as in `_attend_cudnn`, and sees itself: a row of the softmax is never
    # empty. cuDNN's gradient under a bias wants an even length.
    q, k, v = (jnp.where(valid, x, 0) for x in (q.reshape(b, s, g * r, e), k, v))
    odd = (0, s % 2)
    q, k, v = (jnp.pad(x, ((0, 0), odd, (0, 0), (0, 0))) for x in (q, k, v))
    seen = jnp.pad(_seen(visible.mask, visible.segments, visible.prompts), ((0, 0), odd, odd))
    seen = seen | jnp.eye(seen.shape[1], dtype=bool)[None]
    out = jax.nn.dot_product_attention(
        q, k, v, mask=seen[:, None], is_causal=True, implementation=implementation
    )
    return jnp.where(valid, out[:, :s], 0).reshape(b, s, g, r, e)


def causal_bias(
    mask: Bool[Array, "b s"],
    segments: Int[Array, "b s"] | None = None,
    prompts: tuple[Int[Array, "b s"], Int[Array, "b s"]] | None = None,
) -> Float32[Array, "b s s"]:
    """0 where a query may look, MASKED elsewhere: the valid positions up to its own.

    Args:
        mask: the valid positions.
        segments: in packed rows, the sequence of each position; others are not looked at.
        prompts: as in `Visible`; a prompt is looked at too.
    """
    return jnp.where(_seen(mask, segments, prompts), 0.0, MASKED)


def _seen(
    mask: Bool[Array, "b s"],
    segments: Int[Array, "b s"] | None,
    prompts: tuple[Int[Array, "b s"], Int[Array, "b s"]] | None,
) -> Bool[Array, "b s s"]:
    """Whether each query looks at each key."""
    index = jnp.arange(mask.shape[1])
    seen = (index[None, :] <= index[:, None])[None] & mask[:, None, :]
    if segments is not None:
        related = segments[:, None, :] == segments[:, :, None]
        if prompts is not None:
            related = related | (prompts[1][:, None, :] == prompts[0][:, :, None])
        seen = seen & related
    return seen


def attend(
    q: Float[Array, "b s g r e"],
    k: Float[Array, "b c g e"],
    v: Float[Array, "b c g e"],
    bias: Float32[Array, "b s c"],
    *,
    heads_first: bool = True,
) -> Float[Array, "b s g r e"]:
    """Softmax attention under any additive bias, by einsum.

    Args:
        q, k, v: q and k rotated.
        bias: added to scores.
        heads_first: put the heads of queries in front before they are multiplied. In any other
            order XLA:CPU transposes the scores, the largest array there is; XLA:TPU chooses layouts
            by itself and moves more where it is given one.
    """
    k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    rows, axes = (jnp.transpose(q, (0, 2, 3, 1, 4)), "bgrse") if heads_first else (q, "bsgre")
    scores = jnp.einsum(f"{axes},bgce->bgrsc", rows, k, preferred_element_type=_wide(q))
    scores = scores * q.shape[-1] ** -0.5 + bias[:, None, None]
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum(f"bgrsc,bgce->{axes}", weights, v).astype(q.dtype)
    return jnp.transpose(out, (0, 3, 1, 2, 4)) if heads_first else out


def _wide(x: Array) -> Any:
    """The dtype of sums over arrays like this one: float32, or its own where that is wider."""
    return jnp.promote_types(x.dtype, jnp.float32)


def attend_cached(
    q: Float[Array, "n g r e"],
    k: Float[Array, "n g e"],
    v: Float[Array, "n g e"],
    history: KVCache,
    history_length: Int[Array, " n"],
    recent: KVCache,
    index: Int[Array, ""],
    *,
    implementation: Implementation = "xla",
    sharding: NamedSharding | None = None,
) -> tuple[Float[Array, "n g r e"], KVCache]:
    """Attention of one new token per slot, and `recent` with its key and value written.

    The cache has two parts so that a step writes one column, the same for every slot: `history`
    is read only, `recent` holds the tokens of this chunk of steps.

    Args:
        q, k, v: of the new token; k rotated.
        history: keys and values of earlier chunks, as they were or in eight bits.
        history_length: how many positions of it a slot holds.
        recent: of this chunk, [n g m e], as they were.
        index: the column of this token; those up to it are visible.
        implementation: who computes it.
        sharding: of the caches on a mesh; kernels alone need it.

    Raises:
        ValueError: eight bits for tpu_kernel.
    """
    if implementation == "tpu_kernel" and isinstance(history.keys, Rounded):
        raise ValueError(
            "attention implementation 'tpu_kernel' got a cache in eight bits; it knows none. Use "
            "'xla', or a cache_dtype of bfloat16"
        )
    if implementation == "cudnn":
        from tba_jax.models import decode_kernel

        out, written = decode_kernel.attend_step(
            q, k, v, history, history_length, recent, index, sharding
        )
        return out, KVCache(*written)
    at = (0, 0, index, 0)

    def write(part: Part, new: Array) -> Array:
        kept, _ = open_part(part, new.dtype)
        return jax.lax.dynamic_update_slice(kept, new[:, :, None].astype(kept.dtype), at)

    recent = KVCache(write(recent.keys, k), write(recent.values, v))
    scaled = q * q.shape[-1] ** -0.5
    if implementation == "tpu_kernel":
        from tba_jax.models import attention_kernels

        old = attention_kernels.attend_history(scaled, *history, history_length, sharding)
    else:
        old = _partial(scaled, history, jnp.asarray(history_length))
    new = _partial(scaled, recent, jnp.broadcast_to(index + 1, (q.shape[0],)))
    return merge(old, new).astype(q.dtype), recent


def _partial(scaled: Float[Array, "n g r e"], cache: KVCache, length: Int[Array, " n"]) -> Partial:
    """The softmax over the first `length` positions of each slot, by einsum."""
    f32 = jnp.float32
    (keys, of_keys), (values, of_values) = (open_part(x, scaled.dtype) for x in cache)
    seen = jnp.arange(keys.shape[2])[None] < length[:, None]
    scores = jnp.einsum("ngre,ngce->ngrc", scaled, keys, preferred_element_type=f32)
    if of_keys is not None:
        scores = scores * of_keys[:, :, None]
    scores = scores + jnp.where(seen, 0.0, MASKED)[:, None, None]
    most = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - most)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if of_values is not None:
        weights = weights * of_values[:, :, None]
    out = jnp.einsum(
        "ngrc,ngce->ngre", weights.astype(values.dtype), values, preferred_element_type=f32
    )
    return Partial(out, most, total)
