# SPDX-License-Identifier: Apache-2.0
"""Worker: a named thread that repeats one step until a stop flag is set.

The workers of a run share the flag, which keeps the first exception of any of them; `check`
raises this exception. Threads are never killed.
"""

import threading
import time
from collections.abc import Callable


class WorkerError(RuntimeError):
    """A worker thread failed; the original exception is its `__cause__`."""


class StopFlag:
    """Stop flag shared by every thread of a run, with the first failure that set it."""

    def __init__(self) -> None:
        self._event, self._failures = threading.Event(), list[tuple[str, BaseException]]()
        self.set, self.is_set, self.wait = self._event.set, self._event.is_set, self._event.wait

    def fail(self, name: str, error: BaseException) -> None:
        """Record a failure and stop all workers."""
        self._failures.append((name, error))
        self._event.set()

    def check(self) -> None:
        """Raise a WorkerError with the first recorded failure as its cause, if there is one."""
        if self._failures:
            name, error = self._failures[0]
            raise WorkerError(f"{name} failed: {type(error).__name__}: {error}") from error


class Worker:
    """A named daemon thread that calls `step()` until the shared flag is set.

    Args:
        name: the role, e.g. "searcher-0"; also the thread's name.
        step: one unit of work; returns False if there was nothing to do. Blocking calls inside it
            need timeouts.
        idle_s: seconds to sleep after a step that had nothing to do.
    """

    def __init__(
        self, name: str, step: Callable[[], bool], stop: StopFlag, *, idle_s: float = 0.01
    ) -> None:
        self.name, self._idle_total_s = name, 0.0
        self._step, self._stop, self._idle_s = step, stop, idle_s
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.is_alive = self._thread.is_alive

    def start(self) -> "Worker":
        """Start the thread; return self."""
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if not self._step():
                    start = time.perf_counter()
                    self._stop.wait(self._idle_s)
                    self._idle_total_s += time.perf_counter() - start
        except BaseException as error:  # broad: every failure is re-raised in the main thread
            self._stop.fail(self.name, error)

    def take_idle_s(self) -> float:
        """Return the seconds slept since the last call because there was nothing to do."""
        slept_s, self._idle_total_s = self._idle_total_s, 0.0
        return slept_s

    def join(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for the thread, if it was started; raise nothing."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
