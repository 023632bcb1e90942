# SPDX-License-Identifier: Apache-2.0
"""Signals as a flag that drivers look at between steps."""

import signal
from collections.abc import Sequence
from typing import Any


class Interruption:
    """Turns signals into a flag that the drivers look at between steps.

    In a pod SIGTERM goes to JAX's preemption service instead, which takes it over when the
    processes join.

    Args:
        numbers: the signals.
        second: handler of a second signal of the same kind; by default it has its usual effect.
    """

    def __init__(
        self,
        numbers: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
        second: Any = signal.SIG_DFL,
    ) -> None:
        self.signal_number: int | None = None
        self._second = second
        self._previous = {number: signal.signal(number, self._handle) for number in numbers}

    def _handle(self, number: int, frame: Any) -> None:
        del frame
        self.signal_number = number
        signal.signal(number, self._second)

    def __call__(self) -> bool:
        return self.signal_number is not None

    def close(self) -> None:
        """Give the signals back to who had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
