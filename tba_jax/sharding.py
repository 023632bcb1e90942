# SPDX-License-Identifier: Apache-2.0
"""Where the parts run: the trainer's mesh and the searchers' devices.

It knows devices and array axes, not what is computed. Trainer state is replicated over the mesh
axis `data` and batches are split along prompts, so that no group is ever divided. Parameters of a
tensor-parallel group are divided by one table, from the logical axes of a model to mesh axes; the
invariant owned here is that no mesh axis divides two axes of one array.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding


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
"""Logical axis -> mesh axis; an axis that is not here (layers, head_dim) is never divided."""


class Placement(NamedTuple):
    """Devices of a run.

    Attributes:
        trainer_mesh: mesh with the axis `data`.
        searcher_devices: one device per searcher of this process.
    """

    trainer_mesh: Mesh
    searcher_devices: tuple[Any, ...]

    @property
    def replicated_sharding(self) -> NamedSharding:
        """Train state: a full copy on each trainer device."""
        return NamedSharding(self.trainer_mesh, PartitionSpec())

    @property
    def batch_sharding(self) -> NamedSharding:
        """Batches: axis p over `data`."""
        return NamedSharding(self.trainer_mesh, PartitionSpec("data"))

    def publication_shardings(self) -> list[SingleDeviceSharding | None]:
        """Where each searcher wants its weights; None: the publish program's output serves."""
        local = self.trainer_mesh.local_devices
        if len(local) == 1:
            trainer_device = local[0]
            return [
                None if device == trainer_device else SingleDeviceSharding(device)
                for device in self.searcher_devices
            ]
        return [SingleDeviceSharding(device) for device in self.searcher_devices]


def host_share(total: int, num_hosts: int) -> int:
    """What one host has of something that the hosts of a pod divide: at least one."""
    return max(1, total // num_hosts)


def host_part(tree: Any) -> Any:
    """This host's copy of a tree that is replicated over a mesh of several hosts: no transfer."""
    return jax.tree.map(lambda x: x.addressable_data(0), tree)


def to_mesh(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    """A copy of a tree that every host holds whole, placed on a mesh over several hosts."""

    def move(x: Any) -> Any:
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(move, tree)


def place_pod(
    devices: Sequence[Any],
    *,
    process_id: int,
    num_trainer_devices: int,
    num_searchers: int,
) -> Placement:
    """Split the devices of all hosts: on each, some train and the others search.

    The trainer's mesh has the first devices of every host, host after host, so that a host's rows
    of a batch are together. Where no device is left searchers share the trainer's.

    Args:
        devices: of all processes.
        process_id: whose searchers are placed.
        num_trainer_devices, num_searchers: over all hosts; each has an equal share, at least one.
    """
    hosts: dict[int, list[Any]] = {}
    for device in devices:
        hosts.setdefault(device.process_index, []).append(device)
    mine = host_share(num_trainer_devices, len(hosts))
    trainer = [device for host in sorted(hosts) for device in hosts[host][:mine]]
    pool = hosts[process_id][mine:] or hosts[process_id][:mine]
    searchers = range(host_share(num_searchers, len(hosts)))
    return Placement(
        Mesh(np.array(trainer), ("data",)), tuple(pool[s % len(pool)] for s in searchers)
    )


def place(
    placement: str,
    devices: Sequence[Any],
    *,
    num_trainer_devices: int,
    num_searchers: int,
) -> Placement:
    """Split this process's devices.

    shared: trainer on the first `num_trainer_devices`, searchers take turns on the same ones.
    split: searchers get one device each of those that are left.
    auto: split where there are devices for all of them, else shared.
    """
    if placement == "auto":
        fits = len(devices) >= num_trainer_devices + num_searchers
        placement = "split" if fits else "shared"
    trainer = list(devices[:num_trainer_devices])
    pool = trainer if placement == "shared" else list(devices[num_trainer_devices:])
    searchers = tuple(pool[s % len(pool)] for s in range(num_searchers))
    return Placement(Mesh(np.array(trainer), ("data",)), searchers)


def copy_to(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    """A copy of a tree of arrays under `sharding`; never an alias, whatever the devices."""
    return jax.tree.map(lambda x: jax.device_put(x, sharding, may_alias=False), tree)


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
