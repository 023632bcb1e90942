# SPDX-License-Identifier: Apache-2.0
"""The report of a run while it trains: rewritten, or served, by another process.

Invariant: the run waits for no report, and a report that fails ends no run.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tba_jax.config.schema import ReportSettings

_COMMAND = (sys.executable, "-m", "tba_jax.report")
_REST = 50.0  # the rest after a rewrite, in multiples of its duration: 2 % of a core at most


class ReportProcess:
    """Starts `python -m tba_jax.report` from time to time.

    Args:
        workdir: of the run.
        settings: how often, and whether a page is served.
        note: prints the address of the page.
        clock: seconds that never go backwards.
    """

    def __init__(
        self,
        workdir: Path,
        settings: ReportSettings,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workdir, self._settings, self._clock = workdir, settings, clock
        self._began_s = clock()
        self._next_s = self._began_s + settings.period_s
        self._rewriting: subprocess.Popen[str] | None = None
        self._serving: subprocess.Popen[str] | None = None
        if settings.live:
            self._serving = self._start("--live")
            # A pipe that nobody reads would fill up.
            threading.Thread(target=self._tell, args=(note,), name="live-page", daemon=True).start()

    def _start(self, *options: str) -> "subprocess.Popen[str]":
        own = [f"--figures={self._settings.figures}"] if self._settings.figures else []
        return subprocess.Popen(
            [*_COMMAND, str(self._workdir), "--with_parent", *options, *own],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if options else subprocess.DEVNULL,
            stderr=subprocess.STDOUT if options else subprocess.DEVNULL,
            text=True,
        )

    def _tell(self, note: Callable[[str], None]) -> None:
        assert self._serving is not None and self._serving.stdout is not None
        for number, line in enumerate(self._serving.stdout):
            if number == 0:
                note(f"live page: {line.strip()}")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Rewrite report.html if it is time, after a line of metrics; returns at once."""
        del step, values
        now = self._clock()
        if self._rewriting is not None:
            if self._rewriting.poll() is None:
                return
            self._rewriting = None
            rest = max(self._settings.period_s, _REST * (now - self._began_s))
            self._next_s = self._began_s + rest
        if self._settings.period_s and now >= self._next_s:
            self._began_s = now
            self._rewriting = self._start()

    def close(self) -> None:
        """End both processes."""
        for process in (self._rewriting, self._serving):
            if process is not None:
                process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()
