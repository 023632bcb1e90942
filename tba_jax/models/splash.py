# SPDX-License-Identifier: Apache-2.0
"""JAX's splash attention for TPU on whole sequences: rows, packed rows, and shared prompts.

Visibility follows from shapes (causal, or responses after their prompt) and segment numbers, or
from a mask of pairs if these do not suffice. The gradient is that of the library. Invariant: the
results are those of `attention.attend`, whatever the padding contains.

The module compiles for TPU and is checked in interpret mode, but not measured on a TPU. On other
devices it runs interpreted: correct and very slow.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as splash_mask,
)
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from tba_jax.models.kv_cache import cache_axes

_LANES = 128  # lanes of a vector register; splash needs blocks of multiples of this number
# Maximum queries and keys per block. With a mask of pairs it is smaller: sequences of a packed row
# have a few hundred tokens, and blocks without visible pairs are skipped.
_MOST_BLOCK, _MASKED_BLOCK = 512, 256


def attend_causal(
    q: Float[Array, "b s g r e"],
    k: Float[Array, "b s g e"],
    v: Float[Array, "b s g e"],
    segments: Bool[Array, "b s"] | Int[Array, "b s"],
    sharding: NamedSharding | None = None,
) -> Float[Array, "b s g r e"]:
    """Return causal attention of rows padded on either side, or packed.

    Args:
        q, k, v: queries and keys rotated.
        segments: which positions are valid, or the index of each position's sequence; 0 at padding.
        sharding: sharding of k and v as a cache [b g s e] on a mesh; None: one device.
    """
    return _of_rows(_splash_causal, sharding)(q, k, v, segments)


def attend_masked(
    q: Float[Array, "b s g r e"],
    k: Float[Array, "b s g e"],
    v: Float[Array, "b s g e"],
    seen: Bool[Array, "b s s"],
    sharding: NamedSharding | None = None,
) -> Float[Array, "b s g r e"]:
    """Return attention with any mask of pairs; splash skips blocks without visible pairs.

    Args:
        q, k, v: queries and keys rotated.
        seen: whether each query sees each key; a query that sees none gives finite numbers.
        sharding: sharding of k and v as a cache [b g s e] on a mesh; None: one device.
    """
    return _of_rows(_splash_pairs, sharding)(q, k, v, seen)


def attend_after(
    q: Float[Array, "b c t g r e"],
    k: Float[Array, "b c t g e"],
    v: Float[Array, "b c t g e"],
    keys: Float[Array, "b x g e"],
    values: Float[Array, "b x g e"],
    valid: Bool[Array, "b x"],
    sharding: NamedSharding | None = None,
) -> Float[Array, "b c t g r e"]:
    """Return attention of c responses to their prompt and, causally, to themselves.

    Args:
        q, k, v: queries, keys and values of the responses; q and k rotated.
        keys, values: keys and values of the prompts; keys rotated.
        valid: valid positions of the prompts.
        sharding: sharding of keys and values as a cache [b g x e] on a mesh; None: one device.
    """
    rows, heads = cache_axes(sharding)
    responses, prompts = PartitionSpec(rows, None, None, heads), PartitionSpec(rows, None, heads)
    specs = responses, responses, responses, prompts, prompts, PartitionSpec(rows)
    run = _per_shard(_splash_after, sharding, specs, responses)
    return run(q, k, v, keys, values, valid)


def _of_rows(
    function: Callable[..., Array], sharding: NamedSharding | None
) -> Callable[..., Array]:
    """Return function(q, k, v, visibility of rows), applied per device to its rows and heads."""
    rows, heads = cache_axes(sharding)
    of_rows = PartitionSpec(rows, None, heads)
    return _per_shard(function, sharding, (of_rows, of_rows, of_rows, PartitionSpec(rows)), of_rows)


def _per_shard(
    function: Callable[..., Any], sharding: NamedSharding | None, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Return a function that applies `function` to the part of each device.

    The compiler cannot divide a kernel. Only rows and key/value heads are ever divided, so that a
    kernel needs no data of another device.
    """
    if sharding is None:
        return function
    return jax.shard_map(
        function, mesh=sharding.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def _tpu_or_interpreter(function: Callable[..., Any], *args: Array) -> Any:
    """Return function(*args, interpret=...): compiled on TPU, interpreted on other platforms."""
    return jax.lax.platform_dependent(
        *args,
        tpu=functools.partial(function, interpret=False),
        default=functools.partial(function, interpret=True),
    )


def _splash_causal(
    q: Float[Array, "b s g r e"],
    k: Float[Array, "b s g e"],
    v: Float[Array, "b s g e"],
    segments: Bool[Array, "b s"] | Int[Array, "b s"],
) -> Float[Array, "b s g r e"]:
    # Padding is a separate segment, and segments do not see one another.
    size = _up(q.shape[1], _LANES)
    segments = _padded(segments.astype(jnp.int32), size)
    block = _block(size)
    out = _splash_rows(
        _padded(_rows_of_heads(q), size),
        _padded(k, size),
        _padded(v, size),
        splash.SegmentIds(segments, segments),
        splash_mask.CausalMask((size, size)),
        (block, block),
    )
    return out[:, : q.shape[1]].reshape(q.shape)


def _splash_after(
    q: Float[Array, "b c t g r e"],
    k: Float[Array, "b c t g e"],
    v: Float[Array, "b c t g e"],
    keys: Float[Array, "b x g e"],
    values: Float[Array, "b x g e"],
    valid: Bool[Array, "b x"],
) -> Float[Array, "b c t g r e"]:
    """Attend from the responses of a prompt, as one row, to their own keys and the prompt's."""
    b, c, t = q.shape[:3]
    # Blocks are no longer than a response, so that blocks of other responses are skipped.
    block = _block(_up(c * t, _LANES), most=t)
    of_keys = _block(block, most=valid.shape[1])
    own, prompt = _up(c * t, block), _up(valid.shape[1], of_keys)

    def row(x: Array) -> Array:
        return _padded(x.reshape(b, c * t, *x.shape[3:]), own)

    def before(x: Array, prompts: Array) -> Array:
        return jnp.concatenate([row(x), _padded(prompts, prompt)], axis=1)

    of_queries = jnp.ones((b, own), jnp.int32)
    of_prompt = _padded(valid.astype(jnp.int32), prompt)
    out = _splash_rows(
        row(_rows_of_heads(q)),
        before(k, keys),
        before(v, values),
        splash.SegmentIds(of_queries, jnp.concatenate([of_queries, of_prompt], axis=1)),
        _AfterPrompt(own, prompt, t),
        (block, of_keys),
    )
    return out[:, : c * t].reshape(q.shape)


@dataclasses.dataclass(frozen=True)
class _AfterPrompt(splash_mask.Mask):
    """Mask, computed per block, of responses that see themselves causally and the whole prompt.

    Attributes:
        own: number of queries, and of keys at the same positions.
        prompt: number of keys of the prompt, which come after the own keys.
        length: number of tokens of a response.
    """

    own: int
    prompt: int
    length: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.own, self.own + self.prompt

    def __getitem__(self, idx: tuple[slice, slice]) -> np.ndarray:
        rows, columns = (np.arange(*at.indices(n)) for n, at in zip(self.shape, idx, strict=True))
        of_rows, of_columns = rows[[0, -1]] // self.length, columns[[0, -1]] // self.length
        # Nearly all blocks are fully visible or fully hidden. Four responses of 32,768 tokens have
        # 66,000 blocks; comparing every pair would take a millisecond each.
        if columns[0] >= self.own:
            return np.ones((len(rows), len(columns)), bool)
        if columns[-1] < self.own:
            if columns[0] > rows[-1] or of_columns[1] < of_rows[0]:
                return np.zeros((len(rows), len(columns)), bool)
            if columns[-1] <= rows[0] and of_columns[0] == of_rows[1]:
                return np.ones((len(rows), len(columns)), bool)
        is_same = rows[:, None] // self.length == columns[None] // self.length
        is_own = is_same & (columns[None] <= rows[:, None])
        return is_own | (columns >= self.own)[None]


def _splash_rows(
    q: Float[Array, "b s h e"],
    k: Float[Array, "b c g e"],
    v: Float[Array, "b c g e"],
    segments: splash.SegmentIds,
    mask: splash_mask.Mask,
    blocks: tuple[int, int],
) -> Float[Array, "b s h e"]:
    """Attend with a static mask [s c], the same for all rows; queries see only their segment."""

    def run(q: Array, k: Array, v: Array, *segments: Array, interpret: bool) -> Array:
        kernel = _splash_kernel(
            splash_mask.MultiHeadMask([mask] * q.shape[1]), blocks, interpret=interpret
        )

        def row(q: Array, k: Array, v: Array, *segments: Array) -> Any:
            return kernel(q, k, v, splash.SegmentIds(*segments))

        return jax.vmap(row)(q, k, v, *segments)

    heads = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    return jnp.swapaxes(_tpu_or_interpreter(run, *heads, *segments), 1, 2)


def _splash_pairs(
    q: Float[Array, "b s g r e"],
    k: Float[Array, "b s g e"],
    v: Float[Array, "b s g e"],
    seen: Bool[Array, "b s s"],
) -> Float[Array, "b s g r e"]:
    """Attend with a dynamic mask, the same for all heads, one row after the other."""
    s = q.shape[1]
    size = _up(s, _LANES)
    # Positions that see no other position see themselves: a block without visible pairs would be
    # skipped, and its output would be undefined.
    seen = jnp.pad(seen, ((0, 0), (0, size - s), (0, size - s)))
    seen = seen | jnp.eye(size, dtype=bool)[None]
    block = _block(size, most=_MASKED_BLOCK)

    def run(q: Array, k: Array, v: Array, seen: Array, *, interpret: bool) -> Array:
        def row(q: Array, k: Array, v: Array, seen: Array) -> Any:
            kernel = _splash_kernel(seen[None], (block, block), interpret=interpret)
            # If created in a trace, this flag would be an array, on which Python cannot branch.
            kernel.fwd_mask_info = kernel.fwd_mask_info._replace(is_dynamic_mask=True)
            return kernel(q, k, v)

        return jax.vmap(row)(q, k, v, seen)

    rows = (jnp.swapaxes(_padded(x, size), 1, 2) for x in (_rows_of_heads(q), k, v))
    out = jnp.swapaxes(_tpu_or_interpreter(run, *rows, seen), 1, 2)
    return out[:, :s].reshape(q.shape)


def _splash_kernel(
    mask: splash_mask.MultiHeadMask | Bool[Array, "1 s c"],
    blocks: tuple[int, int],
    *,
    interpret: bool,
) -> splash.SplashAttentionKernel:
    """Return a kernel (q [h s e], k [g c e], v [g c e], segments) -> [h s e]."""
    of_queries, of_keys = blocks
    return splash.make_splash_mha(
        mask,
        block_sizes=splash.BlockSizes(
            block_q=of_queries,
            block_kv=of_keys,
            block_q_dkv=of_queries,
            block_kv_dkv=of_keys,
            block_q_dq=of_queries,
            block_kv_dq=of_keys,
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )


def _rows_of_heads(q: Float[Array, "*b g r e"]) -> Float[Array, "*b h e"]:
    """Return the scaled queries with the heads of all groups on one axis."""
    *rows, g, r, e = q.shape
    return (q * e**-0.5).reshape(*rows, g * r, e)


def _padded(x: Float[Array, "b s *rest"], size: int) -> Float[Array, "b n *rest"]:
    """Return x with `size` positions; added positions are at the end and have zeros."""
    return jnp.pad(x, ((0, 0), (0, size - x.shape[1]), *[(0, 0)] * (x.ndim - 2)))


def _block(size: int, most: int = _MOST_BLOCK) -> int:
    """Return the largest block up to `most` that divides a multiple of 128, at least 128."""
    fitting = (n for n in (_MOST_BLOCK, 256) if size % n == 0 and n <= most)
    return next(fitting, _LANES)


def _up(size: int, step: int) -> int:
    """Round up to a multiple of `step`."""
    return -(-size // step) * step
