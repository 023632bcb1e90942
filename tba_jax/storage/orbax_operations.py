# SPDX-License-Identifier: Apache-2.0
"""Temporary changes to other packages during operations of Orbax, and after a failed operation.

Orbax has no settings for these:

- After the first array that cannot be read or written, Orbax closes its event loop while other
  reads and writes continue. They end later, on threads of TensorStore, and report errors through
  asyncio's log and `sys.unraisablehook`. The caller has received the failure already.
- Orbax logs one failure up to five times with full tracebacks, and warns about its own metadata,
  which this project does not use.
- Orbax reads TensorStore's metrics for a log line. TensorStore 0.1.76 to 0.1.86 never frees the
  returned objects: 35 kB per version of the weights.

Invariant: reports of other packages are never suppressed, and all changes are undone when no
operation runs and none has failed (tests/run/test_checkpoint.py,
tests/storage/test_orbax_operations.py).
"""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import orbax.checkpoint as ocp
import tensorstore
from absl import logging as absl_logging

_ORBAX = os.path.dirname(ocp.__file__)

_lock = threading.Lock()
_operations = 0  # under way, or failed
_changes = contextlib.ExitStack()


def begin() -> None:
    """Note that an operation begins."""
    global _operations
    with _lock:
        _operations += 1
        if _operations == 1:
            _changes.enter_context(_late_errors_left_out())
            _changes.enter_context(_filtered(logging.getLogger("asyncio"), _is_of_others))
            _changes.enter_context(_filtered(absl_logging.get_absl_logger(), _is_news))
            _changes.enter_context(_no_metrics())


def end() -> None:
    """Note that an operation succeeded; the end of the last one restores the other packages."""
    global _operations
    with _lock:
        _operations -= 1
        if not _operations:
            _changes.close()


@contextlib.contextmanager
def operation() -> Iterator[None]:
    """Run a block as an operation; one that raises has failed."""
    begin()
    yield
    end()


@contextlib.contextmanager
def _late_errors_left_out() -> Iterator[None]:
    before = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        code = getattr(unraisable.object, "cr_code", None)
        is_of_orbax = code is not None and code.co_filename.startswith(_ORBAX)
        # From threads of TensorStore, which name no object.
        is_late = str(unraisable.exc_value).startswith(
            ("Event loop is closed", "Encountered error while")
        )
        if not is_of_orbax and not is_late:
            before(unraisable)

    sys.unraisablehook = hook
    yield
    if sys.unraisablehook is hook:
        sys.unraisablehook = before


@contextlib.contextmanager
def _filtered(
    logger: logging.Logger, passes: Callable[[logging.LogRecord], bool]
) -> Iterator[None]:
    logger.addFilter(passes)
    yield
    logger.removeFilter(passes)


@contextlib.contextmanager
def _no_metrics() -> Iterator[None]:
    before = tensorstore.experimental_collect_matching_metrics
    tensorstore.experimental_collect_matching_metrics = _nothing
    yield
    tensorstore.experimental_collect_matching_metrics = before


def _nothing(*args: Any, **kwargs: Any) -> list[dict[str, Any]]:
    del args, kwargs
    return []


def _is_of_others(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return _ORBAX not in record.getMessage() and "tensorstore" not in str(error).lower()


def _is_news(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return not record.pathname.startswith(_ORBAX) or not (
        record.exc_info or "Metadata file" in text or "directory is read only" in text
    )
