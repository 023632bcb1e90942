# SPDX-License-Identifier: Apache-2.0
"""Compilation of programs on a background thread, while the run starts.

JAX caches compiled programs by the shapes of their arguments, for all threads. The first call of a
program that was compiled here therefore finds it in the cache. Invariant: a caller that waits here
never compiles a program a second time, and a compilation failure is raised in the caller's thread.
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


class Precompiler:
    """Compiler of programs, in order, on one thread that `start` starts.

    Args:
        jobs: job name -> function that lowers a program for the shapes of its calls.
    """

    def __init__(self, jobs: Mapping[Hashable, Callable[[], jax.stages.Lowered]]) -> None:
        self._jobs = collections.deque(jobs.items())
        self._done = {name: threading.Event() for name in jobs}
        self._stop = StopFlag()
        self._worker = Worker(THREAD, self._step, self._stop)

    def start(self) -> "Precompiler":
        """Start the thread, which ends when all programs are compiled; return self."""
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
        """Wait until this program is compiled; return at once for an unknown name.

        Raises:
            WorkerError: this program, or one before it, cannot be compiled.
        """
        self._stop.check()
        done = self._done.get(name)
        while done is not None and not done.wait(POLL_S):
            self._stop.check()
            if self._stop.is_set():
                return  # after `close`, the caller's first call compiles the program

    def after(self, name: Hashable, program: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that waits until `program` is compiled and then calls it."""

        @functools.wraps(program)
        def call(*args: Any) -> Any:
            self.wait(name)
            return program(*args)

        return call

    def close(self, timeout_s: float) -> None:
        """Start no other compilation; wait at most `timeout_s` for the compilation in progress."""
        self._stop.set()
        if self._worker.is_alive():
            self._worker.join(timeout_s)
