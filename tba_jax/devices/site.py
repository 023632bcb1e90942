# SPDX-License-Identifier: Apache-2.0
"""Sites: the devices of each part of a run, and the lock under which programs are launched there.

While a multi-device program runs, each of its devices waits for the other ones. If two threads
launch such programs on common devices, devices may receive the programs in different orders and
deadlock. Invariant: of two multi-device programs with a common device, one has ended before the
other is launched (tests/devices/test_site.py).
"""

import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from tba_jax.devices.placement import MESH_AXES
from tba_jax.devices.platform import Platform, platform_of

Program = Callable[..., Any]


class DeviceLockError(RuntimeError):
    """A thread waited too long for the device lock."""


class DeviceLock:
    """Lock of sets of devices; threads with common devices get it in the order of their requests.

    A thread holds the lock until the results of its program are ready. Without this wait, programs
    on CPU could deadlock, because the runtime may start them in another order than the threads.
    `timeout_s` limits the wait for each earlier program; `wait_s` sums the waits of all threads.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self.wait_s = timeout_s, 0.0
        self._lock = threading.Lock()
        self._queue: dict[threading.Event, frozenset[Any]] = {}  # by arrival; includes holders

    def locked(self, program: Program, devices: Iterable[Any]) -> Program:
        """Return a function that launches a program and holds the lock until its results are ready.

        A program must not launch another locked program.

        Raises:
            DeviceLockError: an earlier program did not end in time.
        """
        needed = frozenset(devices)

        @functools.wraps(program)
        def launch(*args: Any, **kwargs: Any) -> Any:
            ended = threading.Event()
            with self._lock:
                earlier = [event for event, held in self._queue.items() if held & needed]
                self._queue[ended] = needed
            try:
                start = time.monotonic()
                for event in earlier:
                    if not event.wait(self._timeout_s):
                        raise DeviceLockError(
                            f"a thread waited {self._timeout_s:.0f} s for its turn on the devices "
                            f"{sorted(d.id for d in needed)}: the program before it hangs or still "
                            "compiles. Run the same command again; if compilation takes that "
                            "long, with a larger --config.log.watchdog_s"
                        )
                self.wait_s += time.monotonic() - start
                return jax.block_until_ready(program(*args, **kwargs))
            finally:
                with self._lock:
                    del self._queue[ended]
                ended.set()

        return launch


def device_lock_for(meshes: Sequence[Mesh], timeout_s: float) -> DeviceLock | None:
    """Return a lock if two of the meshes, one a thread, have several devices and share one."""
    several = [frozenset(mesh.devices.flat) for mesh in meshes if mesh.size > 1]
    meet = any(a & b for a, b in itertools.combinations(several, 2))
    return DeviceLock(timeout_s) if meet else None


@dataclasses.dataclass(frozen=True)
class Site:
    """Devices and their lock; hashable. A program made for a site serves every equal site.

    Attributes:
        mesh: the devices. An empty mesh stands for the single device of a program's arguments.
        lock: None: threads that launch programs on the devices cannot block one another.
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
        """Return a function that launches a program while it holds the device lock, if any."""
        if self.lock is None or not self.is_divided:
            return program
        return self.lock.locked(program, self.mesh.devices.flat)


def any_device(platform: Platform = "any") -> Site:
    """Return a site of any single device of a platform, without a lock."""
    return Site(Mesh(np.empty((), dtype=object), ()), any_of=platform)


ANY_DEVICE = any_device()


def reading_mesh(hidden_size: int, devices: Sequence[Any]) -> Mesh:
    """Return a mesh for reading a model, of as many devices as divide its hidden size evenly."""
    num = max(n for n in range(1, len(devices) + 1) if hidden_size % n == 0)
    return Mesh(np.array(devices[:num]).reshape(1, num, 1), MESH_AXES)


class Sites(NamedTuple):
    """Meshes and device locks of the parts of a run, as one process sees them.

    Attributes:
        trainer: the trainer's mesh has the axes MESH_AXES. On a host without trainer devices, this
            is the site of the first searcher of the host, which reads weights from storage.
        publication: site whose mesh has the weights after the publish program.
        searchers: site of each searcher of this process; equal for searchers that share devices.
        first_searcher: ID of the first searcher of this process.
        num_searchers: number of searchers of the run.
    """

    trainer: Site
    publication: Site
    searchers: tuple[Site, ...]
    first_searcher: int = 0
    num_searchers: int = 1

    def reading(self, hidden_size: int) -> Site:
        """Return a site for loading a model, with devices of this process only."""
        return Site(reading_mesh(hidden_size, self.trainer.mesh.local_devices), self.trainer.lock)
