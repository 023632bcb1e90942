# SPDX-License-Identifier: Apache-2.0
"""A site: the devices that a part of a run has, and whose turn it is to launch programs on them.

Parts get one site in place of a mesh and a way to wait. Equal sites are the same devices under the
same turns, so what was made for one serves the other.
"""

import dataclasses

import numpy as np
from jax.sharding import Mesh

from tba_jax.devices.platform import Platform, platform_of
from tba_jax.devices.turns import DeviceTurns, Program


@dataclasses.dataclass(frozen=True)
class Site:
    """Devices and the turns on them; hashable.

    Attributes:
        mesh: the devices; the empty one: any one device, on which a program's arguments lie.
        turns: of the threads that launch there; None: no two of them can block one another.
        any_of: with an empty mesh, of which platform that one device is.
    """

    mesh: Mesh
    turns: DeviceTurns | None = None
    any_of: Platform = "any"

    @property
    def platform(self) -> Platform:
        """What its programs are made for: who computes attention, which kernels, which flags."""
        return self.any_of if self.mesh.empty else platform_of(self.mesh.devices.flat[0])

    @property
    def is_divided(self) -> bool:
        """Whether programs here are of several devices, which divide their arrays."""
        return self.mesh.size > 1

    @property
    def program_site(self) -> "Site":
        """What its programs are compiled for: those of one device serve any one device."""
        return self if self.is_divided else any_device(self.platform)

    def in_turn(self, program: Program) -> Program:
        """The program, waiting for its turn whenever it is called.

        A program of one device needs none: it waits for no other device. With turns its results are
        ready when it returns; a program that raises gives up its turn.

        Raises (when the program is called):
            TurnError: others had the devices for too long.
        """
        if self.turns is None or not self.is_divided:
            return program
        return self.turns.in_turn(program, self.mesh.devices.flat)


def any_device(platform: Platform = "any") -> Site:
    """Any one device of a platform, where nobody waits."""
    return Site(Mesh(np.empty((), dtype=object), ()), any_of=platform)


ANY_DEVICE = any_device()
"""Any one device of any platform: programs made for it are those that run on all."""
