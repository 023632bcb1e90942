# SPDX-License-Identifier: Apache-2.0
"""Errors of Orbax that come after the operation that failed, on threads that nobody waits for.

After the first array that cannot be read or written Orbax closes its event loop and leaves the
other reads and writes in it. They end later, on threads of TensorStore, and complain through
asyncio's log and `sys.unraisablehook`. The failure also reaches the caller as one exception.
Invariant: only records and exceptions of Orbax and TensorStore are left out, only during an
operation and after one that failed (tests/run/test_checkpoint.py).
"""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import orbax.checkpoint as ocp

ORBAX = os.path.dirname(ocp.__file__)

_lock = threading.Lock()
_operations = 0  # under way, or failed
_before: "Callable[[sys.UnraisableHookArgs], Any]" = sys.unraisablehook


def begin() -> None:
    """Leave the errors out from now on."""
    global _operations, _before
    with _lock:
        _operations += 1
        if _operations == 1:
            _before, sys.unraisablehook = sys.unraisablehook, _hook
            logging.getLogger("asyncio").addFilter(_is_of_others)


def end() -> None:
    """Note that an operation succeeded; after the last one everything is as it was before."""
    global _operations
    with _lock:
        _operations -= 1
        if not _operations and sys.unraisablehook is _hook:
            sys.unraisablehook = _before
            logging.getLogger("asyncio").removeFilter(_is_of_others)


@contextlib.contextmanager
def expected() -> Iterator[None]:
    """Leave the errors out while a block runs, and afterwards if it raises."""
    begin()
    yield
    end()


def _hook(unraisable: "sys.UnraisableHookArgs") -> None:
    code = getattr(unraisable.object, "cr_code", None)
    is_of_orbax = code is not None and code.co_filename.startswith(ORBAX)
    # From threads of TensorStore, which name no object.
    is_late = str(unraisable.exc_value).startswith(
        ("Event loop is closed", "Encountered error while")
    )
    if not is_of_orbax and not is_late:
        _before(unraisable)


def _is_of_others(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return ORBAX not in record.getMessage() and "tensorstore" not in str(error).lower()
