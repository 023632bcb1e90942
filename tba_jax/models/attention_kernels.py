# SPDX-License-Identifier: Apache-2.0
"""Attention of one new token over its cache on a TPU: a Pallas kernel behind `attention`.

The decode kernels of JAX for TPU (paged, ragged) return no log-sum-exp, which is necessary to merge
the two parts of the cache. This small kernel reads only the filled blocks of each slot's cache.
Whole sequences use `splash`. Invariant: results are those of `attention.attend_cached`, whatever
the unfilled columns contain.

The kernel compiles for TPU and is checked in interpret mode, but not measured on a TPU, so it is
never chosen automatically. On other devices it runs interpreted: correct and very slow.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Float32, Int

from tba_jax.models.partial_softmax import Partial
from tba_jax.models.per_shard import cache_axes, per_shard, tpu_or_interpreter

_LANES = 128  # lanes of a vector register
_MASKED = -1e30  # finite, so that a slot without history gives weight 0 and not nan

# Keys of one block. Two blocks of keys and two of values are in flight, a quarter of the 16 MiB
# of fast memory that a v5e core has.
_BLOCK_BYTES = 2**20
_MOST_COLUMNS = 512


def attend_history(
    q: Float[Array, "n g r e"],
    keys: Float[Array, "n g c e"],
    values: Float[Array, "n g c e"],
    length: Int[Array, " n"],
    sharding: NamedSharding | None = None,
) -> Partial:
    """Return attention of one query position over the first `length` columns of each slot.

    Args:
        q: rotated and scaled.
        keys, values: caches; columns from `length` on are ignored.
        length: valid columns of each slot, possibly 0.
        sharding: sharding of the caches on a mesh; None: one device.
    """
    rows, heads = cache_axes(sharding)
    cache = PartitionSpec(rows, heads, None, None)
    return per_shard(_flash_decode, sharding, (cache, cache, cache, PartitionSpec(rows)), cache)(
        q, keys, values, length
    )


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
        # After the slot's last block the index stays, so no further block is fetched. (lax.div, not
        # //: rounding down needs a sign, which compiles only on a machine with a TPU.)
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

    return Partial(*tpu_or_interpreter(run, length.astype(jnp.int32), q, keys, values))


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
    """Process one block of a slot's columns; outputs stay in fast memory between blocks."""
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
        # The last block may exceed the cache, and a weight of 0 does not cancel a nan.
        values = values_ref[0]
        filled = start + jax.lax.broadcasted_iota(jnp.int32, values.shape, 1) < length
        values = jnp.where(filled, values, jnp.zeros_like(values))
        new = _batched_matmul(weights.astype(values.dtype), values, contract=1)
        out_ref[0] = out_ref[0] * shrink + new
        total_ref[0] = total_ref[0] * shrink + jnp.sum(weights, axis=-1, keepdims=True)
        most_ref[0] = most


def _batched_matmul(x: Array, y: Array, *, contract: int) -> Float32[Array, "g r x"]:
    """Return x [g r a] times y, whose axis `contract` is a; accumulated in float32."""
    dimensions = (((2,), (contract,)), ((0,), (0,)))
    return jax.lax.dot_general(x, y, dimensions, preferred_element_type=jnp.float32)
