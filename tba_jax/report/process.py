# SPDX-License-Identifier: Apache-2.0
"""Process that writes the report of a run again, while the run continues."""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_COMMAND = (sys.executable, "-m", "tba_jax.report")
_PERIOD_S = 300.0  # between two rewrites


class ReportProcess:
    """Starter of `python -m tba_jax.report`, which writes the report of the run, at intervals."""

    def __init__(self, workdir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._workdir, self._clock = workdir, clock
        self._next_s = clock() + _PERIOD_S
        self._process: subprocess.Popen[bytes] | None = None

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Start a rewrite of report.html if one is due; called after a line of metrics."""
        del step, values
        if self._process is not None and self._process.poll() is None:
            self._next_s = self._clock() + _PERIOD_S
        elif self._clock() >= self._next_s:
            self._next_s = self._clock() + _PERIOD_S
            self._process = subprocess.Popen(
                [*_COMMAND, str(self._workdir), "--with_parent"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    def close(self) -> None:
        """End a rewrite in progress."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
