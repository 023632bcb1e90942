# SPDX-License-Identifier: Apache-2.0
"""Rows of data sets: JSON lines or Parquet on disk, or a data set of the Hugging Face hub.

A source is a folder with train.jsonl and test.jsonl (or .parquet, or the hub's train-*.parquet),
one .jsonl or .parquet file, or "hf://NAME[:CONFIGURATION]". JSON lines are validated in one pass
when opened and then read one at a time, so a data set need not fit in memory; rows of Parquet files
and of the hub are kept in memory. Invariant: readers yield every row with its place (file and
line), for error messages.
"""

import array
import functools
import glob
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, overload

from tba_jax.tasks.chats import Problem, asked_by_user

Split = Literal["train", "test", "validation"]
Row = dict[str, str]
Placed = tuple[str, dict[str, Any]]
"""(place of the row for messages, row)."""

HUB_PREFIX = "hf://"
_MAX_DEPTH = 100  # maximum depth of nested objects and lists in a row
FILE_SUFFIXES = (".jsonl", ".parquet")


def has_split(source: str, split: Split) -> bool:
    """Return whether the source has this split; a single file has none.

    Raises:
        ValueError: a data set of the hub cannot be read.
    """
    if source.startswith(HUB_PREFIX):
        name, configuration = _hub_name(source)
        datasets = _datasets(source)
        names = _from_hub(source, lambda: datasets.get_dataset_split_names(name, configuration))
        return split in names
    return os.path.isdir(source) and bool(_files(source, split))


class Rows(Sequence[Placed]):
    """Rows of JSON lines files, read on access; thread-safe.

    If a file is replaced, the old file stays readable. A file that is modified is refused.

    Attributes:
        places: int64, for each row: index of its file, line number, first byte, length.
    """

    def __init__(self, files: Sequence[str]) -> None:
        self._files = [*files]
        self._open = [os.open(file, os.O_RDONLY) for file in files]
        self._written = [_written(descriptor) for descriptor in self._open]
        self.places = array.array("q")

    def __del__(self) -> None:
        for descriptor in getattr(self, "_open", ()):
            os.close(descriptor)

    def __len__(self) -> int:
        return len(self.places) // 4

    @overload
    def __getitem__(self, index: int) -> Placed: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Placed]: ...

    def __getitem__(self, index: int | slice) -> Placed | Sequence[Placed]:
        """Return (place, row), or the rows of a slice.

        Raises:
            ValueError: the file was modified after it was opened.
        """
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[index] * 4
        file, number, start, length = self.places[at : at + 4]
        where = f"{self._files[file]}, line {number}"
        if _written(self._open[file]) != self._written[file]:
            raise ValueError(
                f"{self._files[file]} was modified while a run reads it. Start the run "
                "again, and replace the file by another instead of writing to it"
            )
        return where, _json_row(os.pread(self._open[file], length, start), number, where)


def _written(descriptor: int) -> tuple[int, int]:
    """Return length and modification time of a file."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def open_rows(
    source: str, split: Split, judge: Callable[[str, dict[str, Any]], Any]
) -> Sequence[Placed]:
    """Return the rows of a split as a sequence, after one validation pass over all of them.

    Args:
        judge: function of (place, row) that is called for each row in order; raises ValueError
            for an invalid row.

    Raises:
        ValueError: as in `read_rows`, or `judge` refuses a row.
    """
    files = [] if source.startswith(HUB_PREFIX) else _files_of(source, split)
    if not files or files[0].endswith(".parquet"):
        kept = [*read_rows(source, split)]
        for where, row in kept:
            judge(where, row)
        return kept
    rows: Rows | None = None
    for file, path in enumerate(files):
        for number, start, line, row in _json_lines(path):
            if rows is None:
                rows = Rows(files)
            where = f"{path}, line {number}"
            _check_texts(row, where)
            judge(where, row)
            rows.places.extend((file, number, start, len(line)))
    if rows is None:
        raise _no_rows(files[0])
    return rows


def read_rows(source: str, split: Split) -> Iterator[Placed]:
    """Yield (place, row) of every row of a split in order; for a single file, all rows.

    Raises:
        ValueError: data is missing, or a row is malformed (the message has file and line).
    """
    if source.startswith(HUB_PREFIX):
        yield from _hub_rows(source, split)
        return
    files = _files_of(source, split)
    found = False
    for path in files:
        rows = _parquet_rows(path) if path.endswith(".parquet") else _json_rows(path)
        for where, row in rows:
            found = True
            _check_texts(row, where)
            yield where, row
    if not found:
        raise _no_rows(files[0])


def _no_rows(path: str) -> ValueError:
    return ValueError(f"{path} has no rows; wanted one JSON object per line. Give another file")


def _files_of(source: str, split: Split) -> list[str]:
    """Return the files of a split.

    Raises:
        ValueError: the split has no file, or files of two formats.
    """
    files = _files(source, split) if os.path.isdir(source) else [source]
    for path in files:
        # Opening a pipe would wait for a writer, and rows are read a second time by position.
        if os.path.exists(path) and not os.path.isfile(path):
            raise ValueError(
                f"{path} cannot be read (not a regular file, but a pipe, device or folder). Write "
                "its rows to a file, and give that file"
            )
    if not files:
        raise ValueError(
            f"{os.path.join(source, split)}.jsonl cannot be read (No such file or directory). Set "
            "task.data_path to a folder with train.jsonl and test.jsonl, or .parquet files of "
            "these names"
        )
    return files


def _files(folder: str, split: Split) -> list[str]:
    """Return the files of a split; [] if there are none.

    Raises:
        ValueError: the split has files of two formats.
    """
    stem = os.path.join(glob.escape(folder), split)
    kinds = [sorted(glob.glob(stem + end)) for end in (*FILE_SUFFIXES, "-*.parquet")]
    kinds = [files for files in kinds if files]
    if len(kinds) > 1:
        raise ValueError(
            f"{folder} has both {kinds[0][0]} and {kinds[1][0]}, so the {split} split is "
            "ambiguous. Remove one of them"
        )
    return kinds[0] if kinds else []


def _json_rows(path: str) -> Iterator[Placed]:
    for number, _, _, row in _json_lines(path):
        yield f"{path}, line {number}", row


def _json_lines(path: str) -> Iterator[tuple[int, int, bytes, dict[str, Any]]]:
    """Yield (number from 1, first byte, line, row) of every line that is not blank."""
    try:
        file = open(path, "rb")
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}). Give a readable file"
        ) from None
    start = 0
    with file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, start, line, _json_row(line, number, f"{path}, line {number}")
            start += len(line)


def _json_row(line: bytes, number: int, where: str) -> dict[str, Any]:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        row = json.loads(text)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}: not UTF-8 text ({error.reason}). Convert the file to UTF-8"
        ) from None
    except (ValueError, RecursionError) as error:  # also for huge numbers and deep nesting
        got = text.strip()[:80]
        raise ValueError(f"{where}: not JSON ({error}); got {got!r}. Correct that line") from None
    if not isinstance(row, dict):
        raise ValueError(
            f"{where}: {row!r:.80} is not an object with named columns. Correct that line"
        )
    return row


def _check_texts(value: Any, where: str, depth: int = 0) -> None:
    """Refuse texts that cannot be encoded, and deep nesting that readers cannot process."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{where}: a text has half of a surrogate pair, {ascii(value[error.start])}, at "
                f"character {error.start}, which no tokenizer can encode. Correct that text"
            ) from None
    elif isinstance(value, dict | list):
        if depth == _MAX_DEPTH:
            raise ValueError(f"{where}: nested more than {_MAX_DEPTH} deep. Flatten that row")
        items = [*value, *value.values()] if isinstance(value, dict) else value
        for item in items:
            _check_texts(item, where, depth + 1)


def _parquet_rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow  # pyright: ignore[reportMissingImports]  # an optional dependency
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(
            f"{path} needs the package `pyarrow`. Install it: pip install 'tba_jax[hub]', or "
            "convert the file to JSON lines"
        ) from None
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{path} cannot be read as Parquet ({reason}). Write the file again, or convert it to "
            "JSON lines"
        ) from None
    for index, row in enumerate(table.to_pylist()):
        yield f"{path}, row {index}", row


def _hub_name(source: str) -> tuple[str, str | None]:
    name, _, configuration = source.removeprefix(HUB_PREFIX).partition(":")
    return name, configuration or None


def _datasets(source: str) -> Any:
    try:
        import datasets  # pyright: ignore[reportMissingImports]  # an optional dependency
    except ImportError:
        raise ValueError(
            f"{source.removeprefix(HUB_PREFIX)} on the Hugging Face hub needs the package "
            "`datasets`. Install it: pip install 'tba_jax[hub]', or set task.data_path to a folder "
            "with train.jsonl and test.jsonl"
        ) from None
    return datasets


def _from_hub(source: str, question: Any) -> Any:
    """Call `question`, which reads from the hub; convert its errors to ValueError.

    Raises:
        ValueError: the hub cannot be reached, or has no such data set.
    """
    try:
        return question()
    except (OSError, ValueError) as error:  # no connection, no such data set or configuration
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{source} cannot be read from the Hugging Face hub ({reason}). Check name and "
            "configuration (hf://NAME:CONFIGURATION), or set task.data_path to local files"
        ) from None


def _hub_rows(source: str, split: Split) -> Iterator[tuple[str, dict[str, Any]]]:
    name, configuration = _hub_name(source)
    datasets = _datasets(source)
    table = _from_hub(source, lambda: datasets.load_dataset(name, configuration, split=split))
    for index, row in enumerate(table):
        yield f"{name}, {split} row {index}", dict(row)


def _checked(row: Mapping[str, Any], columns: Sequence[str], where: str) -> Row:
    for column in columns:
        if not isinstance(row.get(column), str):
            got = f"{column} = {row[column]!r:.80}" if column in row else f"keys {sorted(row)}"
            raise ValueError(f"{where}: {got}; wanted text in column {column!r}. Correct the row")
    return {column: row[column] for column in columns}


class RowTask:
    """Base of tasks whose problems are the rows of a published train and test file.

    A subclass defines `columns`, `hub` (a source for `train` and for `test`), `problem`, `message`,
    and `hub_eval_split` if the hub has another name for the held-out split. Files are read when a
    split is first used. Invariant: a problem's index is its row in the file.

    Args:
        data_path: a source with both splits; empty: the hub.
        chat: whether to format prompts as user messages.

    Raises:
        ValueError: the source is a single file.
    """

    columns: tuple[str, ...]
    hub: Mapping[str, str]
    hub_eval_split: Split = "test"

    def __init__(self, data_path: str, chat: bool) -> None:
        if os.path.isfile(data_path):
            raise ValueError(
                f"task.data_path={data_path!r} is a single file, but this task has two splits. "
                "Give the folder with train.jsonl and test.jsonl"
            )
        self._data_path = data_path
        self._chat = chat

    @staticmethod
    def problem(row: Row) -> tuple[str, dict[str, Any]]:
        """Return the prompt text of a row, and the columns of the reward."""
        raise NotImplementedError

    @staticmethod
    def message(row: Row) -> str:
        """Return the user message that replaces the prompt text in a chat."""
        raise NotImplementedError

    def _rows(self, source: str, split: Split) -> Sequence[Placed]:
        return open_rows(source, split, lambda where, row: _checked(row, self.columns, where))

    @functools.cached_property
    def _train(self) -> Sequence[Placed]:
        return self._rows(self._data_path or self.hub["train"], "train")

    @functools.cached_property
    def _eval(self) -> Sequence[Placed]:
        if self._data_path:
            return self._rows(self._data_path, "test")
        return self._rows(self.hub["test"], self.hub_eval_split)

    def train_size(self) -> int:
        return len(self._train)

    def eval_size(self) -> int:
        return len(self._eval)

    def train_problem(self, index: int) -> Problem:
        return self._asked(self._train[index])

    def eval_problem(self, index: int) -> Problem:
        return self._asked(self._eval[index])

    def _asked(self, placed: Placed) -> Problem:
        where, found = placed
        row = _checked(found, self.columns, where)
        text, columns = self.problem(row)
        return asked_by_user(self.message(row), columns) if self._chat else (text, columns)
