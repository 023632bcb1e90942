# SPDX-License-Identifier: Apache-2.0
"""JSON-lines logs: appended by a run, read as streams, cut back by the run that resumes.

It does not know what the records mean. Invariants: a log holds whole lines only (a line torn by a
kill is cut off when the file is opened again), floats that JSON has no number for (nan, inf) are
null, and nothing here needs more memory than the records that its caller wants.
"""

import contextlib
import gzip
import itertools
import json
import math
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from tba_jax.storage.whole_files import open_no_follow

_BLOCK = 2**16
_LINES = 2**22  # bytes of lines that are read at once


class LogError(RuntimeError):
    """A line could not be written; the message says where and what to do."""


def jsonable(value: Any) -> Any:
    """`value` with numpy scalars and arrays as Python numbers and lists, nan and inf as None."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return value


def read_blocks(path: str | os.PathLike[str], start: int = 0) -> Iterator[tuple[int, list[bytes]]]:
    """Yield (number of the first line, from 1; lines), a few megabytes at a time.

    A last line without newline was torn by a kill and is left out. Nothing where there is no file.

    Args:
        path: of the log, or of one that was compressed (NAME.gz).
        start: byte at which a line begins; numbers are counted from there.

    Raises:
        ValueError: the file cannot be read.
    """
    path = Path(path)
    if not path.exists():
        return
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            file.seek(start)
            number = 1
            while lines := file.readlines(_LINES):
                if not lines[-1].endswith(b"\n"):
                    lines.pop()
                yield number, lines
                number += len(lines)
    except (OSError, EOFError, zlib.error) as error:  # the latter two: damaged where compressed
        raise ValueError(f"{path} cannot be read ({error})") from error


def read_lines(path: str | os.PathLike[str], start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, line) of every complete line, as `read_blocks` reads them."""
    for first, lines in read_blocks(path, start):
        yield from enumerate(lines, first)


Wrong = Callable[[Mapping[str, Any]], str]
"""What is wrong with an object, "" for nothing; as in `report.lines`."""


def _nothing(record: Mapping[str, Any]) -> str:
    del record
    return ""


def parse_line(where: str, line: bytes, wrong: Wrong = _nothing) -> dict[str, Any]:
    """Return the record of a line.

    Args:
        where: file and line, for messages.
        line: with its newline or without.
        wrong: what is wrong with an object.

    Raises:
        ValueError: it is not a right JSON object.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{where}: not JSON ({error}); got {line[:80]!r}. Remove that line"
        ) from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: got {line[:80]!r}, wanted a JSON object. Remove that line")
    if why := wrong(record):
        raise ValueError(f"{where}: {why}. Remove that line")
    return record


def stream_jsonl(path: str | os.PathLike[str], wrong: Wrong = _nothing) -> Iterator[dict[str, Any]]:
    """Yield the records of a log.

    Raises:
        ValueError: for a line that is not a right JSON object, with file and line number; the file
            cannot be read.
    """
    for number, line in read_lines(path):
        yield parse_line(f"{path}, line {number}", line, wrong)


def read_jsonl(path: str | os.PathLike[str], wrong: Wrong = _nothing) -> list[dict[str, Any]]:
    """`stream_jsonl` as a list: of logs that are known to be short."""
    return list(stream_jsonl(path, wrong))


def sample_jsonl(
    path: str | os.PathLike[str], most: int, wrong: Wrong = _nothing, *, always: bytes
) -> Iterator[dict[str, Any]]:
    """Yield records of a log at even distances, including the last one.

    Args:
        path: of the log.
        most: so many at least, where it has them, and fewer than twice as many.
        wrong: what is wrong with an object.
        always: lines with these bytes in them come besides.

    Raises:
        ValueError: as `stream_jsonl`, for the lines that are parsed.
    """
    stride = max(1, sum(1 for _ in read_lines(path)) // most)
    last: tuple[str, bytes] | None = None
    for number, line in read_lines(path):
        if number % stride == 0 or always in line:
            last = None
            yield parse_line(f"{path}, line {number}", line, wrong)
        else:
            last = f"{path}, line {number}", line
    if last is not None:
        yield parse_line(*last, wrong)


class JsonlWriter:
    """Appends one JSON object per line and flushes each; safe to call from several threads.

    Opening a file whose last line was torn cuts that line off.

    Args:
        path: of the log.
        confirm: raises where this process may no longer change the log; called before the log is
            opened and before `keep` replaces it.
    """

    def __init__(
        self, path: str | os.PathLike[str], confirm: Callable[[], None] = lambda: None
    ) -> None:
        self._path = Path(path)
        self._confirm = confirm
        self._lock = threading.Lock()
        confirm()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "ab+", opener=open_no_follow) as file:
                file.truncate(_end_of_lines(file))
            self._file = open(self._path, "a", encoding="utf-8", opener=open_no_follow)
        except OSError as error:
            raise LogError(
                f"{self._path} cannot be written ({error.strerror}). Move it away or mend the "
                "storage, then run the same command again"
            ) from error

    @property
    def path(self) -> Path:
        """Of the log."""
        return self._path

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append {"step": step, **values}."""
        self.append({"step": step, **values})

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one object as it is, non-finite floats as null."""
        line = json.dumps(jsonable(record), allow_nan=False, ensure_ascii=False)
        with self._lock:
            try:
                self._file.write(line + "\n")
                self._file.flush()
            except OSError as error:
                raise LogError(
                    f"writing {self._path} failed: {error}. Make room or fix the storage, then run "
                    "the same command again to continue from the newest checkpoint"
                ) from error

    def num_bytes(self) -> int:
        """Length of the log: everything that was appended before lies below it; 0 if it is gone."""
        with self._lock, contextlib.suppress(FileNotFoundError):
            return self._path.stat().st_size
        return 0

    def has_line_end(self, num_bytes: int) -> bool:
        """Whether the log is that long at least, and a line of it ended there."""
        with self._lock, open(self._path, "rb") as file:
            file.seek(max(0, num_bytes - 1))
            return num_bytes == 0 or file.read(1) == b"\n"

    def keep(self, wanted: Callable[[dict[str, Any]], bool], start: int = 0) -> None:
        """Drop the lines for which `wanted(record)` does not hold.

        The lines that stay are copied to a new file, which takes the name of the log. A kill at any
        moment leaves the lines as they were, or as they shall be. A process that opened the log
        before, and that still runs, writes to the old file, which has no name any more.

        Args:
            wanted: asked for each record from `start` on.
            start: byte at which a line begins; all lines before it stay, and are not read.

        Raises:
            LogError: a line without a field that `wanted` looks at, or with something else there,
                or storage refuses. Nothing is changed.
        """
        with self._lock:
            unfinished = self._path.with_name(self._path.name + ".new")
            try:
                # A process that lost the log may have a file of this name open.
                unfinished.unlink(missing_ok=True)
                kept = self._copy(unfinished, wanted, start)
                with contextlib.ExitStack() as on_failure:
                    on_failure.callback(kept.close)
                    self._confirm()
                    os.replace(unfinished, self._path)
                    on_failure.pop_all()
            except OSError as error:
                raise LogError(
                    f"cutting back {self._path} failed ({error.strerror}). Make room or fix the "
                    "storage, then run the same command again"
                ) from error
            with contextlib.suppress(OSError):  # each line was flushed by itself
                self._file.close()
            self._file = kept

    def _copy(self, target: Path, wanted: Callable[[dict[str, Any]], bool], start: int) -> IO[str]:
        """Write the lines that stay to a new file, and return it open for more lines."""
        try:
            with open(target, "xb") as out, open(self._path, "rb") as file:
                while start > file.tell() and (
                    block := file.read(min(start - file.tell(), _LINES))
                ):
                    out.write(block)
                out.writelines(self._wanted_lines(wanted, start))
            return open(target, "a", encoding="utf-8", opener=open_no_follow)
        except BaseException:
            with contextlib.suppress(OSError):
                target.unlink(missing_ok=True)
            raise

    def _wanted_lines(
        self, wanted: Callable[[dict[str, Any]], bool], start: int
    ) -> Iterator[bytes]:
        for number, line in read_lines(self._path, start):
            where = f"{self._path}, line {number}" + (f" after byte {start}" if start else "")
            record = parse_line(where, line)
            try:
                is_kept = wanted(record)
            except (KeyError, TypeError) as error:
                why = f"has no {error.args[0]!r}"
                if isinstance(error, TypeError):
                    why = f"has a value of another kind ({error})"
                raise LogError(f"{where}: {why}; got {record!r:.80}. Remove that line") from error
            if is_kept:
                yield line

    def is_replaced(self) -> bool:
        """Return whether the log is another file now than the one that this writer appends to."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            return not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        return False

    def close(self) -> None:
        """Close the file."""
        # Every line was flushed by itself: what cannot be flushed now was reported by `append`.
        with self._lock, contextlib.suppress(OSError):
            self._file.close()


def _end_of_lines(file: Any) -> int:
    """Byte after the last newline of a file; 0 without any."""
    size = file.seek(0, os.SEEK_END)
    for block in itertools.count(1):
        start = max(0, size - block * _BLOCK)
        file.seek(start)
        newline = file.read(_BLOCK).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        if start == 0:
            return 0
    raise AssertionError("there is a first block")
