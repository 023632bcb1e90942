# SPDX-License-Identifier: Apache-2.0
"""Where the parts run: the trainer's mesh and the searchers' devices.

It knows devices and array axes, not what is computed. Trainer state is replicated over the mesh
axis `data` and batches are split along prompts, so that no group is ever divided.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding


class Placement(NamedTuple):
    """Devices of a run.

    Attributes:
        trainer_mesh: mesh with the axis `data`.
        searcher_devices: one device per searcher.
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
        if self.trainer_mesh.devices.size == 1:
            trainer_device = self.trainer_mesh.devices.item()
            return [
                None if device == trainer_device else SingleDeviceSharding(device)
                for device in self.searcher_devices
            ]
        return [SingleDeviceSharding(device) for device in self.searcher_devices]


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
