# SPDX-License-Identifier: Apache-2.0
"""Rows of data sets: JSON lines or Parquet on disk, or a data set of the Hugging Face hub.

A source is a folder with train.jsonl and test.jsonl (or .parquet, or the hub's train-*.parquet),
one .jsonl or .parquet file, or "hf://NAME[:CONFIGURATION]". Rows of JSON lines are judged in one
pass when they are opened and then read one at a time, so a data set need not fit into memory; those
of Parquet files and of the hub are kept whole. Invariant: every row comes with the place it is from
(file and line), so that whoever refuses it can name that.
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
"""A row and where it is from, for messages."""

HUB_PREFIX = "hf://"
_MAX_DEPTH = 100  # of objects and lists in a row
FILE_SUFFIXES = (".jsonl", ".parquet")


def has_split(source: str, split: Split) -> bool:
    """Whether the source has this split of its own; one file has none.

    Raises:
        ValueError: a data set of the hub that cannot be looked at.
    """
    if source.startswith(HUB_PREFIX):
        name, configuration = _hub_name(source)
        datasets = _datasets(source)
        names = _asked(source, lambda: datasets.get_dataset_split_names(name, configuration))
        return split in names
    return os.path.isdir(source) and bool(_files(source, split))


class Rows(Sequence[Placed]):
    """Rows of JSON lines files, of which only the places are kept; safe to read from any thread.

    A file that is replaced is read on as it was; one that is written to is refused.

    Args:
        files: which.

    Attributes:
        places: int64, of each row: index of its file, number of its line, first byte, length.
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
        """Raises ValueError for a file that was written to since."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[index] * 4
        file, number, start, length = self.places[at : at + 4]
        where = f"{self._files[file]}, line {number}"
        if _written(self._open[file]) != self._written[file]:
            raise ValueError(
                f"{self._files[file]} was written to while a run reads it; start the run "
                "again, and leave the file alone, or put another in its place"
            )
        return where, _json_row(os.pread(self._open[file], length, start), number, where)


def _written(descriptor: int) -> tuple[int, int]:
    """Length of a file, and when it was last written to."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def open_rows(
    source: str, split: Split, judge: Callable[[str, dict[str, Any]], Any]
) -> Sequence[Placed]:
    """The rows of a split, as a sequence, after one pass over all of them.

    Args:
        source: where they are.
        split: which of the two.
        judge: (place, row): called for each in order; raises ValueError for one that is not usable.

    Raises:
        ValueError: as `read_rows` and `judge`.
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
    """(place, row) of every row of a split, in order; all rows where the source is one file.

    Raises:
        ValueError: no such data, or something in it that is no row: file, line, what was found.
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
    return ValueError(f"{path} holds no rows; want one JSON object per line")


def _files_of(source: str, split: Split) -> list[str]:
    """Raises ValueError where there are none, or two kinds."""
    files = _files(source, split) if os.path.isdir(source) else [source]
    for path in files:
        # Opening a pipe waits for a writer, and rows are read a second time by their place.
        if os.path.exists(path) and not os.path.isfile(path):
            raise ValueError(
                f"{path} cannot be read (not a regular file, but a pipe, device or folder). Write "
                "its rows to a file, and give that file"
            )
    if not files:
        raise ValueError(
            f"{os.path.join(source, split)}.jsonl cannot be read (No such file or directory); "
            "task.data_path wants a folder with train.jsonl and test.jsonl, or .parquet files of "
            "these names"
        )
    return files


def _files(folder: str, split: Split) -> list[str]:
    """The files of a split; [] without any.

    Raises:
        ValueError: two kinds of files for it.
    """
    stem = os.path.join(glob.escape(folder), split)
    kinds = [sorted(glob.glob(stem + end)) for end in (*FILE_SUFFIXES, "-*.parquet")]
    kinds = [files for files in kinds if files]
    if len(kinds) > 1:
        raise ValueError(
            f"{folder} has both {kinds[0][0]} and {kinds[1][0]}; leave one, so that it is clear "
            f"which rows are the {split} split"
        )
    return kinds[0] if kinds else []


def _json_rows(path: str) -> Iterator[Placed]:
    for number, _, _, row in _json_lines(path):
        yield f"{path}, line {number}", row


def _json_lines(path: str) -> Iterator[tuple[int, int, bytes, dict[str, Any]]]:
    """(number from 1, first byte, line, row) of every line that is not blank."""
    try:
        file = open(path, "rb")
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
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
        raise ValueError(f"{where}: not UTF-8 text ({error.reason})") from None
    except (ValueError, RecursionError) as error:  # numbers or nesting without end, too
        got = text.strip()[:80]
        raise ValueError(f"{where}: not JSON ({error}); got {got!r}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: want an object with named columns; got {row!r:.80}")
    return row


def _check_texts(value: Any, where: str, depth: int = 0) -> None:
    """Every text can be encoded, and nothing is nested deeper than whoever reads it bears."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{where}: a text has half of a surrogate pair, {ascii(value[error.start])}, at "
                f"character {error.start}; no tokenizer can read it. Repair that text"
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
            f"reading {path} needs the package `pyarrow`: pip install 'tba_jax[hub]', or give "
            "JSON lines"
        ) from None
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} cannot be read as Parquet ({reason})") from None
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
            f"reading {source.removeprefix(HUB_PREFIX)} from the Hugging Face hub needs the "
            "package `datasets`: pip install 'tba_jax[hub]', or set task.data_path to a folder "
            "with train.jsonl and test.jsonl"
        ) from None
    return datasets


def _asked(source: str, question: Any) -> Any:
    """The hub's answer; what it refuses becomes one line."""
    try:
        return question()
    except (OSError, ValueError) as error:  # no connection, no such data set or configuration
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{source} cannot be read from the Hugging Face hub ({reason}); check name and "
            "configuration (hf://NAME:CONFIGURATION), or set task.data_path to local files"
        ) from None


def _hub_rows(source: str, split: Split) -> Iterator[tuple[str, dict[str, Any]]]:
    name, configuration = _hub_name(source)
    datasets = _datasets(source)
    table = _asked(source, lambda: datasets.load_dataset(name, configuration, split=split))
    for index, row in enumerate(table):
        yield f"{name}, {split} row {index}", dict(row)


def _checked(row: Mapping[str, Any], columns: Sequence[str], where: str) -> Row:
    for column in columns:
        if not isinstance(row.get(column), str):
            got = f"{column} = {row[column]!r:.80}" if column in row else f"keys {sorted(row)}"
            raise ValueError(f"{where}: want text under {column!r}; got {got}")
    return {column: row[column] for column in columns}


class RowTask:
    """A task whose problems are the rows of a published train and test file.

    A subclass says `columns`, `hub` (a source for `train` and for `test`), `hub_eval_split` where
    the held-out split has another name there, `problem` and `message`. Files are read when a split
    is first used. Invariant: a problem's index is its row in the file.

    Args:
        data_path: a source with both splits; empty: the hub.
        chat: prompts are a user's messages.

    Raises:
        ValueError: the source is one file.
    """

    columns: tuple[str, ...]
    hub: Mapping[str, str]
    hub_eval_split: Split = "test"

    def __init__(self, data_path: str, chat: bool) -> None:
        if os.path.isfile(data_path):
            raise ValueError(
                f"task.data_path = {data_path!r} is one file, but this task has two splits; give "
                "the folder with train.jsonl and test.jsonl"
            )
        self._data_path = data_path
        self._chat = chat

    @staticmethod
    def problem(row: Row) -> tuple[str, dict[str, Any]]:
        """Prompt text of a row, and the columns that the reward needs."""
        raise NotImplementedError

    @staticmethod
    def message(row: Row) -> str:
        """What the user of a chat says in place of the prompt text."""
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
        """Number of training problems."""
        return len(self._train)

    def eval_size(self) -> int:
        """Number of held-out problems."""
        return len(self._eval)

    def train_problem(self, index: int) -> Problem:
        """Prompt and reward columns of a training problem."""
        return self._asked(self._train[index])

    def eval_problem(self, index: int) -> Problem:
        """Prompt and reward columns of a held-out problem."""
        return self._asked(self._eval[index])

    def _asked(self, placed: Placed) -> Problem:
        where, found = placed
        row = _checked(found, self.columns, where)
        text, columns = self.problem(row)
        return asked_by_user(self.message(row), columns) if self._chat else (text, columns)
