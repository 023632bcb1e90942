# SPDX-License-Identifier: Apache-2.0
"""Protection of a run against signals and closed output streams in the middle of a step.

A signal sets a flag that drivers check between steps. Writes to a closed pipe or terminal are
dropped.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# Signals by which users, terminals and batch systems end a process. Those of timers belong to
# libraries: a timer of libtpu sends SIGPROF several times a second, and libtpu ignores it without
# Python's knowledge. After a handler of ours, Python would restore the default action: the end.
ENDING = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU),
)


@contextlib.contextmanager
def handling(
    handler: Callable[[int, Any], None], numbers: Sequence[signal.Signals] = ENDING
) -> Iterator[None]:
    """Handle SIGINT, SIGTERM, and other signals that have the default action; then restore.

    A signal that is ignored, as SIGHUP under `nohup`, stays ignored. SIGINT and SIGTERM are handled
    even then: a shell without job control starts `COMMAND &` with SIGINT ignored.
    """
    always = (signal.SIGINT, signal.SIGTERM)
    chosen = [n for n in numbers if n in always or signal.getsignal(n) == signal.SIG_DFL]
    previous = {number: signal.signal(number, handler) for number in chosen}
    try:
        yield
    finally:
        for number, earlier in previous.items():
            signal.signal(number, earlier)


class Interruption:
    """Flag that an arriving signal sets; the drivers check it between steps.

    In a pod, JAX's preemption service handles SIGTERM after the processes have connected.

    Args:
        second: handler of a second signal of the same kind; the default ends the process. A second
            SIGHUP is always ignored, because a closing terminal and its shell both send one.
    """

    def __init__(
        self, numbers: Sequence[signal.Signals] = ENDING, second: Any = signal.SIG_DFL
    ) -> None:
        self.signal_number: int | None = None
        self._second = second
        self._handled = contextlib.ExitStack()
        self._handled.enter_context(handling(self._handle, numbers))

    def _handle(self, number: int, frame: Any) -> None:
        del frame
        self.signal_number = number
        signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else self._second)

    def __call__(self) -> bool:
        return self.signal_number is not None

    def close(self) -> None:
        """Restore the earlier signal handlers."""
        self._handled.close()


class _Output:
    """A stream that drops everything after the first failed write."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError as error:
            # The text that is still in Python's buffer goes to the new target.
            to_null(self._stream)
            if self._stream is sys.__stdout__:
                print(f"the output cannot be written ({error.strerror})", file=sys.stderr)
        return len(text)


def to_null(stream: Any) -> None:
    """Redirect a stream of this process to /dev/null."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


@contextlib.contextmanager
def surviving_closed_outputs() -> Iterator[None]:
    """Drop printed text after standard output or standard error has failed.

    The run continues after `main | head -1`, a killed `tee` or a closed terminal. Streams that
    replace those of the process, as in a notebook, stay unchanged.
    """
    before = sys.stdout, sys.stderr
    try:
        if sys.stdout is not None and sys.stdout is sys.__stdout__:
            sys.stdout = _Output(sys.stdout)
        if sys.stderr is not None and sys.stderr is sys.__stderr__:
            sys.stderr = _Output(sys.stderr)
        yield
    finally:
        sys.stdout, sys.stderr = before
