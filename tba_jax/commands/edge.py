# SPDX-License-Identifier: Apache-2.0
"""The edge of every command: whatever happens is one line on standard error and an exit code.

Imports nothing heavy. It does not know which errors there are; `run.errors` does.
"""

from collections.abc import Callable

from tba_jax.run.errors import tell


def guarded(main: Callable[[], int]) -> int:
    """Exit code of a command, or of its failure, which is told."""
    try:
        return main()
    except Exception as error:  # told, with its traceback in a file
        return tell(error)
