# SPDX-License-Identifier: Apache-2.0
"""Ahead: programs compiled on a thread of their own, beside whatever else takes time at the start.

JAX keeps what it has lowered and compiled per program and shapes, whoever asked for it: a program
that is compiled here is found by its first call, on another thread, and nothing of that call
changes. This module does not know which programs there are. Invariant: a program is not compiled
twice at a time, as long as who calls it first waits for it here; and a failure is raised there.
"""

import collections
import functools
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax

from tba_jax.devices.worker import StopFlag, Worker

POLL_S = 0.05
THREAD = "compiler"


class Ahead:
    """Compiles programs in order; use `start`.

    Args:
        jobs: by name, what lowers a program for the shapes it will be called with.
    """

    def __init__(self, jobs: Mapping[Hashable, Callable[[], jax.stages.Lowered]]) -> None:
        self._jobs = collections.deque(jobs.items())
        self._done = {name: threading.Event() for name in jobs}
        self._stop = StopFlag()
        self._worker = Worker(THREAD, self._step, self._stop)

    def start(self) -> "Ahead":
        """Begin; returns self. The thread ends when all are compiled."""
        if self._jobs:
            self._worker.start()
        return self

    def _step(self) -> bool:
        name, lower = self._jobs.popleft()
        lower().compile()
        self._done[name].set()
        if not self._jobs:
            self._stop.set()
        return True

    def wait(self, name: Hashable) -> None:
        """Return when this program is compiled, at once where it is not among the jobs.

        Raises:
            WorkerError: this program, or one before it, cannot be compiled.
        """
        self._stop.check()
        done = self._done.get(name)
        while done is not None and not done.wait(POLL_S):
            self._stop.check()
            if self._stop.is_set():
                return  # closed: whoever calls it now compiles it

    def after(self, name: Hashable, program: Callable[..., Any]) -> Callable[..., Any]:
        """The program, whose calls wait for it to be compiled."""

        @functools.wraps(program)
        def call(*args: Any) -> Any:
            self.wait(name)
            return program(*args)

        return call

    def close(self, timeout_s: float) -> None:
        """Begin no other program, and wait for the one under way at most this long."""
        self._stop.set()
        if self._worker.is_alive():
            self._worker.join(timeout_s)
