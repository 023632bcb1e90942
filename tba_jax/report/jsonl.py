# SPDX-License-Identifier: Apache-2.0
"""JSON-lines logs: appended by a run, read as streams, truncated by a resumed run.

Invariants: a log has complete lines only (opening a log removes an incomplete last line, which a
killed process may leave); non-finite floats are written as null; a reader needs only the memory of
the records that its caller keeps.
"""

import contextlib
import itertools
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

_BLOCK = 2**16


class LogError(RuntimeError):
    """A line of a log could not be written."""


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
    """Yield (number from 1, line) of every complete line.

    Omits an incomplete last line, which a killed process left. Yields nothing without a file.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            yield from ((i, line) for i, line in enumerate(file, 1) if line.endswith(b"\n"))
    except FileNotFoundError:
        return
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error}). Restore the file from a copy"
        ) from error


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
        ValueError: a line is not a valid JSON object (with file and line number), or the file
            cannot be read.
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
        self._path = Path(path)
        self._lock = threading.Lock()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "ab+") as file:
                file.truncate(_end_of_lines(file))
            self._file = open(self._path, "a", encoding="utf-8")
        except OSError as error:
            raise LogError(
                f"{self._path} cannot be written ({error.strerror}). Move it to another folder "
                "or repair the storage, then run the same command again"
            ) from error

    @property
    def path(self) -> Path:
        return self._path

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append {"step": step, **values}."""
        self.append({"step": step, **values})

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one object unchanged; non-finite floats become null."""
        line = json.dumps(jsonable(record), allow_nan=False, ensure_ascii=False)
        with self._lock:
            try:
                self._file.write(line + "\n")
                self._file.flush()
            except OSError as error:
                raise LogError(
                    f"writing {self._path} failed: {error}. Free disk space or repair the "
                    "storage, then run the same command again to continue from the newest "
                    "checkpoint"
                ) from error

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drop the records for which `wanted(record)` is false.

        Copies the remaining lines to a new file and renames it, so that a kill leaves either the
        old or the new log.

        Raises:
            LogError: a line lacks a field that `wanted` reads, the field has a value of another
                type, or the storage failed. The log is then unchanged.
        """
        with self._lock:
            unfinished = self._path.with_name(self._path.name + ".new")
            try:
                with open(unfinished, "wb") as out:
                    out.writelines(self._wanted_lines(wanted))
                os.replace(unfinished, self._path)
                self._file.close()  # every line was flushed when it was written
                self._file = open(self._path, "a", encoding="utf-8")
            except OSError as error:
                raise LogError(
                    f"truncating {self._path} failed ({error.strerror}). Free disk space or "
                    "repair the storage, then run the same command again"
                ) from error
            finally:
                with contextlib.suppress(OSError):
                    unfinished.unlink(missing_ok=True)

    def _wanted_lines(self, wanted: Callable[[dict[str, Any]], bool]) -> Iterator[bytes]:
        for number, line in read_lines(self._path):
            where = f"{self._path}, line {number}"
            record = parse_line(where, line)
            try:
                is_kept = wanted(record)
            except (KeyError, TypeError) as error:
                why = f"has no {error.args[0]!r}"
                if isinstance(error, TypeError):
                    why = f"has a value of a wrong type ({error})"
                raise LogError(f"{where}: {why}; got {record!r:.80}. Remove that line") from error
            if is_kept:
                yield line

    def close(self) -> None:
        # Every line was flushed when it was written, and `append` reported failures.
        with self._lock, contextlib.suppress(OSError):
            self._file.close()


def _end_of_lines(file: Any) -> int:
    """Return the byte after the last newline of a file; 0 without a newline."""
    size = file.seek(0, os.SEEK_END)
    for block in itertools.count(1):
        start = max(0, size - block * _BLOCK)
        file.seek(start)
        newline = file.read(_BLOCK).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        if start == 0:
            return 0
    raise AssertionError("unreachable: the loop returns at the start of the file")
