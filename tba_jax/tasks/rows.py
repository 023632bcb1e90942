# SPDX-License-Identifier: Apache-2.0
"""Rows of data sets: JSON lines or Parquet on disk, or a data set of the Hugging Face hub.

A source is a folder with train.jsonl and test.jsonl (or .parquet, or the hub's train-*.parquet),
one .jsonl or .parquet file, or "hf://NAME[:CONFIGURATION]". Invariant: readers yield every row with
its place (file and line), for error messages.
"""

import glob
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from tba_jax.tasks import task
from tba_jax.tasks.task import Problem, chat

Split = Literal["train", "test", "validation"]
Row = dict[str, str]
Placed = tuple[str, dict[str, Any]]
"""(place of the row for messages, row)."""

HUB_PREFIX = "hf://"
FILE_SUFFIXES = (".jsonl", ".parquet")


class Rows(Sequence[Any]):
    """Values in memory as JSON, which takes about the memory of the file."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._texts = [json.dumps(value, ensure_ascii=False).encode() for value in values]

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: Any) -> Any:
        return json.loads(self._texts[index])


def has_split(source: str, split: Split) -> bool:
    """Return whether the source has this split; a single file has none."""
    if source.startswith(HUB_PREFIX):
        return split in _from_hub(source, lambda hub, *name: hub.get_dataset_split_names(*name))
    return os.path.isdir(source) and bool(_files(source, split))


def read_rows(source: str, split: Split) -> Iterator[Placed]:
    """Yield (place, row) of every row of a split in order; for a single file, all rows.

    Raises:
        ValueError: data is missing, or a row is malformed (the message has file and line).
    """
    if source.startswith(HUB_PREFIX):
        table = _from_hub(source, lambda hub, *name: hub.load_dataset(*name, split=split))
        name = source.removeprefix(HUB_PREFIX).partition(":")[0]
        for index, row in enumerate(table):
            yield f"{name}, {split} row {index}", dict(row)
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
    """Return the files of a split; raise ValueError if they have two formats."""
    stem = os.path.join(glob.escape(folder), split)
    kinds = [sorted(glob.glob(stem + end)) for end in (*FILE_SUFFIXES, "-*.parquet")]
    kinds = [files for files in kinds if files]
    if len(kinds) > 1:
        raise ValueError(
            f"{folder} has both {kinds[0][0]} and {kinds[1][0]}, so the {split} split is "
            "ambiguous. Remove one of them"
        )
    return kinds[0] if kinds else []


def _json_lines(path: str) -> Iterator[Placed]:
    """Yield (place, row) of every line that is not blank."""
    try:
        file = open(path, "rb")
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}). Give a readable file"
        ) from None
    with file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line.decode())
                # A text with half of a surrogate pair is JSON, but no tokenizer can encode it.
                json.dumps(row, ensure_ascii=False).encode()
            except (ValueError, RecursionError) as error:  # also for huge numbers, deep nesting
                got = line.decode(errors="replace").strip()[:80]
                raise ValueError(
                    f"{where}: not JSON in UTF-8 ({error}); got {got!r}. Correct that line"
                ) from None
            if not isinstance(row, dict):
                raise ValueError(
                    f"{where}: {row!r:.80} is not an object with named columns. Correct that line"
                )
            yield where, row


def _parquet_rows(path: str) -> Iterator[Placed]:
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
        raise ValueError(
            f"{path} cannot be read as Parquet ({_first_line(error)}). Write the file again, or "
            "convert it to JSON lines"
        ) from None
    for index, row in enumerate(table.to_pylist()):
        yield f"{path}, row {index}", row


def _from_hub(source: str, ask: Callable[..., Any]) -> Any:
    """Return `ask(datasets, name, configuration or None)`, which reads from the hub."""
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
        raise ValueError(
            f"{source} cannot be read from the Hugging Face hub ({_first_line(error)}). Check name "
            "and configuration (hf://NAME:CONFIGURATION), or set task.data_path to local files"
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class RowTask(task.Task):
    """Base of tasks whose problems are the rows of a published train and test file.

    Files are read when a split is first used. Invariant: a problem's index is its row in the file.

    Args:
        data_path: a source with both splits; empty: the hub.
        is_chat: whether to format prompts as user messages.

    Attributes:
        text: prompt of a row, with the names of columns in braces.
        message: the user message that replaces the prompt in a chat.
        columns: columns of a row that are read; the last is the reward's column `answer`.
        hub: sources of the splits.
        hub_eval_split: name of the held-out split on the hub.

    Raises:
        ValueError: the source is a single file.
    """

    has_chat = True
    text: str
    message: str
    columns: tuple[str, ...]
    hub: Mapping[task.Split, str]
    hub_eval_split: Split = "test"

    def __init__(self, data_path: str, is_chat: bool) -> None:
        if os.path.isfile(data_path):
            raise ValueError(
                f"task.data_path={data_path!r} is a single file, but this task has two splits. "
                "Give the folder with train.jsonl and test.jsonl"
            )
        self._data_path, self._is_chat = data_path, is_chat
        self._rows: dict[task.Split, Rows] = {}

    def rows(self, split: task.Split) -> Rows:
        """Return the rows of a split."""
        if split not in self._rows:
            self._rows[split] = Rows(self.read(split))
        return self._rows[split]

    def read(self, split: task.Split) -> Iterator[Row]:
        """Yield the rows of a split; raise ValueError for a row without one of the columns."""
        held_out = "test" if self._data_path else self.hub_eval_split
        source = self._data_path or self.hub[split]
        for where, row in read_rows(source, "train" if split == "train" else held_out):
            for column in self.columns:
                if not isinstance(row.get(column), str):
                    got = f"{column} = {row.get(column)!r:.80}, of {', '.join(map(str, row))}"
                    raise ValueError(
                        f"{where}: {got}; wanted text in column {column!r}. Correct the row"
                    )
            yield {column: row[column] for column in self.columns}

    def size(self, split: task.Split) -> int:
        return len(self.rows(split))

    def problem(self, split: task.Split, index: int) -> Problem:
        row = self.rows(split)[index]
        columns = {"answer": row[self.columns[-1]]}
        if self._is_chat:
            return chat(self.message.format(**row), columns)
        return self.text.format(**row), columns
