# SPDX-License-Identifier: Apache-2.0
"""Processes that write and serve the report of a run, while the run continues."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tba_jax.devices.worker import StopFlag, Worker
from tba_jax.report.config import ReportSettings

_COMMAND = (sys.executable, "-m", "tba_jax.report")
_ANNOUNCE_S, _LINE_BYTES = 0.2, 4096
_REST = 50.0  # pause after a rewrite, in multiples of its duration: at most 2 % of a core


class ReportProcess:
    """Starter of `python -m tba_jax.report`, which writes the report of the run, at intervals.

    Args:
        note: prints the address of the page.
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
        self._rewriting: subprocess.Popen[bytes] | None = None
        self._serving: subprocess.Popen[bytes] | None = None
        self._note, self._stop = note, StopFlag()
        self._printed = tempfile.TemporaryFile()  # output of the live page; a pipe would fill up
        if settings.live:
            self._serving = self._start("--live")
        self._announcing = Worker("live-page", self._announce, self._stop, idle_s=_ANNOUNCE_S)
        if settings.live:
            self._announcing.start()

    def _start(self, *options: str) -> "subprocess.Popen[bytes]":
        own = [f"--figures={self._settings.figures}"] if self._settings.figures else []
        output = self._printed if options else subprocess.DEVNULL
        return subprocess.Popen(
            [*_COMMAND, str(self._workdir), "--with_parent", *options, *own],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )

    def _announce(self) -> bool:
        """Print the address of the live page, as soon as the page's process has written it."""
        line, end, _ = os.pread(self._printed.fileno(), _LINE_BYTES, 0).partition(b"\n")
        if end:
            self._note(f"live page: {line.decode(errors='replace').strip()}")
            self._stop.set()
        return False

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Start a rewrite of report.html if one is due; called after a line of metrics."""
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
        """End the processes that write and serve the report."""
        self._announcing.close()
        self._printed.close()
        for process in (self._rewriting, self._serving):
            if process is not None:
                process.kill()
                process.wait()
