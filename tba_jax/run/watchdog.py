# SPDX-License-Identifier: Apache-2.0
"""The watchdog of an asynchronous run: where nothing ends any more, the process ends loudly.

It knows neither who gives signs of life nor why they stopped. Invariant: whoever waits for a thread
that is stuck in native code waits no longer than the limit.
"""

import faulthandler
import os
import sys
import time


class Watchdog:
    """Ends the process loudly when no step, round or evaluation ends for `limit_s`."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._last = time.monotonic()

    def kick(self) -> None:
        """A sign of life."""
        self._last = time.monotonic()

    def step(self) -> bool:
        """Look whether there was one; what a worker does."""
        if time.monotonic() - self._last > self._limit_s:
            print(
                f"error: no step, round or evaluation ended for {self._limit_s:.0f} s "
                "(config.log.watchdog_s); the "
                "stacks of all threads follow. The newest checkpoint is intact: run the same "
                "command again to continue from it",
                file=sys.stderr,
                flush=True,
            )
            faulthandler.dump_traceback(file=sys.stderr)
            os._exit(3)  # a thread stuck in native code cannot be stopped in another way
        return False
