# SPDX-License-Identifier: Apache-2.0
"""Errors of a run, and their output at the command-line entry points.

Invariant: a command that fails prints one line; an unexpected error has its traceback before this
line (tests/commands/test_entry_point.py).
"""

import errno
import faulthandler
import os
import sys
import time
import traceback
from pathlib import Path

from tba_jax.devices.worker import WorkerError

_PACKAGE = Path(__file__).parents[1]
# Expected errors of storage and operating system, with what the user can do.
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "Make room"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "Make it writable"),
    **dict.fromkeys((errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO), "Repair the storage"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "Raise the limit of open files (ulimit -n)"),
    errno.ENOTDIR: "Give a folder",
}


class UserError(Exception):
    """An error that the user can fix."""


class RunError(RuntimeError):
    """A run cannot continue; the message says why, and what to do."""


class CheckpointError(RunError):
    """A checkpoint could not be written or read."""


def tell(error: BaseException) -> int:
    """Print an error as one line, an unexpected one with its traceback; return the exit code."""
    whole = error
    while isinstance(error, WorkerError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, OSError) and error.errno in _REMEDIES:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        where = " or ".join(names) or "standard output or a file"
        text = f"{where} cannot be used: {os.strerror(error.errno)}. {_REMEDIES[error.errno]}, "
        text += "then run the same command again"
    elif is_mendable(error):
        text = str(error)
    else:
        traceback.print_exception(whole)
        text = f"unexpected {type(error).__name__}: attach the traceback above to a bug report"
    print(f"error: {text}", file=sys.stderr)
    return 2 if isinstance(error, UserError | ValueError) and is_mendable(error) else 1


def is_mendable(error: BaseException) -> bool:
    """Return whether the message of an error tells the user what to do.

    It does if this package defines the class of the error, or raised a ValueError. A ValueError
    from numpy or jax is a bug of this package.
    """
    frames = traceback.extract_tb(error.__traceback__)
    is_raised_here = bool(frames) and _PACKAGE in Path(frames[-1].filename).parents
    is_own = type(error).__module__.startswith(f"{_PACKAGE.name}.")
    return is_own or (isinstance(error, ValueError) and is_raised_here)


def out_of_memory(error: BaseException | None) -> RunError | None:
    """Return an error with a remedy if device memory ran out, else None."""
    while error is not None and "RESOURCE_EXHAUSTED" not in str(error):
        error = error.__cause__ or error.__context__
    if error is None:
        return None
    return RunError(
        "device memory ran out before the first update "
        f"({str(error).strip().splitlines()[0]}). Lower --config.batch.micro_batch_rows or "
        "--config.search.num_slots; python -m tba_jax.plan shows what a device holds"
    )


class Watchdog:
    """Timeout that ends the process if no step, ticket or evaluation ends within `limit_s`.

    A worker calls `step` repeatedly; `kick` records that the run makes progress.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.kick()

    def kick(self) -> None:
        self._last_s = time.monotonic()

    def step(self) -> bool:
        if time.monotonic() - self._last_s > self._limit_s:
            text = (
                f"error: no step, ticket or evaluation ended for {self._limit_s:.0f} s "
                "(config.log.watchdog_s); the stacks of all threads follow. The newest checkpoint "
                "is intact: run the same command again to continue from it"
            )
            print(text, file=sys.stderr, flush=True)
            faulthandler.dump_traceback(file=sys.stderr)
            os._exit(3)  # a thread that hangs in native code cannot be stopped in another way
        return False
