# SPDX-License-Identifier: Apache-2.0
"""Meshes: of the trainer and the searchers, and how arrays are divided over them.

Arrays are divided by one table, from the logical axes of a model to mesh axes; the rows of a batch
over `BATCH_AXES`, whatever group they are of. The invariants owned here: no mesh axis divides two
axes of one array, and weights pass from one set of devices to another piece by piece, never through
the host and never whole through a device that keeps a part.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tba_jax.devices.placement import Asked, arrange

MESH_AXES = ("data", "fsdp", "model")
"""Axes of the trainer's mesh. data: whole copies of the parameters, batches divided; fsdp: batches
and parameters divided, parameters gathered layer by layer; model: every matrix product divided."""

BATCH_AXES = ("data", "fsdp")
"""Mesh axes that divide the rows of a batch."""


class Rule(NamedTuple):
    """Where one logical axis goes.

    Attributes:
        mesh_axis: which mesh axis divides it, where the mesh has one of that name.
        may_replicate: every device keeps all of it when the mesh axis does not divide its size;
            otherwise such a mesh is refused.
    """

    mesh_axis: str
    may_replicate: bool


AXIS_RULES: Mapping[str, Rule] = {
    # Nearly all weights and arithmetic: a mesh that does not divide them gains nothing and says
    # nothing, so it is refused.
    "heads": Rule("model", may_replicate=False),
    "mlp": Rule("model", may_replicate=False),
    "embed": Rule("fsdp", may_replicate=False),
    # Facts of a checkpoint that no choice of mesh can mend: two key/value heads (Qwen2.5-1.5B),
    # 50,257 tokens (GPT-2). Every device then keeps them all.
    "kv_heads": Rule("model", may_replicate=True),
    "vocab": Rule("model", may_replicate=True),
}
"""Logical axis -> mesh axis; an axis that is not here (layers, head_dim, rank) is never divided."""


class Placement(NamedTuple):
    """Devices of a run, as one process sees them.

    Attributes:
        trainer_mesh: with the axes MESH_AXES; devices of one process lie side by side.
        searcher_meshes: one for each searcher of this process, with the axis `model`; searchers
            that take turns on the same devices have equal meshes.
        first_searcher: index of the first of them in the run.
        num_searchers: of the run.
    """

    trainer_mesh: Mesh
    searcher_meshes: tuple[Mesh, ...]
    first_searcher: int = 0
    num_searchers: int = 1

    @property
    def publication_mesh(self) -> Mesh:
        """The trainer's devices as the publish program leaves the weights on them.

        The trainer's own mesh, unless a copy of the parameters spans several processes: then each
        process gets a whole one, divided over as many of its devices as fsdp and model allow,
        because no searcher can read what lies on another host.
        """
        devices = self.trainer_mesh.devices.reshape(-1)
        local = sum(d.process_index == devices[0].process_index for d in devices)
        model = math.gcd(self.trainer_mesh.shape["model"], local)
        fsdp = math.gcd(self.trainer_mesh.shape["fsdp"], local // model)
        return Mesh(devices.reshape(-1, fsdp, model), MESH_AXES)


def placed_shapes(tree: Any, shardings: Any) -> Any:
    """Shapes and dtypes of a tree's arrays, each where its sharding says."""
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree, shardings
    )


def place(
    placement: str, devices: Sequence[Any], asked: Asked, process_index: int = 0
) -> Placement:
    """`placement.arrange` as meshes.

    Args:
        placement, devices, asked, process_index: as in `arrange`.

    Raises:
        PlacementError: as in `arrange`.
    """
    found = arrange(placement, devices, asked, process_index)
    return Placement(
        Mesh(np.array(found.trainer).reshape(found.mesh), MESH_AXES),
        tuple(Mesh(np.array(group), ("model",)) for group in found.groups),
        found.first_searcher,
        found.num_searchers,
    )


def storable(tree: Any) -> Any:
    """The tree as Orbax takes it: among several processes, what one of them has alone as numpy.

    Orbax refuses such arrays of jax there, whoever the processes are that save.

    Args:
        tree: arrays, or anything else that is left as it is.
    """
    if jax.process_count() == 1:
        return tree

    def own(x: Any) -> Any:
        is_own = isinstance(x, jax.Array) and x.is_fully_addressable
        return np.asarray(x) if is_own else x

    return jax.tree.map(own, tree)


def hand_over(tree: Any, shardings: Any) -> Any:
    """A tree of arrays under other shardings, on any devices of this process.

    Every device receives the pieces that it needs from devices that have them, and joins them; an
    array is never whole on the host, nor on a device that keeps only a part. `jax.device_put`
    would take it through the host wherever the two divisions differ. What already lies where it
    is wanted is not copied: the source must not be donated later.

    Args:
        tree: arrays; of one that spans processes, this one must hold what `shardings` want.
        shardings: over devices of this process, a tree of them or one for all arrays.

    Raises:
        ValueError: other processes hold what is wanted.
    """
    if isinstance(shardings, jax.sharding.Sharding):
        return jax.tree.map(lambda x: _hand_over(x, shardings), tree)
    return jax.tree.map(_hand_over, tree, shardings)


_Box = tuple[tuple[int, int], ...]


def _hand_over(array: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    if array.sharding == sharding:
        return array
    boxes = {
        device: _box(index or (), array.shape)
        for device, index in sharding.addressable_devices_indices_map(array.shape).items()
    }
    pieces = {device: _pieces(array, box, device) for device, box in boxes.items()}
    # One call moves everything, so that transfers overlap.
    moved = iter(
        jax.device_put(
            [x for parts in pieces.values() for _, x in parts],
            [device for device, parts in pieces.items() for _ in parts],
        )
    )
    shards = []
    for device, box in boxes.items():
        offsets = tuple(offset for offset, _ in pieces[device])
        arrived = [next(moved) for _ in offsets]
        shape = tuple(end - start for start, end in box)
        shards.append(arrived[0] if len(arrived) == 1 else _join(arrived, offsets, shape))
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def _box(index: tuple[slice, ...], shape: Sequence[int]) -> _Box:
    return tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))


def _pieces(array: jax.Array, wanted: _Box, device: Any) -> list[tuple[tuple[int, ...], jax.Array]]:
    """(offset, values) of the pieces that fill a box, those on `device` first."""
    shards = sorted(array.addressable_shards, key=lambda s: s.device != device)
    found: dict[_Box, jax.Array] = {}
    for shard in shards:
        own = _box(shard.index, array.shape)
        shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(own, wanted, strict=True))
        if shared in found or any(start >= end for start, end in shared):
            continue
        if shared == own:
            found[shared] = shard.data
        else:
            starts = [a - b for (a, _), (b, _) in zip(shared, own, strict=True)]
            ends = [a - b for (_, a), (b, _) in zip(shared, own, strict=True)]
            found[shared] = jax.lax.slice(shard.data, starts, ends)
    if sum(_volume(box) for box in found) != _volume(wanted):
        raise ValueError(
            f"an array of shape {list(array.shape)} is divided over processes as {array.sharding}, "
            "and this one does not hold all that its searchers need; make it with a sharding that "
            "gives each process a whole copy (Placement.publication_mesh)"
        )
    return [
        (tuple(start - first for (start, _), (first, _) in zip(box, wanted, strict=True)), values)
        for box, values in found.items()
    ]


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
    """How one array is divided over a mesh.

    Args:
        axes: logical name of each axis; None for one that is never divided.
        shape: of the array.
        mesh: rules for mesh axes that it does not have do nothing.
        rules: the table.

    Raises:
        ValueError: two axes of the array want one mesh axis, or a size does not divide.
    """
    spec: list[str | None] = []
    for axis, size in zip(axes, shape, strict=True):
        rule = rules.get(axis) if axis else None
        if rule is None or rule.mesh_axis not in mesh.shape:
            spec.append(None)
            continue
        parts = mesh.shape[rule.mesh_axis]
        if size % parts and not rule.may_replicate:
            sizes = [n for n in range(1, size + 1) if size % n == 0 and n <= 256]
            raise ValueError(
                f"axis {axis!r} of size {size} cannot be divided over {parts} devices of the mesh "
                f"axis {rule.mesh_axis!r}; make that axis one of {sizes}"
            )
        if rule.mesh_axis in spec:
            raise ValueError(
                f"an array with the axes {tuple(axes)} would be divided twice over the mesh axis "
                f"{rule.mesh_axis!r}, by {axes[spec.index(rule.mesh_axis)]!r} and {axis!r}; change "
                "the table"
            )
        spec.append(None if size % parts else rule.mesh_axis)
    return PartitionSpec(*spec)


def tree_shardings(
    axes: Any, shapes: Any, mesh: Mesh, rules: Mapping[str, Rule] = AXIS_RULES
) -> Any:
    """A NamedSharding for each array of a tree.

    Args:
        axes: the tree with a tuple of logical axis names for each array, as from
            `transformer.param_axes`.
        shapes: the tree with anything that has a shape for each array.
        mesh: devices.
        rules: the table.

    Raises:
        ValueError: as in `partition_spec`.
    """
    return jax.tree.map(
        lambda array, names: NamedSharding(mesh, partition_spec(names, array.shape, mesh, rules)),
        shapes,
        axes,
    )


def shardings_like(tree: Any, params: Any, param_shardings: Any, mesh: Mesh) -> Any:
    """Shardings of a tree that holds parameters, and arrays that belong to them, among others.

    An array belongs to the parameter whose path its own path ends with: copies, gradients,
    moments. Of the parameter's shape, it lies as the parameter does; of that shape without one
    axis (the factors of Adafactor), as the axes it kept; all others are on every device.

    Args:
        tree: anything with shapes, such as a train state.
        params: shapes of the parameters.
        param_shardings: a NamedSharding for each.
        mesh: of the shardings.
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
    """The keys of a path; positions in tuples and names of attributes count alike."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
