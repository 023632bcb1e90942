# SPDX-License-Identifier: Apache-2.0
"""JAX's splash attention for TPU on whole sequences: rows, and packed rows.

Windows, caps, sinks and the gradient are those of the library. Invariant: the results are those of
`attention.attend`, whatever the padding contains.

The module compiles for TPU and is checked in interpret mode, but not measured on a TPU. On other
devices it runs interpreted: correct and very slow.
"""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

_LANES = 128  # lanes of a vector register; splash needs blocks of multiples of this number
# Maximum queries and keys per block. With a mask of pairs it is smaller: sequences of a packed row
# have a few hundred tokens, and blocks without visible pairs are skipped.
_MOST_BLOCK, _MASKED_BLOCK = 512, 256


def attend(
    q: Float[Array, "b s g r e"],
    k: Float[Array, "b s g e"],
    v: Float[Array, "b s g e"],
    visible: Any,
    scores: Any,
    sharding: NamedSharding | None = None,
) -> Float[Array, "b s g r e"]:
    """Return attention within the sequences of rows.

    Args:
        q, k, v: queries and keys rotated.
        visible: an `attention.Visible`. If sequences see an earlier prompt, its mask of pairs is
            used, and splash skips blocks without visible pairs.
        scores: an `attention.Scores`.
        sharding: sharding of k and v as a cache [b g s e] on a mesh; None: one device.
    """
    if visible.prompts is not None:
        run, seen = functools.partial(_attend, window=None), visible.seen(scores.window)
    else:
        run = functools.partial(_attend, window=scores.window)
        # Padding is a separate segment, and segments do not see one another.
        seen = visible.mask if visible.segments is None else visible.segments
    run = functools.partial(run, cap=scores.cap)
    if sharding is None:
        return run(q, k, v, scores.sinks, seen)
    # The compiler cannot divide a kernel. Only rows and key/value heads are ever divided, so that
    # a kernel needs no data of another device.
    rows, heads, *_ = (*sharding.spec, None, None)
    of_rows = PartitionSpec(rows, None, heads)
    divided = jax.shard_map(
        run,
        mesh=sharding.mesh,
        in_specs=(of_rows, of_rows, of_rows, PartitionSpec(heads), PartitionSpec(rows)),
        out_specs=of_rows,
        check_vma=False,
    )
    return divided(q, k, v, scores.sinks, seen)


def _attend(
    q: Float[Array, "b s g r e"],
    k: Float[Array, "b s g e"],
    v: Float[Array, "b s g e"],
    sinks: Float[Array, "g r"] | None,
    seen: Array,
    *,
    window: int | None,
    cap: float | None,
) -> Float[Array, "b s g r e"]:
    """Attend on one device, compiled on TPU and interpreted on other platforms.

    Args:
        seen: which positions are valid, or the sequence of each position, [b s]; or whether each
            query sees each key, [b s s].
    """
    (b, length, g, r, e), is_of_pairs = q.shape, seen.ndim == 3
    s = -(-length // _LANES) * _LANES
    most = _MASKED_BLOCK if is_of_pairs else _MOST_BLOCK
    block = next(n for n in (512, 256, _LANES) if s % n == 0 and n <= most)
    sizes: dict[str, Any] = dict.fromkeys(("block_q", "block_kv"), block)
    sizes |= {f"{name}_{gradient}": block for name in sizes for gradient in ("dkv", "dq")}
    options = {"block_sizes": splash.BlockSizes(**sizes), "attn_logits_soft_cap": cap}

    def padded(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, s - length), *[(0, 0)] * (x.ndim - 2)))

    if is_of_pairs:
        seen = jnp.pad(padded(seen), ((0, 0), (0, 0), (0, s - length)))
        # Positions that see no other position see themselves: a block without visible pairs would
        # be skipped, and its output would be undefined.
        seen = seen | jnp.eye(s, dtype=bool)[None]
    else:
        seen = padded(seen.astype(jnp.int32))

    def row(seen: Array, q: Array, k: Array, v: Array, *, interpret: bool) -> Array:
        mask: Any = seen[None]
        if not is_of_pairs:
            near = None if window is None else window - 1
            local = splash.LocalMask((s, s), (near, 0), 0)
            mask = splash.MultiHeadMask([local] * (g * r))
        kernel = splash.make_splash_mha(
            mask, head_shards=1, q_seq_shards=1, interpret=interpret, **options
        )
        segments = None
        if is_of_pairs:
            # If created in a trace, this flag would be an array, on which Python cannot branch.
            kernel.fwd_mask_info = kernel.fwd_mask_info._replace(is_dynamic_mask=True)
        else:
            segments = splash.SegmentIds(seen, seen)
        of_heads = None if sinks is None else sinks.reshape(-1)
        return cast("Array", kernel(q, k, v, segments, of_heads))

    heads = ((q * e**-0.5).reshape(b, length, g * r, e), k, v)
    out = jax.lax.platform_dependent(
        seen,
        *(jnp.swapaxes(padded(x), 1, 2) for x in heads),
        tpu=jax.vmap(functools.partial(row, interpret=False)),
        default=jax.vmap(functools.partial(row, interpret=True)),
    )
    return jnp.swapaxes(out, 1, 2)[:, :length].reshape(q.shape)
