# SPDX-License-Identifier: Apache-2.0
"""Rows of data sets: JSON lines or Parquet on disk, or a data set of the Hugging Face hub.

A source is a folder with train.jsonl and test.jsonl (or .parquet, or the hub's train-*.parquet),
one .jsonl or .parquet file, or "hf://NAME[:CONFIGURATION]". Rows are validated in one pass; JSON
lines are kept as text and parsed again when they are read, which takes the memory of the file.
Invariant: readers yield every row with its place (file and line), for error messages.
"""

import functools
import glob
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from tba_jax.tasks.chats import Problem, asked_by_user

Split = Literal["train", "test", "validation"]
Row = dict[str, str]
Placed = tuple[str, dict[str, Any]]
"""(place of the row for messages, row)."""

HUB_PREFIX = "hf://"
FILE_SUFFIXES = (".jsonl", ".parquet")


def has_split(source: str, split: Split) -> bool:
    """Return whether the source has this split; a single file has none.

    Raises:
        ValueError: a data set of the hub cannot be read.
    """
    if source.startswith(HUB_PREFIX):
        return split in _from_hub(source, lambda hub, *name: hub.get_dataset_split_names(*name))
    return os.path.isdir(source) and bool(_files(source, split))


class Rows(Sequence[Placed]):
    """Rows in memory: of JSON lines the text, else the row, by place."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, bytes | dict[str, Any]]] = []

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: Any) -> Any:
        """Return (place, row), or the rows of a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        where, row = self.kept[index]
        return where, json.loads(row.decode()) if isinstance(row, bytes) else row


def open_rows(source: str, split: Split, judge: Callable[[str, dict[str, Any]], Any]) -> Rows:
    """Return the rows of a split as a sequence, after one validation pass over all of them.

    Args:
        judge: function of (place, row) that is called for each row in order; raises ValueError
            for an invalid row.

    Raises:
        ValueError: as in `read_rows`, or `judge` refuses a row.
    """
    found = Rows()
    for where, row, line in _read(source, split):
        judge(where, row)
        found.kept.append((where, line or row))
    return found


def read_rows(source: str, split: Split) -> Iterator[Placed]:
    """Yield (place, row) of every row of a split in order; for a single file, all rows.

    Raises:
        ValueError: data is missing, or a row is malformed (the message has file and line).
    """
    return ((where, row) for where, row, _ in _read(source, split))


def _read(source: str, split: Split) -> Iterator[tuple[str, dict[str, Any], bytes | None]]:
    """Yield (place, row, line of JSON or None) of every row of a split."""
    if source.startswith(HUB_PREFIX):
        table = _from_hub(source, lambda hub, *name: hub.load_dataset(*name, split=split))
        name = source.removeprefix(HUB_PREFIX).partition(":")[0]
        for index, row in enumerate(table):
            yield f"{name}, {split} row {index}", dict(row), None
        return
    files, found = _files(source, split) if os.path.isdir(source) else [source], False
    if not files:
        raise ValueError(
            f"{os.path.join(source, split)}.jsonl cannot be read (No such file or directory). Set "
            "task.data_path to a folder with train.jsonl and test.jsonl, or .parquet files of "
            "these names"
        )
    for path in files:
        # Opening a pipe would wait for a writer.
        if os.path.exists(path) and not os.path.isfile(path):
            raise ValueError(
                f"{path} cannot be read (not a regular file, but a pipe, device or folder). Write "
                "its rows to a file, and give that file"
            )
        for found in _parquet_rows(path) if path.endswith(".parquet") else _json_lines(path):
            yield found
    if not found:
        raise ValueError(f"{files[0]} has no rows; wanted one JSON object per line. Give another")


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


def _json_lines(path: str) -> Iterator[tuple[str, dict[str, Any], bytes]]:
    """Yield (place, row, line) of every line that is not blank."""
    try:
        file = open(path, "rb")
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}). Give a readable file"
        ) from None
    with file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                where = f"{path}, line {number}"
                yield where, _json_row(line, where), line


def _json_row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode())
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}: not UTF-8 text ({error.reason}). Convert the file to UTF-8"
        ) from None
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: a text has half of a surrogate pair, {ascii(error.object[error.start])}, "
            "which no tokenizer can encode. Correct that text"
        ) from None
    except (ValueError, RecursionError) as error:  # also for huge numbers and deep nesting
        got = line.decode().strip()[:80]
        raise ValueError(f"{where}: not JSON ({error}); got {got!r}. Correct that line") from None
    if not isinstance(row, dict):
        raise ValueError(
            f"{where}: {row!r:.80} is not an object with named columns. Correct that line"
        )
    return row


def _parquet_rows(path: str) -> Iterator[tuple[str, dict[str, Any], None]]:
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
        yield f"{path}, row {index}", row, None


def _from_hub(source: str, ask: Callable[..., Any]) -> Any:
    """Return `ask(datasets, name, configuration or None)`, which reads from the hub.

    Raises:
        ValueError: the library is missing, or the hub cannot be reached or has no such data set.
    """
    name, _, configuration = source.removeprefix(HUB_PREFIX).partition(":")
    try:
        import datasets  # pyright: ignore[reportMissingImports]  # an optional dependency
    except ImportError:
        raise ValueError(
            f"{name} on the Hugging Face hub needs the package `datasets`. Install it: pip install "
            "'tba_jax[hub]', or set task.data_path to a folder with train.jsonl and test.jsonl"
        ) from None
    try:
        return ask(datasets, name, configuration or None)
    except (OSError, ValueError) as error:  # no connection, no such data set or configuration
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{source} cannot be read from the Hugging Face hub ({reason}). Check name and "
            "configuration (hf://NAME:CONFIGURATION), or set task.data_path to local files"
        ) from None


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
