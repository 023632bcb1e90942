# SPDX-License-Identifier: Apache-2.0
"""JAX's splash attention for TPU on whole sequences: rows, and packed rows.

Visibility is causal within segments, or a mask of pairs if segments do not suffice. The gradient is
that of the library. Invariant: the results are those of `attention.attend`, whatever the padding
contains.

The module compiles for TPU and is checked in interpret mode, but not measured on a TPU. On other
devices it runs interpreted: correct and very slow.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
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


def _of_rows(
    function: Callable[..., Array], sharding: NamedSharding | None
) -> Callable[..., Array]:
    """Return function(q, k, v, visibility of rows), applied per device to its rows and heads.

    The compiler cannot divide a kernel. Only rows and key/value heads are ever divided, so that a
    kernel needs no data of another device.
    """
    if sharding is None:
        return function
    rows, heads = cache_axes(sharding)
    of_rows = PartitionSpec(rows, None, heads)
    return jax.shard_map(
        function,
        mesh=sharding.mesh,
        in_specs=(of_rows, of_rows, of_rows, PartitionSpec(rows)),
        out_specs=of_rows,
        check_vma=False,
    )


def _splash_causal(
    q: Float[Array, "b s g r e"],
    k: Float[Array, "b s g e"],
    v: Float[Array, "b s g e"],
    segments: Bool[Array, "b s"] | Int[Array, "b s"],
) -> Float[Array, "b s g r e"]:
    # Padding is a separate segment, and segments do not see one another.
    (s, block), num_heads = _sizes(q.shape[1], _MOST_BLOCK), q.shape[2] * q.shape[3]
    mask = splash_mask.MultiHeadMask([splash_mask.CausalMask((s, s))] * num_heads)

    def run(q: Array, k: Array, v: Array, segments: Array, *, interpret: bool) -> Array:
        def row(q: Array, k: Array, v: Array, segments: Array) -> Any:
            kernel = _splash_kernel(mask, block, interpret=interpret)
            return kernel(q, k, v, splash.SegmentIds(segments, segments))

        return jax.vmap(row)(q, k, v, segments)

    return _run(run, q, k, v, _padded(segments.astype(jnp.int32), s), s)


def _splash_pairs(
    q: Float[Array, "b s g r e"],
    k: Float[Array, "b s g e"],
    v: Float[Array, "b s g e"],
    seen: Bool[Array, "b s s"],
) -> Float[Array, "b s g r e"]:
    """Attend with a dynamic mask, the same for all heads, one row after the other."""
    s, block = _sizes(q.shape[1], _MASKED_BLOCK)
    # Positions that see no other position see themselves: a block without visible pairs would be
    # skipped, and its output would be undefined.
    seen = jnp.pad(seen, ((0, 0), *[(0, s - seen.shape[1])] * 2)) | jnp.eye(s, dtype=bool)[None]

    def run(q: Array, k: Array, v: Array, seen: Array, *, interpret: bool) -> Array:
        def row(q: Array, k: Array, v: Array, seen: Array) -> Any:
            kernel = _splash_kernel(seen[None], block, interpret=interpret)
            # If created in a trace, this flag would be an array, on which Python cannot branch.
            kernel.fwd_mask_info = kernel.fwd_mask_info._replace(is_dynamic_mask=True)
            return kernel(q, k, v)

        return jax.vmap(row)(q, k, v, seen)

    return _run(run, q, k, v, seen, s)


def _run(
    function: Callable[..., Array],
    q: Float[Array, "b s g r e"],
    k: Float[Array, "b s g e"],
    v: Float[Array, "b s g e"],
    visible: Array,
    size: int,
) -> Float[Array, "b s g r e"]:
    """Return function(q [b h n e], k, v [b g n e], visible) of rows padded to `size` positions.

    The function is compiled on TPU, and interpreted on other platforms.
    """
    b, s, g, r, e = q.shape
    rows = (q * e**-0.5).reshape(b, s, g * r, e), k, v
    heads = (jnp.swapaxes(_padded(x, size), 1, 2) for x in rows)
    out = jax.lax.platform_dependent(
        *heads,
        visible,
        tpu=functools.partial(function, interpret=False),
        default=functools.partial(function, interpret=True),
    )
    return jnp.swapaxes(out, 1, 2)[:, :s].reshape(q.shape)


def _splash_kernel(
    mask: splash_mask.MultiHeadMask | Bool[Array, "1 s c"], block: int, *, interpret: bool
) -> splash.SplashAttentionKernel:
    """Return a kernel (q [h s e], k [g c e], v [g c e], segments) -> [h s e]."""
    sizes: dict[str, Any] = dict.fromkeys(("block_q", "block_kv"), block)
    sizes |= {f"{name}_{gradient}": block for name in sizes for gradient in ("dkv", "dq")}
    return splash.make_splash_mha(
        mask,
        block_sizes=splash.BlockSizes(**sizes),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )


def _padded(x: Float[Array, "b s *rest"], size: int) -> Float[Array, "b n *rest"]:
    """Return x with `size` positions; added positions are at the end and have zeros."""
    return jnp.pad(x, ((0, 0), (0, size - x.shape[1]), *[(0, 0)] * (x.ndim - 2)))


def _sizes(length: int, most: int) -> tuple[int, int]:
    """Return (length rounded up to lanes, the largest block up to `most` that divides it)."""
    size = -(-length // _LANES) * _LANES
    return size, next(n for n in (512, 256, _LANES) if size % n == 0 and n <= most)
