# SPDX-License-Identifier: Apache-2.0
"""Worker: the one way this project runs a thread.

A Worker is named after its role, owns a loop over somebody's `step()`, shares one stop event with
its siblings, and carries the first exception to the thread that calls `check()` or `close()`.
Threads are never killed from outside.
"""

import faulthandler
import sys
import threading
import time
from collections.abc import Callable


class WorkerError(RuntimeError):
    """A worker thread failed; the original exception is its `__cause__`."""


class StopFlag:
    """One stop event shared by every thread of a run, with the first failure that set it."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._failure: tuple[str, BaseException] | None = None

    def set(self) -> None:
        """Ask every worker to stop after its current step."""
        self._event.set()

    def is_set(self) -> bool:
        """Whether stopping was asked for."""
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Sleep up to `timeout_s` seconds; True at once when stopping is asked for."""
        return self._event.wait(timeout_s)

    def fail(self, name: str, error: BaseException) -> None:
        """Record the first failure and stop everyone."""
        with self._lock:
            if self._failure is None:
                self._failure = (name, error)
        self._event.set()

    def check(self) -> None:
        """Re-raise the first recorded failure.

        Raises:
            WorkerError: naming the worker; its `__cause__` has the original traceback.
        """
        with self._lock:
            failure = self._failure
        if failure is not None:
            name, error = failure
            message = f"{name} failed: {type(error).__name__}: {error}"
            raise WorkerError(message) from error


class Worker:
    """A named daemon thread that calls `step()` until the shared flag is set.

    Args:
        name: the role, e.g. "searcher-0"; the thread carries it.
        step: one unit of work. It returns True when it did something and False when there was
            nothing to do; the worker then sleeps `idle_s` (or until stop). It must itself use
            timeouts on anything that blocks.
        stop: the flag shared by the run.
        idle_s: seconds to sleep after a step that had nothing to do.

    Attributes:
        steps: completed steps.
        idle_total_s: seconds slept because there was nothing to do.
    """

    def __init__(
        self, name: str, step: Callable[[], bool], stop: StopFlag, *, idle_s: float = 0.01
    ) -> None:
        self.name = name
        self.steps = 0
        self.idle_total_s = 0.0
        self._step = step
        self._stop = stop
        self._idle_s = idle_s
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> "Worker":
        """Start the thread; returns self."""
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if self._step():
                    self.steps += 1
                else:
                    start = time.perf_counter()
                    self._stop.wait(self._idle_s)
                    self.idle_total_s += time.perf_counter() - start
        except BaseException as error:  # the one broad except: it carries, never swallows
            self._stop.fail(self.name, error)

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` and raise nothing: for a run that has failed already.

        A worker that was never started has ended.
        """
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def close(self, timeout_s: float = 60.0) -> None:
        """Set stop, wait for the thread, then re-raise the first failure of the run.

        Raises:
            TimeoutError: when the current step does not end within `timeout_s`; every thread's
                stack is written to standard error first.
            WorkerError: when this or a sibling worker failed.
        """
        self._stop.set()
        self.join(timeout_s)
        if self._thread.is_alive():
            faulthandler.dump_traceback(file=sys.stderr)
            raise TimeoutError(
                f"worker {self.name} did not stop within {timeout_s:.0f} s; the stacks of all "
                "threads are on standard error"
            )
        self._stop.check()
