# SPDX-License-Identifier: Apache-2.0
"""Where the parts run: the trainer's mesh, the searchers' groups, and how arrays are divided.

It knows devices and array axes, not what is computed. Arrays are divided by one table, from the
logical axes of a model to mesh axes; the rows of a batch by prompts, so that no group is ever
divided. The invariants owned here: no mesh axis divides two axes of one array, and weights pass
from one set of devices to another piece by piece, never through the host and never whole through a
device that keeps a part.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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


class MeshShape(NamedTuple):
    """Sizes of the trainer's mesh."""

    data: int = 1
    fsdp: int = 1
    model: int = 1

    @property
    def size(self) -> int:
        """Trainer devices."""
        return self.data * self.fsdp * self.model


class Placement(NamedTuple):
    """Devices of a run, as one process sees them.

    Attributes:
        trainer_mesh: with the axes MESH_AXES; devices of one process lie side by side.
        searcher_meshes: one for each searcher of this process, with the axis `model`; searchers
            that take turns on the same devices have equal meshes.
    """

    trainer_mesh: Mesh
    searcher_meshes: tuple[Mesh, ...]

    @property
    def replicated_sharding(self) -> NamedSharding:
        """A full copy on each trainer device: scalars, metrics."""
        return NamedSharding(self.trainer_mesh, PartitionSpec())

    @property
    def batch_sharding(self) -> NamedSharding:
        """Batches: axis p over BATCH_AXES, so that no group is divided."""
        return NamedSharding(self.trainer_mesh, PartitionSpec(BATCH_AXES))

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


class Arrangement(NamedTuple):
    """Which device does what: the decision, without a mesh.

    Attributes:
        trainer: devices of the trainer, those of one process side by side.
        groups: devices of each searcher group of the process asked for.
    """

    trainer: tuple[Any, ...]
    groups: tuple[tuple[Any, ...], ...]


class PlacementError(ValueError):
    """Devices cannot be divided as asked; the message says what was wanted and what to do."""


def arrange(
    placement: str,
    devices: Sequence[Any],
    *,
    num_trainer_devices: int,
    num_searchers: int,
    searcher_devices: int = 1,
    process_index: int = 0,
) -> Arrangement:
    """Divide devices between the trainer and the searchers of one process.

    shared: the trainer on the first devices, groups of searchers take turns on the same ones.
    split: groups get devices of those that are left.
    auto: split where there are devices for all of them, else shared.
    pod: all processes together, as `pod_layout` says. per_host: the trainer has the same number of
        devices of each host, the host's searchers the others. whole_hosts: the trainer has the
        first hosts, searchers the others. interleaved: the trainer has everything, and searchers
        take turns with it on the devices of their host.

    Args:
        placement: one of these.
        devices: of this process; pod: of all processes. Anything with `platform`,
            `device_kind`, `process_index` and `id`.
        num_trainer_devices: all of them together.
        num_searchers: of each process.
        searcher_devices: devices of a group.
        process_index: whose groups to return.

    Raises:
        PlacementError: there are too few devices, or the chips refuse such a division.
    """
    devices = sorted(devices, key=lambda d: (d.process_index, d.id))
    wanted = num_searchers * searcher_devices
    if placement == "auto":
        placement = "split" if len(devices) >= num_trainer_devices + wanted else "shared"
    if placement == "pod":
        layout = pod_layout(devices, num_trainer_devices)
        hosts = _hosts(devices)
        if layout == "per_host":
            share = num_trainer_devices // len(hosts)
            trainer = [d for host in hosts for d in host[:share]]
        else:
            trainer = devices[:num_trainer_devices]
        own = [d for d in devices if d.process_index == process_index]
        taken = set() if layout == "interleaved" else {d.id for d in trainer}
        pool = [d for d in own if d.id not in taken]
    else:
        trainer = devices[:num_trainer_devices]
        pool = trainer if placement == "shared" else devices[num_trainer_devices:]
    if len(trainer) < num_trainer_devices:
        raise PlacementError(
            f"the trainer's mesh wants {num_trainer_devices} devices and there are {len(devices)}; "
            "make mesh.data, mesh.fsdp or mesh.model smaller"
        )
    groups = [
        tuple(pool[i : i + searcher_devices])
        for i in range(0, len(pool) - searcher_devices + 1, searcher_devices)
    ]
    if placement == "split" and len(groups) < num_searchers or (pool and not groups):
        raise PlacementError(
            f"placement={placement} leaves {len(pool)} devices for searchers, and {num_searchers} "
            f"searchers of {searcher_devices} want {wanted}; lower num_searchers or "
            "search.num_devices, or make the trainer's mesh smaller"
        )
    chosen = tuple(groups[s % len(groups)] for s in range(num_searchers)) if groups else ()
    return Arrangement(tuple(trainer), chosen)


def pod_layout(devices: Sequence[Any], num_trainer_devices: int) -> str:
    """How a trainer mesh of this size lies in a pod: per_host, whole_hosts or interleaved.

    What TPU compilers accept was found by compiling with libtpu 0.0.51: some of the chips of
    several hosts on v4 and v5p only; of v5e and v6e whole hosts; of a v5e slice above 16 chips one
    host or all of them. Other chips accept everything.

    Args:
        devices: of all processes.
        num_trainer_devices: data x fsdp x model.

    Raises:
        PlacementError: the division is refused, with sizes that are not.
    """
    hosts = _hosts(devices)
    per_host = len(hosts[0])
    if num_trainer_devices == len(devices):
        return "interleaved"
    kind = getattr(devices[0], "device_kind", "")
    is_tpu = devices[0].platform == "tpu"
    can_share_hosts = not (is_tpu and ("lite" in kind or "v6" in kind or "v5e" in kind))
    if can_share_hosts and num_trainer_devices % len(hosts) == 0:
        return "per_host"
    whole = num_trainer_devices % per_host == 0 and num_trainer_devices < len(devices)
    is_large_v5e = is_tpu and ("v5 lite" in kind or "v5e" in kind) and len(devices) > 16
    if whole and (not is_large_v5e or num_trainer_devices == per_host):
        return "whole_hosts"
    if is_large_v5e:
        sizes = [per_host, len(devices)]
    else:
        sizes = [n for n in range(per_host, len(devices) + 1, per_host)]
        if can_share_hosts:
            sizes = sorted({*sizes, *(i * len(hosts) for i in range(1, per_host))})
    raise PlacementError(
        f"a trainer mesh of {num_trainer_devices} devices cannot lie on {len(hosts)} hosts of "
        f"{per_host} {kind or devices[0].platform} devices; make mesh.data x mesh.fsdp x "
        f"mesh.model one of {sizes}"
    )


def _hosts(devices: Sequence[Any]) -> list[list[Any]]:
    hosts: dict[int, list[Any]] = {}
    for device in devices:
        hosts.setdefault(device.process_index, []).append(device)
    return list(hosts.values())


def place(
    placement: str,
    devices: Sequence[Any],
    *,
    mesh: MeshShape,
    num_searchers: int,
    searcher_devices: int = 1,
    process_index: int = 0,
) -> Placement:
    """`arrange` as meshes.

    Args:
        placement, devices, num_searchers, searcher_devices, process_index: as in `arrange`.
        mesh: shape of the trainer's mesh.

    Raises:
        PlacementError: as in `arrange`.
    """
    trainer, groups = arrange(
        placement,
        devices,
        num_trainer_devices=mesh.size,
        num_searchers=num_searchers,
        searcher_devices=searcher_devices,
        process_index=process_index,
    )
    return Placement(
        Mesh(np.array(trainer).reshape(mesh), MESH_AXES),
        tuple(Mesh(np.array(group), ("model",)) for group in groups),
    )


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
