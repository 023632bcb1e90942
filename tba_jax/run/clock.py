# SPDX-License-Identifier: Apache-2.0
"""The time of a run, over all processes that carried it on."""

from collections.abc import Callable

from tba_jax.flow.state import PartState


class RunClock:
    """Seconds of running time; resumes add what earlier processes spent.

    Attributes:
        time_to_first_step_s: when the run's first step was done, None before.
    """

    def __init__(self, now: Callable[[], float], start: float) -> None:
        self._now = now
        self._start = start
        self.time_to_first_step_s: float | None = None

    def __call__(self) -> float:
        """Seconds since the run began, without the pauses between processes."""
        return self._now() - self._start

    def set(self, elapsed_s: float) -> None:
        """Another process of the run says that it is so old."""
        self._start = self._now() - elapsed_s

    def note_step(self) -> None:
        """A step is done; the first one's time is kept."""
        if self.time_to_first_step_s is None:
            self.time_to_first_step_s = self()

    def state(self) -> PartState:
        """Seconds so far."""
        times = {"elapsed_s": self(), "time_to_first_step_s": self.time_to_first_step_s}
        return PartState({}, times)

    def restore(self, state: PartState) -> None:
        """Count the time that earlier processes spent."""
        self._start -= state.meta["elapsed_s"]
        self.time_to_first_step_s = state.meta["time_to_first_step_s"]
