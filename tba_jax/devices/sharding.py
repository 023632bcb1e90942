# SPDX-License-Identifier: Apache-2.0
"""Meshes of trainer and searchers, and shardings of arrays on them.

One table maps the logical axes of a model to mesh axes; rows of a batch are divided over
`BATCH_AXES`. Invariants: no mesh axis divides two axes of one array. Weights are copied between
device sets shard by shard: not through the host, and no device that stores a shard receives the
whole array.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from tba_jax.devices.placement import Asked, MeshShape, divide

MESH_AXES = ("data", "fsdp", "model")
"""Axes of the trainer's mesh. data: copies of the parameters, rows divided; fsdp: rows and
parameters divided, parameters gathered layer by layer; model: every matrix product divided. With
mesh.expert, the axis `expert` comes before `model`: rows and experts divided."""

BATCH_AXES = ("data", "fsdp", "expert")
"""Mesh axes that divide the rows of a batch."""


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of a mesh that divide the rows of a batch."""
    return tuple(axis for axis in BATCH_AXES if axis in mesh.shape)


def trainer_mesh(devices: Any, shape: MeshShape) -> Mesh:
    """Return the trainer's mesh; it has the axis `expert` only if it is requested.

    Args:
        devices: array or sequence of the devices, those of one process adjacent.
    """
    sizes = {axis: getattr(shape, axis) for axis in (*BATCH_AXES, "model")}
    sizes = {axis: size for axis, size in sizes.items() if size > 1 or axis in MESH_AXES}
    return Mesh(np.asarray(devices).reshape(*sizes.values()), tuple(sizes))


class Rule(NamedTuple):
    """Mesh axis of one logical axis.

    Attributes:
        mesh_axis: mesh axis that divides it, if the mesh has that axis.
        may_replicate: replicate the axis if the mesh axis does not divide its size; otherwise the
            mesh is refused.
        instead_of: logical axis of the same array whose mesh axes divide this axis too, and not
            that one, if they divide its size.
    """

    mesh_axis: str
    may_replicate: bool
    instead_of: str = ""

    def axes_of(self, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
        """Return the axes of a mesh that divide the logical axis."""
        return (self.mesh_axis,) if self.mesh_axis in mesh.shape else ()


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


class Placement(NamedTuple):
    """Meshes of a run in one process.

    Attributes:
        trainer_mesh: mesh with the axes MESH_AXES; devices of one process are adjacent.
        searcher_meshes: one per searcher of this process, with the axis `model`; equal if
            searchers share devices.
        first_searcher: ID of the first searcher of this process.
        num_searchers: number of searchers of the run.
    """

    trainer_mesh: Mesh
    searcher_meshes: tuple[Mesh, ...]
    first_searcher: int = 0
    num_searchers: int = 1

    @property
    def publication_mesh(self) -> Mesh:
        """Mesh on which the publish program leaves the weights.

        The trainer's mesh, unless a copy of the parameters spans several processes. Then each
        process gets a whole copy, divided over as many of its devices as the other axes permit,
        because searchers cannot read arrays of other hosts.
        """
        devices, shape = self.trainer_mesh.devices.reshape(-1), self.trainer_mesh.shape
        local = sum(d.process_index == devices[0].process_index for d in devices)
        sizes = dict[str, int]()
        for axis in ("model", "expert", "fsdp"):
            sizes[axis] = math.gcd(shape.get(axis, 1), local)
            local //= sizes[axis]
        data = len(devices) // math.prod(sizes.values())
        return trainer_mesh(devices, MeshShape(data, **sizes))


def placed_shapes(tree: Any, shardings: Any) -> Any:
    """Return the shapes and dtypes of a tree as jax.ShapeDtypeStruct with these shardings."""
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree, shardings
    )


def place(
    placement: str, devices: Sequence[Any], asked: Asked, process_index: int = 0
) -> Placement:
    """Return the meshes of trainer and searchers; arguments and errors: `placement.divide`."""
    found = divide(placement, devices, asked, process_index)
    return Placement(
        trainer_mesh(np.array(found.trainer), found.mesh),
        tuple(Mesh(np.array(group), ("model",)) for group in found.groups),
        found.first_searcher,
        found.num_searchers,
    )


def storable(tree: Any) -> Any:
    """Return the tree for Orbax: with several processes, process-local arrays become numpy.

    With several processes, Orbax refuses jax arrays of a single process.

    Args:
        tree: arrays, and other leaves, which stay unchanged.
    """
    if jax.process_count() == 1:
        return tree

    def own(x: Any) -> Any:
        is_own = isinstance(x, jax.Array) and x.is_fully_addressable
        return np.asarray(x) if is_own else x

    return jax.tree.map(own, tree)


def hand_over(tree: Any, shardings: Any) -> Any:
    """Return a tree of arrays with other shardings, on any devices of this process.

    Every device receives the pieces that it needs and joins them. An array is never whole on the
    host, nor on a device that keeps only a part; `jax.device_put` would copy it through the host if
    the shardings differ. Arrays that already have the sharding are not copied: do not donate the
    source later.

    Args:
        tree: arrays; this process must hold the parts that `shardings` place on its devices.
        shardings: tree of shardings over devices of this process, or one sharding for all arrays.

    Raises:
        ValueError: other processes hold some of the parts.
    """
    if isinstance(shardings, jax.sharding.Sharding):
        return jax.tree.map(lambda x: _hand_over(x, shardings), tree)
    return jax.tree.map(_hand_over, tree, shardings)


_Box = tuple[tuple[int, int], ...]  # start and end along each axis


def _hand_over(array: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    if array.sharding == sharding:
        return array
    shards = []
    for device, index in sharding.addressable_devices_indices_map(array.shape).items():
        box = _box(index or (), array.shape)
        offsets, pieces = _pieces(array, box, device)
        moved = jax.device_put(pieces, device)  # asynchronous: transfers overlap
        shape = tuple(end - start for start, end in box)
        shards.append(moved[0] if len(moved) == 1 else _join(moved, offsets, shape))
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def _box(index: tuple[slice, ...], shape: Sequence[int]) -> _Box:
    return tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))


def _pieces(
    array: jax.Array, wanted: _Box, device: Any
) -> tuple[tuple[tuple[int, ...], ...], list[jax.Array]]:
    """Return offsets and values of pieces that fill a box; pieces on `device` come first."""
    found: dict[_Box, jax.Array] = {}
    for shard in sorted(array.addressable_shards, key=lambda s: s.device != device):
        own = _box(shard.index, array.shape)
        shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(own, wanted, strict=True))
        if shared in found or any(start >= end for start, end in shared):
            continue
        starts = [a - b for (a, _), (b, _) in zip(shared, own, strict=True)]
        ends = [a - b for (_, a), (b, _) in zip(shared, own, strict=True)]
        found[shared] = shard.data if shared == own else jax.lax.slice(shard.data, starts, ends)
    if sum(map(_volume, found)) != _volume(wanted):
        raise ValueError(
            f"array of shape {list(array.shape)} with sharding {array.sharding}: this process does "
            "not hold all parts that its searchers need. Use a sharding that gives each process a "
            "whole copy (Placement.publication_mesh)"
        )
    first = [start for start, _ in wanted]
    offsets = tuple(
        tuple(start - own for (start, _), own in zip(box, first, strict=True)) for box in found
    )
    return offsets, list(found.values())


def _volume(box: _Box) -> int:
    return math.prod(end - start for start, end in box)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _join(
    pieces: list[jax.Array], offsets: tuple[tuple[int, ...], ...], shape: tuple[int, ...]
) -> jax.Array:
    out = jnp.zeros(shape, pieces[0].dtype)
    for piece, offset in zip(pieces, offsets, strict=True):
        out = jax.lax.dynamic_update_slice(out, piece, offset)
    return out


def partition_spec(
    axes: Sequence[str | None],
    shape: Sequence[int],
    mesh: Mesh,
    rules: Mapping[str, Rule] = AXIS_RULES,
) -> PartitionSpec:
    """Return the partition of one array over a mesh.

    Args:
        axes: logical name of each axis; None: never divided.
        shape: shape of the array.
        mesh: rules for absent mesh axes have no effect.

    Raises:
        ValueError: two axes of the array map to one mesh axis, or a size does not divide.
    """
    sizes = {axis: n for axis, n in zip(axes, shape, strict=True) if axis and axis in rules}
    divides = {axis: rules[axis].axes_of(mesh) for axis in sizes}
    for axis, size in sizes.items():
        if (other := rules[axis].instead_of) in divides:
            names = divides[axis] + divides[other]
            if size % math.prod(mesh.shape[name] for name in names) == 0:
                divides |= {axis: names, other: ()}
    spec: list[str | tuple[str, ...] | None] = []
    for axis, size in zip(axes, shape, strict=True):
        names = divides.get(axis, ()) if axis else ()
        if axis is None or not names:
            spec.append(None)
            continue
        parts = math.prod(mesh.shape[name] for name in names)
        if size % parts and not rules[axis].may_replicate:
            possible = [n for n in range(1, size + 1) if size % n == 0 and n <= 256]
            raise ValueError(
                f"axis {axis!r} of size {size} cannot be divided over {parts} devices of the mesh "
                f"axis {' x '.join(map(repr, names))}. Set that axis to one of {possible}"
            )
        entry = names[0] if len(names) == 1 else names
        if entry in spec:
            raise ValueError(
                f"axes {tuple(axes)}: the mesh axis {names[0]!r} would divide both "
                f"{axes[spec.index(entry)]!r} and {axis!r}. Change one of these rules "
                "in AXIS_RULES"
            )
        spec.append(None if size % parts else entry)
    return PartitionSpec(*spec)


def tree_shardings(axes: Any, shapes: Any, mesh: Mesh) -> Any:
    """Return a NamedSharding for each array of a tree.

    Args:
        axes: the tree with a tuple of logical axis names for each array, as from
            `transformer.param_axes`.
    """
    return jax.tree.map(
        lambda array, names: NamedSharding(mesh, partition_spec(names, array.shape, mesh)),
        shapes,
        axes,
    )


def shardings_like(tree: Any, params: Any, param_shardings: Any, mesh: Mesh) -> Any:
    """Return shardings of a tree that holds parameters, arrays that belong to them, and others.

    An array belongs to the parameter whose path is a suffix of its own path: copies, gradients,
    moments. With the parameter's shape it gets the parameter's sharding; with one axis less (the
    factors of Adafactor), the sharding of the remaining axes. All others are replicated.

    Args:
        tree: leaves with shapes, such as a train state.
    """
    shapes = {path: x.shape for path, x in _by_path(params).items()}
    specs = {path: x.spec for path, x in _by_path(param_shardings).items()}

    def sharding(path: Any, x: Any) -> NamedSharding:
        names = _names(path)
        for start in range(len(names)):
            owner = names[start:]
            if owner in shapes:
                spec = _spec_like(x.shape, shapes[owner], specs[owner])
                return NamedSharding(mesh, spec)
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(sharding, tree)


def _spec_like(
    shape: tuple[int, ...], owner: tuple[int, ...], spec: PartitionSpec
) -> PartitionSpec:
    full = (*spec, *[None] * (len(owner) - len(spec)))
    if shape == owner:
        return PartitionSpec(*full)
    for axis in range(len(owner)):
        if shape == owner[:axis] + owner[axis + 1 :]:
            return PartitionSpec(*full[:axis], *full[axis + 1 :])
    return PartitionSpec()


def _by_path(tree: Any) -> dict[tuple[str, ...], Any]:
    return {_names(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def _names(path: Any) -> tuple[str, ...]:
    """Return the keys of a path in a tree as texts; keys, indices and attributes look the same."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
