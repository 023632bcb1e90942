# SPDX-License-Identifier: Apache-2.0
"""Limit the output of reward processes and of the processes that they start.

Standard output and standard error of these processes are named pipes. A thread of the parent
process copies from the pipes to the parent's streams, at most WINDOW_BYTES in each WINDOW_S and at
most TOTAL_BYTES in all, and prints how many bytes it dropped. A thread of the reward process could
not do this: C code may print while it holds the interpreter lock, and the last lines of a process
that crashes would be lost.
"""

import contextlib
import os
import select
import threading
import time
from pathlib import Path

WINDOW_S = 10.0
WINDOW_BYTES = 2**17
TOTAL_BYTES = 2**26
_READ_BYTES = 2**16
_POLL_S = 0.2
# Pause between two reads of a stream whose output is dropped; it limits the parent's processor
# time.
_PAUSE_S = 0.001
_STREAMS = {"stdout": 1, "stderr": 2}  # file descriptors


class Limiter:
    """Limiter of one output stream.

    Attributes:
        num_dropped: total number of dropped bytes.
    """

    def __init__(self) -> None:
        self.num_dropped = 0
        self._num_reported = 0  # dropped bytes that were reported
        self._total = 0  # bytes shown
        self._window, self._shown = -1, 0  # number of the current window, bytes shown in it

    def pass_on(self, data: bytes, now_s: float) -> bytes:
        """Return the bytes of `data` to show; b"" if all are dropped.

        A line about dropped bytes is added once per window.

        Args:
            now_s: monotonic time in seconds.
        """
        report = b""
        if (window := int(now_s // WINDOW_S)) != self._window:
            self._window, self._shown = window, 0
            report = self.report()
        room = min(WINDOW_BYTES - self._shown, TOTAL_BYTES - self._total)
        shown = data[:room]
        self._shown += len(shown)
        self._total += len(shown)
        self.num_dropped += len(data) - len(shown)
        return report + shown

    def report(self) -> bytes:
        """Return a line about the bytes dropped since the last report; b"" if there are none."""
        dropped = self.num_dropped - self._num_reported
        self._num_reported = self.num_dropped
        if not dropped:
            return b""
        return (
            f"\nreward functions: {dropped:,} bytes of their output were dropped; at most "
            f"{WINDOW_BYTES:,} bytes are shown in {WINDOW_S:.0f} s, and {TOTAL_BYTES:,} in all\n"
        ).encode()


class Output:
    """Pipes of a pool's processes, and the parent's thread that copies from them."""

    def __init__(self, folder: str) -> None:
        self._limiters = {stream: Limiter() for stream in _STREAMS.values()}
        self._pipes: dict[int, int] = {}  # reading end -> stream of this process
        self._writers: list[int] = []  # keep the pipes open while no process has them open
        self._closed = threading.Event()
        if not hasattr(os, "mkfifo"):  # Windows
            return
        for name, stream in _STREAMS.items():
            path = os.path.join(folder, name)
            os.mkfifo(path, 0o600)
            self._pipes[os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)] = stream
            self._writers.append(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
        self._thread = threading.Thread(target=self._copy, name="reward-output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Copy the remaining contents of the pipes, report dropped bytes, and stop."""
        if self._pipes and not self._closed.is_set():
            self._closed.set()
            self._thread.join(5.0)  # times out only if this process's own output is blocked

    def _copy(self) -> None:
        poll = select.poll()
        for pipe in self._pipes:
            poll.register(pipe, select.POLLIN)
        try:
            while True:
                is_last = self._closed.is_set()
                ready = {pipe for pipe, _ in poll.poll(_POLL_S * 1000)}
                is_dropping = False
                for pipe, stream in self._pipes.items():
                    limiter = self._limiters[stream]
                    data = os.read(pipe, _READ_BYTES) if pipe in ready else b""
                    dropped = limiter.num_dropped
                    _write(stream, limiter.pass_on(data, time.monotonic()))
                    is_dropping |= limiter.num_dropped > dropped
                if is_last and (is_dropping or not ready):
                    break
                if is_dropping:
                    time.sleep(_PAUSE_S)
            for stream, limiter in self._limiters.items():
                _write(stream, limiter.report())
        finally:
            for descriptor in (*self._pipes, *self._writers):
                os.close(descriptor)


def _write(stream: int, data: bytes) -> None:
    # The parent's own messages report that the output is closed or full. Keep reading the pipes,
    # because the reward processes would block otherwise.
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(stream, data) :]


def redirect(folder: str) -> None:
    """Redirect this reward process's standard output and error to the pipes in `folder`."""
    for name, stream in _STREAMS.items():
        # ENOENT or ENXIO means that the parent has closed the pool: this process ends soon.
        with contextlib.suppress(OSError):
            pipe = os.open(Path(folder) / name, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.set_blocking(pipe, True)
            os.dup2(pipe, stream)
            os.close(pipe)
