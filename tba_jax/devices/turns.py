# SPDX-License-Identifier: Apache-2.0
"""Turns on devices: programs of several devices, launched by several threads, one after the other.

A program of several devices waits inside for all of them. Where two threads launch such programs on
common devices, one device may receive them in one order and another in the other, and then both
wait for ever. So the parts of a run that have common devices launch in turn. Its invariant: of two
programs of several devices that have a device in common, one has ended before the other is
launched.
"""

import contextlib
import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

Program = Callable[..., Any]


class TurnError(RuntimeError):
    """A turn did not come in time; the message says who has the devices and what to do."""


@dataclasses.dataclass(eq=False)
class _Turn:
    devices: frozenset[Any]
    program: str
    thread: str
    since: float


class DeviceTurns:
    """Who may use which devices now: threads are served in the order in which they came.

    Threads whose devices are apart do not wait for one another.

    A turn lasts until the program's results are ready, not only until it is launched: that a launch
    is over says nothing about the order of a runtime's own threads, and on CPU programs that were
    not waited for do deadlock. A program's first call compiles in its turn.

    Args:
        timeout_s: longest wait.

    Attributes:
        wait_s: seconds that all threads together have waited.
    """

    def __init__(self, timeout_s: float) -> None:
        self.wait_s = 0.0
        self._timeout_s = timeout_s
        self._line: list[_Turn] = []  # in order of arrival, those whose turn it is among them
        self._changed = threading.Condition()

    def in_turn(self, program: Program, devices: Iterable[Any]) -> Program:
        """A program of these devices, waiting for its turn whenever it is called.

        What it is called with and returns are as without turns, except that results are ready; a
        program that raises gives up its turn.

        Raises (when the program is called):
            TurnError: others had the devices for longer than `timeout_s`.
        """
        needed = frozenset(devices)
        name = getattr(program, "__name__", "unnamed")

        @functools.wraps(program)
        def launch(*args: Any, **kwargs: Any) -> Any:
            with self._turn(needed, name):
                return jax.block_until_ready(program(*args, **kwargs))

        return launch

    @contextlib.contextmanager
    def _turn(self, devices: frozenset[Any], program: str) -> Iterator[None]:
        turn = _Turn(devices, program, threading.current_thread().name, time.monotonic())
        with self._changed:
            self._line.append(turn)
        try:
            self._wait(turn)
            yield
        finally:
            with self._changed:
                self._line.remove(turn)
                self._changed.notify_all()

    def _wait(self, turn: _Turn) -> None:
        with self._changed:
            holder = self._ahead_of(turn)
            assert holder is None or holder.thread != turn.thread, (
                "a turn inside a turn never comes"
            )
            is_free = self._changed.wait_for(lambda: self._ahead_of(turn) is None, self._timeout_s)
            now = time.monotonic()
            self.wait_s += now - turn.since
            holder = self._ahead_of(turn)
            if not is_free and holder is not None:
                ids = ", ".join(sorted({str(d.id) for d in turn.devices & holder.devices}))
                raise TurnError(
                    f"thread {turn.thread} waited {self._timeout_s:.0f} s to launch the program "
                    f"{turn.program!r} on devices {ids}, which {holder.program!r} of thread "
                    f"{holder.thread} has had for {now - holder.since:.0f} s: it hangs, or "
                    "compiles for longer than half of config.log.watchdog_s. Run the same command "
                    "again to continue from the newest checkpoint; where compilation takes so "
                    "long, with a larger --config.log.watchdog_s"
                )
            turn.since = now

    def _ahead_of(self, turn: _Turn) -> _Turn | None:
        """The first in line of those that came before and want a device of this turn."""
        before = itertools.takewhile(lambda other: other is not turn, self._line)
        return next((other for other in before if other.devices & turn.devices), None)


def turns_for(meshes: Sequence[Mesh], *, timeout_s: float) -> DeviceTurns | None:
    """Turns for threads that launch on these meshes; None where they cannot meet.

    They can where two meshes of several devices have a device in common. With None nothing is
    wrapped and nothing waits.

    Args:
        meshes: one for each thread that launches programs of its own; equal ones count apart.
        timeout_s: as in `DeviceTurns`.
    """
    several = [frozenset(mesh.devices.flat) for mesh in meshes if mesh.size > 1]
    meet = any(a & b for a, b in itertools.combinations(several, 2))
    return DeviceTurns(timeout_s) if meet else None
