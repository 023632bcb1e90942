# SPDX-License-Identifier: Apache-2.0
"""JSON-lines logs: appended by a run, read as streams, cut back by a resumed run.

Invariants: a log has complete lines only (opening a log removes an incomplete last line, which a
killed process may leave); non-finite floats are written as null.
"""

import contextlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.storage.whole_files import write_whole


class LogError(RuntimeError):
    """A line of a log could not be written or used."""


def jsonable(value: Any) -> Any:
    """Return `value` with numpy numbers and arrays as Python values, nan and inf as None."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return value


def read_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, line) of every complete line; nothing without a file."""
    if os.path.exists(path):
        with open(path, "rb") as file:
            yield from ((i, line) for i, line in enumerate(file, 1) if line.endswith(b"\n"))


def parse_line(where: str, line: bytes) -> dict[str, Any]:
    """Return the record of a line.

    Args:
        where: file and line, for messages.

    Raises:
        ValueError: the line is not a JSON object.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{where}: not JSON ({error}); got {line[:80]!r}. Remove that line"
        ) from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: got {line[:80]!r}, expected a JSON object. Remove that line")
    return record


def stream_jsonl(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the records of a log.

    Raises:
        ValueError: a line is not a valid JSON object (with file and line number).
    """
    for number, line in read_lines(path):
        yield parse_line(f"{path}, line {number}", line)


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the records of a short log as a list."""
    return list(stream_jsonl(path))


class JsonlWriter:
    """Thread-safe writer of a JSON-lines log; every object is flushed.

    Opening a file removes an incomplete last line.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole_bytes = sum(len(line) for _, line in read_lines(self.path))
        self._file = open(self.path, "ab")
        self._file.truncate(whole_bytes)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append {"step": step, **values}."""
        self.append({"step": step, **values})

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one object unchanged; non-finite floats become null."""
        line = json.dumps(jsonable(record), allow_nan=False, ensure_ascii=False) + "\n"
        with self._lock:
            try:
                self._file.write(line.encode())
                self._file.flush()
            except OSError as error:
                raise LogError(
                    f"writing {self.path} failed: {error}. Free disk space or repair the storage, "
                    "then run the same command again to continue from the newest checkpoint"
                ) from error

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drop the records for which `wanted(record)` is false; a kill leaves the old or new log.

        Raises:
            LogError: a line lacks a field that `wanted` reads, or the field has a value of another
                type. The log is then unchanged.
        """
        kept = []
        for number, line in read_lines(self.path):
            record = parse_line(f"{self.path}, line {number}", line)
            try:
                if wanted(record):
                    kept.append(line)
            except (KeyError, TypeError) as error:
                raise LogError(
                    f"{self.path}, line {number}: a field is missing or has a value of a wrong "
                    f"type ({error!r}); got {record!r:.80}. Remove that line"
                ) from error
        with self._lock:
            self._file.close()
            write_whole(self.path, b"".join(kept))
            self._file = open(self.path, "ab")

    def close(self) -> None:
        """Close the file; every line was flushed when it was written, and failures reported."""
        with self._lock, contextlib.suppress(OSError):
            self._file.close()
