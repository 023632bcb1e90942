# SPDX-License-Identifier: Apache-2.0
"""Attention of one new token over its cache on an NVIDIA GPU: one Pallas (Triton) kernel per step.

With einsum, a layer takes ten launches: two column writes, two products, a maximum and a sum for
each part of the cache, and the merge. Here one program per slot and key/value head reads the filled
columns, writes the new key and value into the recent part, and normalises at the end. The decode
kernel of JAX (`jax.experimental.pallas.ops.gpu.decode_attention`) is deprecated, needs caches whose
columns its splits divide, and neither writes nor merges. Invariant: the results are those of
`attention.attend_cached`, whatever the unfilled columns contain.

The kernel compiles for h100 and is checked in interpret mode, but not measured on a GPU. On other
devices it runs interpreted: correct and very slow.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from tba_jax.models.kv_cache import KVCache, Part, Rounded
from tba_jax.models.per_shard import cache_axes, per_shard

_MASKED = -1e30  # finite, so that a slot without history gives weight 0 and not nan
_LEAST = 16  # minimum rows and columns of a tensor-core product
_COLUMNS = 64  # cache columns per loop step: 32 KiB of keys and values of 128 bfloat16
_WARPS, _STAGES = 4, 3


def attend_step(
    q: Float[Array, "n g r e"],
    k: Float[Array, "n g e"],
    v: Float[Array, "n g e"],
    history: KVCache,
    length: Int[Array, " n"],
    recent: KVCache,
    index: Int[Array, ""],
    sharding: NamedSharding | None = None,
) -> tuple[Float[Array, "n g r e"], tuple[Array, Array]]:
    """Return (output, `recent` with k and v at column `index`): attention over both cache parts.

    Args:
        q, k, v: query, key and value of the new token; q and k rotated.
        history: keys and values [n g c e], in their dtype or 8-bit, which are converted on
            reading; columns from `length` on are ignored.
        length: valid columns of each slot, possibly 0.
        recent: keys and values of this chunk [n g m e], not 8-bit; the kernel reads columns before
            `index`. The arrays are written in place if nothing else refers to them.
        index: column of the new token.
        sharding: sharding of the caches on a mesh; None: one device.
    """
    rows, heads = cache_axes(sharding)
    cache = PartitionSpec(rows, heads)
    slot = PartitionSpec(rows)
    # Use one array, so that rotations, biases and casts are one launch instead of three.
    token = jnp.concatenate([q, k[:, :, None], v[:, :, None]], axis=2)
    out, *written = per_shard(
        _attend_step,
        sharding,
        (cache, cache, cache, slot, cache, cache, PartitionSpec()),
        (cache, cache, cache),
    )(token, *history, length, *recent, index)
    return out, (written[0], written[1])


def _attend_step(
    token: Array,
    keys: Part,
    values: Part,
    length: Array,
    recent_keys: Array,
    recent_values: Array,
    index: Array,
) -> tuple[Array, Array, Array]:
    n, g, r, e = token.shape[0], token.shape[1], token.shape[2] - 2, token.shape[3]
    c, m = keys.shape[2], recent_keys.shape[2]
    rows, width, recent_rows = (max(_LEAST, pl.next_power_of_2(x)) for x in (r, e, m))
    columns = pl.cdiv(c, _COLUMNS) * _COLUMNS

    # Blocks have power-of-two sizes and may exceed the arrays; every load and store has a mask.
    def block(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *shape), lambda i, j: (i, j, *[0] * len(shape)))

    dtype = recent_keys.dtype
    scales: tuple[Array, ...] = ()
    if isinstance(keys, Rounded) and isinstance(values, Rounded):
        scales = keys.scale, values.scale
    of_columns = pl.BlockSpec((None, None, columns), lambda i, j: (i, j, 0))

    def run(*args: Array, interpret: bool) -> list[Array]:
        return pl.pallas_call(
            functools.partial(_kernel, sizes=(r, e, m), num_scales=len(scales)),
            grid=(n, g),
            in_specs=[
                block(max(rows, pl.next_power_of_2(r + 2)), width),
                block(columns, width),
                block(columns, width),
                pl.BlockSpec((None,), lambda i, j: (i,)),
                block(recent_rows, width),
                block(recent_rows, width),
                pl.BlockSpec((), lambda i, j: ()),
                *[of_columns for _ in scales],
            ],
            out_specs=[block(rows, width), block(recent_rows, width), block(recent_rows, width)],
            out_shape=[
                jax.ShapeDtypeStruct((n, g, r, e), token.dtype),
                jax.ShapeDtypeStruct(recent_keys.shape, dtype),
                jax.ShapeDtypeStruct(recent_values.shape, dtype),
            ],
            input_output_aliases={4: 1, 5: 2},
            compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
            interpret=interpret,
            name="decode_step",
        )(*args)

    stored = (x.values if isinstance(x, Rounded) else x for x in (keys, values))
    args = (token, *stored, length.astype(jnp.int32), recent_keys, recent_values, index, *scales)
    out, new_keys, new_values = jax.lax.platform_dependent(
        *args,
        cuda=functools.partial(run, interpret=False),
        default=functools.partial(run, interpret=True),
    )
    return out, new_keys, new_values


def _kernel(
    token_ref: Any,
    keys_ref: Any,
    values_ref: Any,
    length_ref: Any,
    recent_keys_ref: Any,
    recent_values_ref: Any,
    index_ref: Any,
    *refs: Any,
    sizes: tuple[int, int, int],
    num_scales: int,
) -> None:
    """Process one slot and key/value head; `sizes` are r, e and m.

    The sizes of blocks are powers of two. `refs` has the scales of the columns of keys and values,
    if these are 8-bit, and then the outputs.
    """
    r, e, m = sizes
    scale_refs, (out_ref, *new_refs) = refs[:num_scales], refs[num_scales:]
    dtype = recent_keys_ref.dtype
    rows, width = out_ref.shape
    recent_rows = recent_keys_ref.shape[0]
    length, index = length_ref[...], index_ref[...]
    is_dim = jnp.arange(width) < e

    def load(ref: Any, start: Any, num: int, limit: Any) -> Array:
        """Load [num width] with 0 in rows from `limit` on, because 0 times nan would be nan."""
        seen = start + jnp.arange(num) < limit
        at = ref.at[pl.ds(start, num), pl.ds(0, width)]
        return plgpu.load(at, mask=seen[:, None] & is_dim[None], other=0).astype(dtype)

    def add(carry: Any, k: Array, v: Array, seen: Array, *scales: Array) -> Any:
        """Add columns, multiplied by `scales`, to the running softmax."""
        out, before, total = carry
        scores = plgpu.dot(q, k.T)
        if scales:
            scores = scores * scales[0][None]
        scores = jnp.where(seen[None], scores, _MASKED)
        most = jnp.maximum(before, jnp.max(scores, axis=1))
        shrink, weights = jnp.exp(before - most), jnp.exp(scores - most[:, None])
        seen_values = weights * scales[1][None] if scales else weights
        new = plgpu.dot(seen_values.astype(v.dtype), v)
        return out * shrink[:, None] + new, most, total * shrink + jnp.sum(weights, axis=1)

    q = (load(token_ref, 0, rows, r) * e**-0.5).astype(dtype)

    # The new token sees itself, so the sums start above zero.
    k, v = (load(token_ref, row, 1, r + 2) for row in (r, r + 1))
    place = jnp.arange(recent_rows)
    is_own = (place == index)[:, None]
    recent_keys = jnp.where(is_own, k, load(recent_keys_ref, 0, recent_rows, index))
    recent_values = jnp.where(is_own, v, load(recent_values_ref, 0, recent_rows, index))
    start = (
        jnp.zeros((rows, width), jnp.float32),
        jnp.full((rows,), _MASKED, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )
    carry = add(start, recent_keys, recent_values, place <= index)

    def more(i: Array, carry: Any) -> Any:
        first = i * _COLUMNS
        seen = first + jnp.arange(_COLUMNS) < length
        k = load(keys_ref, first, _COLUMNS, length)
        v = load(values_ref, first, _COLUMNS, length)
        columns = pl.ds(first, _COLUMNS)
        scales = (plgpu.load(ref.at[columns], mask=seen, other=0) for ref in scale_refs)
        return add(carry, k, v, seen, *scales)

    out, _, total = jax.lax.fori_loop(0, pl.cdiv(length, _COLUMNS), more, carry)
    out = (out / total[:, None]).astype(out_ref.dtype)
    is_row = jnp.arange(rows) < r
    plgpu.store(
        out_ref.at[pl.ds(0, rows), pl.ds(0, width)], out, mask=is_row[:, None] & is_dim[None]
    )
    own = is_own & is_dim[None] & (place < m)[:, None]
    for ref, new in zip(new_refs, (recent_keys, recent_values), strict=True):
        plgpu.store(ref.at[pl.ds(0, recent_rows), pl.ds(0, width)], new, mask=own)
