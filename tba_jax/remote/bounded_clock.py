# SPDX-License-Identifier: Apache-2.0
"""BoundedClock: a clock for heartbeat timeouts."""

from collections.abc import Callable


class BoundedClock:
    """Clock in seconds that advances by at most `max_jump_s` between two readings.

    With an ordinary clock, a suspended machine or a changed system time would make every process
    exceed the heartbeat timeout at once.
    """

    def __init__(self, clock: Callable[[], float], max_jump_s: float) -> None:
        self._clock = clock
        self._max_jump_s = max_jump_s
        self._last = clock()
        self._elapsed = 0.0

    def __call__(self) -> float:
        now = self._clock()
        self._elapsed += min(max(0.0, now - self._last), self._max_jump_s)
        self._last = now
        return self._elapsed
