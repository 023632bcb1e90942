# SPDX-License-Identifier: Apache-2.0
"""Signals as a flag that drivers look at between steps."""

import signal
from typing import Any


class Interruption:
    """Turns SIGINT and SIGTERM into a flag that the drivers look at between steps.

    A second signal of the same kind has its usual effect. In a pod SIGTERM goes to JAX's preemption
    service instead, which takes it over when the processes join.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        del frame
        self.signal_number = number
        signal.signal(number, signal.SIG_DFL)

    def __call__(self) -> bool:
        return self.signal_number is not None
