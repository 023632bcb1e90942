# SPDX-License-Identifier: Apache-2.0
"""Sites: the devices of each part of a run, and the lock under which programs are launched there.

Equal sites have the same devices and lock, so a program made for one serves the other.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from tba_jax.devices.device_lock import DeviceLock, Program
from tba_jax.devices.placement import MESH_AXES
from tba_jax.devices.platform import Platform, platform_of


@dataclasses.dataclass(frozen=True)
class Site:
    """Devices and their lock; hashable.

    Attributes:
        mesh: the devices. An empty mesh stands for the single device of a program's arguments.
        lock: lock of threads that launch programs on the devices; None: the threads cannot block
            one another.
        any_of: platform of the device if the mesh is empty.
    """

    mesh: Mesh
    lock: DeviceLock | None = None
    any_of: Platform = "any"

    @property
    def platform(self) -> Platform:
        """Platform of the devices, which selects kernels and compiler options."""
        return self.any_of if self.mesh.empty else platform_of(self.mesh.devices.flat[0])

    @property
    def is_divided(self) -> bool:
        """Whether programs at this site run on several devices."""
        return self.mesh.size > 1

    @property
    def program_site(self) -> "Site":
        """Site for compiling programs: this site, or with one device, a site of any one device."""
        return self if self.is_divided else any_device(self.platform)

    def locked(self, program: Program) -> Program:
        """Return a function that launches a program while it holds the device lock.

        A program of one device waits for no other device and needs no lock.
        """
        if self.lock is None or not self.is_divided:
            return program
        return self.lock.locked(program, self.mesh.devices.flat)


def any_device(platform: Platform = "any") -> Site:
    """Return a site of any single device of a platform, without a lock."""
    return Site(Mesh(np.empty((), dtype=object), ()), any_of=platform)


ANY_DEVICE = any_device()
"""Any single device of any platform; its programs must run on all."""


def reading_mesh(hidden_size: int, devices: Sequence[Any]) -> Mesh:
    """Return a mesh for reading a model, of as many devices as divide its hidden size evenly."""
    num = max(n for n in range(1, len(devices) + 1) if hidden_size % n == 0)
    return Mesh(np.array(devices[:num]).reshape(1, num, 1), MESH_AXES)


class Sites(NamedTuple):
    """Meshes and device locks of the parts of a run, as one process sees them.

    Attributes:
        trainer: site of the trainer; its mesh has the axes MESH_AXES. On a host without trainer
            devices, the site of the first searcher of the host, which reads weights from storage.
        publication: site whose mesh has the weights after the publish program.
        searchers: site of each searcher of this process; equal for searchers that share devices.
        first_searcher: ID of the first searcher of this process.
        num_searchers: number of searchers of the run.
        trains: this process has devices of the trainer.
    """

    trainer: Site
    publication: Site
    searchers: tuple[Site, ...]
    first_searcher: int = 0
    num_searchers: int = 1
    trains: bool = True

    def reading(self, hidden_size: int) -> Site:
        """Return a site for loading a model, with devices of this process only."""
        devices = self.trainer.mesh.local_devices
        return Site(reading_mesh(hidden_size, devices), self.trainer.lock)
