# SPDX-License-Identifier: Apache-2.0
"""Protection of a run against signals and closed output streams in the middle of a step.

A signal sets a flag that drivers check between steps. Writes to a closed pipe or terminal are
dropped.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

# Signals by which users, terminals and batch systems end a process. Those of timers belong to
# libraries: a timer of libtpu sends SIGPROF several times a second, and libtpu ignores it without
# Python's knowledge. After a handler of ours, Python would restore the default action: the end.
ENDING = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU")
    if hasattr(signal, name)  # some exist on Unix only
)
# These signals are handled even if they are ignored at the start: a shell without job control
# starts `COMMAND &` with SIGINT ignored.
_ALWAYS = (signal.SIGINT, signal.SIGTERM)


def not_ignored(numbers: Sequence[signal.Signals] = ENDING) -> list[signal.Signals]:
    """Return the signals to handle: SIGINT, SIGTERM, and others that have the default action.

    A signal that is ignored, as SIGHUP under `nohup`, stays ignored.
    """
    return [n for n in numbers if n in _ALWAYS or signal.getsignal(n) == signal.SIG_DFL]


class Interruption:
    """Flag that an arriving signal sets; the drivers check it between steps.

    Handlers of ignored signals stay unchanged (`not_ignored`). In a pod, JAX's preemption service
    handles SIGTERM after the processes have connected.

    Args:
        second: handler of a second signal of the same kind; the default ends the process. A second
            SIGHUP is always ignored, because a closing terminal and its shell both send one.
    """

    def __init__(
        self,
        numbers: Sequence[signal.Signals] = ENDING,
        second: Any = signal.SIG_DFL,
    ) -> None:
        self.signal_number: int | None = None
        self._second = second
        self._previous = {
            number: signal.signal(number, self._handle) for number in not_ignored(numbers)
        }

    def _handle(self, number: int, frame: Any) -> None:
        del frame
        self.signal_number = number
        is_repeated = number == getattr(signal, "SIGHUP", None)
        signal.signal(number, signal.SIG_IGN if is_repeated else self._second)

    def __call__(self) -> bool:
        return self.signal_number is not None

    def close(self) -> None:
        """Restore the earlier signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)


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
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            if self._stream is sys.__stdout__:
                print(f"the output cannot be written ({error.strerror})", file=sys.stderr)
        return len(text)


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
