# SPDX-License-Identifier: Apache-2.0
"""A site: the devices of one part of a run, and the lock under which programs are launched there.

Equal sites have the same devices and lock, so a program made for one serves the other.
"""

import dataclasses

import numpy as np
from jax.sharding import Mesh

from tba_jax.devices.device_lock import DeviceLock, Program
from tba_jax.devices.platform import Platform, platform_of


@dataclasses.dataclass(frozen=True)
class Site:
    """Devices and their lock; hashable.

    Attributes:
        mesh: the devices; an empty mesh: any single device, that of a program's arguments.
        lock: lock of threads that launch programs there; None: they cannot block one another.
        any_of: with an empty mesh, the platform of the device.
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
        """Whether programs here run on several devices."""
        return self.mesh.size > 1

    @property
    def program_site(self) -> "Site":
        """Site that programs are compiled for; a single device stands for any single device."""
        return self if self.is_divided else any_device(self.platform)

    def locked(self, program: Program) -> Program:
        """Return the program with launches under the device lock.

        A program of one device waits for no other device and needs no lock. With the lock, results
        are ready on return; an exception releases the lock.

        Raises (when the program is called):
            DeviceLockError: other threads held the lock for too long.
        """
        if self.lock is None or not self.is_divided:
            return program
        return self.lock.locked(program, self.mesh.devices.flat)


def any_device(platform: Platform = "any") -> Site:
    """Return a site of any single device of a platform, without a lock."""
    return Site(Mesh(np.empty((), dtype=object), ()), any_of=platform)


ANY_DEVICE = any_device()
"""Any single device of any platform; its programs must run on all."""
