# SPDX-License-Identifier: Apache-2.0
"""Pallas kernels for TPU behind `attention`: splash attention, and one new token over a cache.

Whole sequences go through jax's own splash attention. Its decode kernels (paged, ragged) return no
log-sum-exp, which our two-part cache needs to merge its parts, hence one small kernel here: it
reads of each slot's cache only the blocks that the slot has filled. The invariant it owns: the
numbers of `attention.attend`, whatever the padding holds.

Compiled for TPU v5e and v5p and checked in interpret mode; nobody has measured them on a TPU, so
nothing uses them unless asked to. On other devices they run interpreted: correct and very slow.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as splash_mask,
)
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int

from tba_jax.models.partial_softmax import Partial
from tba_jax.models.per_shard import cache_axes, per_shard

_LANES = 128  # of a vector register; splash works on blocks of multiples of it
_MASKED = -1e30  # finite, so that a slot without history gives weight 0 and not nan

# Keys of one block. Two blocks of keys and two of values are in flight, a quarter of the 16 MiB
# of fast memory that a v5e core has.
_BLOCK_BYTES = 2**20
_MOST_COLUMNS = 512


def attend_causal(
    q: Float[Array, "b s g r e"],
    k: Float[Array, "b s g e"],
    v: Float[Array, "b s g e"],
    segments: Bool[Array, "b s"] | Int[Array, "b s"],
    sharding: NamedSharding | None = None,
) -> Float[Array, "b s g r e"]:
    """Causal attention of rows padded on either side, or packed, by splash attention.

    Args:
        q, k, v: queries and keys rotated.
        segments: which positions are valid, or the number of each one's sequence, 0 at padding.
        sharding: of k and v as a cache [b g s e], on a mesh; None: one device.
    """
    rows, heads = cache_axes(sharding)
    return per_shard(
        _splash,
        sharding,
        (
            PartitionSpec(rows, None, heads, None, None),
            PartitionSpec(rows, None, heads, None),
            PartitionSpec(rows, None, heads, None),
            PartitionSpec(rows, None),
        ),
        PartitionSpec(rows, None, heads, None, None),
    )(q, k, v, segments)


def attend_history(
    q: Float[Array, "n g r e"],
    keys: Float[Array, "n g c e"],
    values: Float[Array, "n g c e"],
    length: Int[Array, " n"],
    sharding: NamedSharding | None = None,
) -> Partial:
    """Attention of one query position over the first `length` columns of each slot.

    Args:
        q: rotated and scaled.
        keys, values: caches; what lies behind `length` is not read, or is ignored.
        length: valid columns of each slot, possibly 0.
        sharding: of the caches on a mesh; None: one device.
    """
    rows, heads = cache_axes(sharding)
    cache = PartitionSpec(rows, heads, None, None)
    return per_shard(_flash_decode, sharding, (cache, cache, cache, PartitionSpec(rows)), cache)(
        q, keys, values, length
    )


def _kernel_or_interpreter(function: Callable[..., Any], *args: Array) -> Any:
    """function(*args, interpret=...), decided by the platform that is compiled for."""
    return jax.lax.platform_dependent(
        *args,
        tpu=functools.partial(function, interpret=False),
        default=functools.partial(function, interpret=True),
    )


def _splash(
    q: Float[Array, "b s g r e"],
    k: Float[Array, "b s g e"],
    v: Float[Array, "b s g e"],
    segments: Bool[Array, "b s"] | Int[Array, "b s"],
) -> Float[Array, "b s g r e"]:
    b, s, g, r, e = q.shape
    padding = -s % _LANES
    q = (q * e**-0.5).reshape(b, s, g * r, e)
    # Heads in front. Padding is a segment too: segments do not see one another.
    q, k, v = (
        jnp.pad(jnp.swapaxes(x, 1, 2), ((0, 0), (0, 0), (0, padding), (0, 0))) for x in (q, k, v)
    )
    segments = jnp.pad(segments.astype(jnp.int32), ((0, 0), (0, padding)))
    size = s + padding
    block = next(n for n in (512, 256, _LANES) if size % n == 0)

    def run(q: Array, k: Array, v: Array, segments: Array, *, interpret: bool) -> Array:
        kernel = splash.make_splash_mha(
            splash_mask.MultiHeadMask([splash_mask.CausalMask((size, size))] * (g * r)),
            block_sizes=splash.BlockSizes(
                block_q=block,
                block_kv=block,
                block_q_dkv=block,
                block_kv_dkv=block,
                block_q_dq=block,
                block_kv_dq=block,
            ),
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )

        def row(q: Array, k: Array, v: Array, ids: Array) -> Any:
            return kernel(q, k, v, splash.SegmentIds(ids, ids))

        return jax.vmap(row)(q, k, v, segments)

    out = _kernel_or_interpreter(run, q, k, v, segments)[:, :, :s]
    return jnp.swapaxes(out, 1, 2).reshape(b, s, g, r, e)


def _flash_decode(
    q: Float[Array, "n g r e"],
    keys: Float[Array, "n g c e"],
    values: Float[Array, "n g c e"],
    length: Int[Array, " n"],
) -> Partial:
    n, g, r, e = q.shape
    columns = keys.shape[2]
    row_bytes = g * max(e, _LANES) * keys.dtype.itemsize  # short rows fill whole registers too
    block = min(columns, _MOST_COLUMNS, max(_LANES, _BLOCK_BYTES // row_bytes // 8 * 8))

    def cache_block(slot: Array, j: Array, length: Any) -> tuple[Any, ...]:
        # Behind the slot's last block the index stays, so nothing more is fetched. (lax.div, not
        # //: rounding down needs a sign, which compiles only where the TPU is present.)
        last = jax.lax.div(jnp.maximum(length[slot] - 1, 0), block)
        return slot, 0, jnp.minimum(j, last), 0

    def same_slot(slot: Array, j: Array, length: Any) -> tuple[Any, ...]:
        del j, length
        return slot, 0, 0, 0

    def run(length: Array, q: Array, keys: Array, values: Array, *, interpret: bool) -> list[Array]:
        return pl.pallas_call(
            functools.partial(_flash_decode_kernel, block=block),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(n, pl.cdiv(columns, block)),
                in_specs=[
                    pl.BlockSpec((1, g, r, e), same_slot),
                    pl.BlockSpec((1, g, block, e), cache_block),
                    pl.BlockSpec((1, g, block, e), cache_block),
                ],
                out_specs=[
                    pl.BlockSpec((1, g, r, e), same_slot),
                    pl.BlockSpec((1, g, r, 1), same_slot),
                    pl.BlockSpec((1, g, r, 1), same_slot),
                ],
            ),
            out_shape=[
                jax.ShapeDtypeStruct((n, g, r, e), jnp.float32),
                jax.ShapeDtypeStruct((n, g, r, 1), jnp.float32),
                jax.ShapeDtypeStruct((n, g, r, 1), jnp.float32),
            ],
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
            interpret=interpret,
            name="flash_decode",
        )(length, q, keys, values)

    return Partial(*_kernel_or_interpreter(run, length.astype(jnp.int32), q, keys, values))


def _flash_decode_kernel(
    length_ref: Any,
    q_ref: Any,
    keys_ref: Any,
    values_ref: Any,
    out_ref: Any,
    most_ref: Any,
    total_ref: Any,
    *,
    block: int,
) -> None:
    """One slot and one block of its columns; the outputs stay in fast memory between blocks."""
    length, start = length_ref[pl.program_id(0)], pl.program_id(1) * block

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)
        most_ref[...] = jnp.full_like(most_ref, _MASKED)
        total_ref[...] = jnp.zeros_like(total_ref)

    @pl.when(start < length)
    def _() -> None:
        scores = _batched_matmul(q_ref[0], keys_ref[0], contract=2)
        seen = start + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2) < length
        scores = jnp.where(seen, scores, _MASKED)
        before = most_ref[0]
        most = jnp.maximum(before, jnp.max(scores, axis=-1, keepdims=True))
        shrink, weights = jnp.exp(before - most), jnp.exp(scores - most)
        # Weight 0 does not undo a nan: the last block may reach past the end of the cache.
        values = values_ref[0]
        filled = start + jax.lax.broadcasted_iota(jnp.int32, values.shape, 1) < length
        values = jnp.where(filled, values, jnp.zeros_like(values))
        new = _batched_matmul(weights.astype(values.dtype), values, contract=1)
        out_ref[0] = out_ref[0] * shrink + new
        total_ref[0] = total_ref[0] * shrink + jnp.sum(weights, axis=-1, keepdims=True)
        most_ref[0] = most


def _batched_matmul(x: Array, y: Array, *, contract: int) -> Float32[Array, "g r x"]:
    """x [g r a] times y, whose axis `contract` is a; accumulated in float32."""
    dimensions = (((2,), (contract,)), ((0,), (0,)))
    return jax.lax.dot_general(x, y, dimensions, preferred_element_type=jnp.float32)
