# SPDX-License-Identifier: Apache-2.0
"""Shardings of arrays on the meshes of trainer and searchers.

Invariant: weights are copied between device sets shard by shard: not through the host, and no
device that stores a shard receives the whole array.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tba_jax.devices.placement import BATCH_AXES


class Rule(NamedTuple):
    """Mesh axis that divides a logical axis, if the mesh has it."""

    mesh_axis: str
    may_replicate: bool  # if the mesh does not divide the size; otherwise it is refused
    instead_of: str = ""  # axis whose mesh axes divide this axis too, and not that one, if possible


AXIS_RULES: Mapping[str, Rule] = {
    # Nearly all weights and arithmetic: replicating them would silently make the mesh useless, so
    # a mesh that does not divide them is refused.
    "heads": Rule("model", may_replicate=False),
    "mlp": Rule("model", may_replicate=False),
    # Gathered along its first axis an array is contiguous; along another one it would be copied,
    # since the kernels of experts want rows in order.
    "experts": Rule("expert", may_replicate=False, instead_of="embed"),
    "embed": Rule("fsdp", may_replicate=False),
    # The checkpoint fixes these sizes: two key/value heads (Qwen2.5-1.5B), 50,257 tokens (GPT-2).
    # If a mesh does not divide them, every device keeps them all.
    "kv_heads": Rule("model", may_replicate=True),
    "vocab": Rule("model", may_replicate=True),
}
"""Logical axis -> mesh axis; absent axes (layers, head_dim, rank) are never divided."""


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of a mesh that divide the rows of a batch."""
    return tuple(axis for axis in BATCH_AXES if axis in mesh.shape)


def partition_spec(axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """Return the partition of one array over a mesh; rules for absent mesh axes have no effect.

    Args:
        axes: logical name of each axis; None: never divided.
        shape: shape of the array.

    Raises:
        ValueError: a mesh axis does not divide a size.
    """
    sizes = {axis: n for axis, n in zip(axes, shape, strict=True) if axis and axis in AXIS_RULES}
    divides = {axis: tuple({AXIS_RULES[axis].mesh_axis} & {*mesh.shape}) for axis in sizes}
    for axis, size in sizes.items():
        if (other := AXIS_RULES[axis].instead_of) in divides:
            names = divides[axis] + divides[other]
            if size % math.prod(mesh.shape[name] for name in names) == 0:
                divides |= {axis: names, other: ()}
    spec: list[tuple[str, ...]] = []
    for axis, size in zip(axes, shape, strict=True):
        names = divides.get(axis or "", ())
        parts = math.prod(mesh.shape[name] for name in names)
        spec.append(names if size % parts == 0 else ())
        if size % parts and not AXIS_RULES[axis or ""].may_replicate:
            possible = [n for n in range(1, size + 1) if size % n == 0 and n <= 256]
            raise ValueError(
                f"axis {axis!r} of size {size} cannot be divided over {parts} devices of the mesh "
                f"axis {' x '.join(map(repr, names))}. Set that axis to one of {possible}"
            )
    return PartitionSpec(*spec)


def tree_shardings(axes: Any, shapes: Any, mesh: Mesh) -> Any:
    """Return the NamedSharding of each array of a tree; `axes` has its tuple of logical axes."""

    def sharding(array: Any, names: Sequence[str | None]) -> NamedSharding:
        return NamedSharding(mesh, partition_spec(names, array.shape, mesh))

    return jax.tree.map(sharding, shapes, axes)


def placed_shapes(tree: Any, shardings: Any) -> Any:
    """Return the shapes and dtypes of a tree as jax.ShapeDtypeStruct with these shardings."""
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree, shardings
    )


def hand_over(tree: Any, shardings: Any) -> Any:
    """Return a tree of arrays with other shardings, on any devices of this process.

    Every device receives the pieces that it needs and joins them; `jax.device_put` would copy the
    array through the host if the shardings differ. Arrays that already have the sharding are not
    copied: do not donate the source later.

    Args:
        tree: arrays; this process must hold the parts that `shardings` place on its devices.
        shardings: tree of shardings over devices of this process, or one sharding for all arrays.

    Raises:
        ValueError: other processes hold some of the parts.
    """
    if isinstance(shardings, jax.sharding.Sharding):
        return jax.tree.map(lambda x: _hand_over(x, shardings), tree)
    return jax.tree.map(_hand_over, tree, shardings)


def _hand_over(array: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    if array.sharding == sharding:
        return array
    shards = []
    for device, index in sharding.addressable_devices_indices_map(array.shape).items():
        start, end = _box(index or (), array.shape)
        pieces: dict[tuple[int, ...], jax.Array] = {}  # by place in the new shard
        for shard in sorted(array.addressable_shards, key=lambda s: s.device != device):
            own_start, own_end = _box(shard.index, array.shape)
            low, high = np.maximum(start, own_start), np.minimum(end, own_end)
            offset = tuple((low - start).tolist())
            if offset not in pieces and (low < high).all():
                is_whole = (low == own_start).all() and (high == own_end).all()
                part = (low - own_start).tolist(), (high - own_start).tolist()
                pieces[offset] = shard.data if is_whole else jax.lax.slice(shard.data, *part)
        shape = tuple((end - start).tolist())
        if sum(piece.size for piece in pieces.values()) != math.prod(shape):
            raise ValueError(
                f"array of shape {list(array.shape)} with sharding {array.sharding}: this process "
                "does not hold all parts that its searchers need. Use a sharding that gives each "
                "process a whole copy (Division.publication_mesh)"
            )
        moved = jax.device_put(list(pieces.values()), device)  # asynchronous: transfers overlap
        shards.append(moved[0] if len(moved) == 1 else _join(moved, tuple(pieces), shape))
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def _box(index: tuple[slice, ...], shape: Sequence[int]) -> np.ndarray:
    """Return start and end of a part of an array along each axis, [2 axes]."""
    ends = [s.indices(size)[:2] for s, size in zip(index, shape, strict=True)]
    return np.array(ends, int).reshape(-1, 2).T


@functools.partial(jax.jit, static_argnums=(1, 2))
def _join(pieces: list[jax.Array], offsets: Any, shape: tuple[int, ...]) -> jax.Array:
    out = jnp.zeros(shape, pieces[0].dtype)
    for piece, offset in zip(pieces, offsets, strict=True):
        out = jax.lax.dynamic_update_slice(out, piece, offset)
    return out
