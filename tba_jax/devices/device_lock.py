# SPDX-License-Identifier: Apache-2.0
"""Device lock: serialises launches of multi-device programs by several threads.

While a multi-device program runs, each of its devices waits for the other ones. If two threads
launch such programs on common devices, devices may receive the programs in different orders and
deadlock. Invariant: of two multi-device programs with a common device, one has ended before the
other is launched (tests/devices/test_device_lock.py).
"""

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

Program = Callable[..., Any]


class DeviceLockError(RuntimeError):
    """A thread waited too long for the device lock; the message names the holder."""


class _Entry(NamedTuple):
    devices: frozenset[Any]
    program: str
    thread: str
    start_s: float


class DeviceLock:
    """Lock of sets of devices; threads get it in the order of their requests.

    Threads with disjoint devices do not wait for one another. A thread holds the lock until the
    results of its program are ready. Without this wait, programs on CPU could deadlock, because the
    runtime may start programs in another order than the threads launched them. The first call of a
    program also compiles it while holding the lock.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._queue: list[_Entry] = []  # in order of arrival; includes holders
        self._changed = threading.Condition()

    def locked(self, program: Program, devices: Iterable[Any]) -> Program:
        """Return a function that launches a program on these devices while it holds the lock.

        Its arguments and results are those of the program; the results are ready when it returns.
        A program must not launch another locked program. An exception releases the lock.

        Raises (when the program is called):
            DeviceLockError: other threads held the devices for longer than `timeout_s`.
        """
        needed, name = frozenset(devices), getattr(program, "__name__", "unnamed")

        @functools.wraps(program)
        def launch(*args: Any, **kwargs: Any) -> Any:
            entry = _Entry(needed, name, threading.current_thread().name, time.monotonic())
            with self._changed:
                self._queue.append(entry)
            try:
                self._wait(entry)
                return jax.block_until_ready(program(*args, **kwargs))
            finally:
                with self._changed:
                    self._queue.remove(entry)
                    self._changed.notify_all()

        return launch

    def _wait(self, entry: _Entry) -> None:
        def holder() -> _Entry | None:
            before = itertools.takewhile(lambda other: other is not entry, self._queue)
            return next((other for other in before if other.devices & entry.devices), None)

        with self._changed:
            self._changed.wait_for(lambda: holder() is None, self._timeout_s)
            if (other := holder()) is None:
                return
        ids = ", ".join(sorted(str(d.id) for d in entry.devices & other.devices))
        raise DeviceLockError(
            f"thread {entry.thread} waited {self._timeout_s:.0f} s to launch the program "
            f"{entry.program!r} on devices {ids}. Thread {other.thread} requested them for "
            f"{other.program!r} {time.monotonic() - other.start_s:.0f} s ago: the program hangs or "
            "is still being compiled. Run the same command again to continue from the newest "
            "checkpoint; if compilation takes that long, add a larger --config.log.watchdog_s"
        )


def device_lock_for(meshes: Sequence[Mesh], *, timeout_s: float) -> DeviceLock | None:
    """Return a lock for threads that launch programs on these meshes; None if none is necessary.

    A lock is necessary if two meshes of several devices have a device in common.

    Args:
        meshes: mesh of each thread that launches programs; equal meshes count separately.
    """
    several = [frozenset(mesh.devices.flat) for mesh in meshes if mesh.size > 1]
    meet = any(a & b for a, b in itertools.combinations(several, 2))
    return DeviceLock(timeout_s) if meet else None
