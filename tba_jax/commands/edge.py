# SPDX-License-Identifier: Apache-2.0
"""The edge of every command: whatever happens is one line on standard error and an exit code.

Imports nothing heavy. It does not know which errors there are; `run.errors` does.
"""

import os
import sys
from collections.abc import Callable

from tba_jax.run.errors import tell


def guarded(main: Callable[[], int]) -> int:
    """Exit code of a command, or of its failure, which is told."""
    try:
        code = main()
        sys.stdout.flush()  # a full disk is found here, and not at the interpreter's exit
        return code
    except Exception as error:  # told, with its traceback in a file
        if isinstance(error, OSError):
            _drop_output()
        return tell(error)


def _drop_output() -> None:
    """Keep the interpreter from failing again, at exit, on output that cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
