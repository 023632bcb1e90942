# SPDX-License-Identifier: Apache-2.0
"""The edge of every command: whatever happens is one line on standard error and an exit code.

Imports nothing heavy. It does not know which errors there are; `run.errors` does.
"""

import ctypes
import os
import select
import signal
import sys
from collections.abc import Callable

from tba_jax.run.errors import tell

_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


def end_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, also where the parent is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def guarded(main: Callable[[], int]) -> int:
    """Return the exit code of a command. A failure is printed as one line.

    A command whose output nobody reads any more, as in `COMMAND | head`, ends without a line and
    with the exit code of SIGPIPE.
    """
    try:
        try:
            code = main()
        except SystemExit:  # of argparse, after --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()  # a full disk is found here, and not at the interpreter's exit
        return code
    except Exception as error:  # printed, with its traceback in a file
        is_unread = isinstance(error, BrokenPipeError) and _has_no_reader()
        if isinstance(error, OSError):
            _drop_output()
        return 128 + signal.SIGPIPE if is_unread else tell(error)


def _has_no_reader() -> bool:
    """Return whether standard output is a pipe whose other end is closed."""
    poll = select.poll()
    poll.register(1, 0)
    return bool(poll.poll(0))


def _drop_output() -> None:
    """Keep the interpreter from failing again, at exit, on output that cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
