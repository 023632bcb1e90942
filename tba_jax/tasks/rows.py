# SPDX-License-Identifier: Apache-2.0
"""Rows of question-and-answer data sets, from a local JSONL folder or the Hugging Face hub.

It does not know what the columns mean. Invariant: every row it returns has the wanted columns as
text; anything else is an error that names the row.
"""

import functools
import json
import os
from collections.abc import Sequence
from typing import Any, Literal

Split = Literal["train", "test"]
Row = dict[str, str]


def load_rows(
    data_path: str,
    split: Split,
    columns: Sequence[str],
    *,
    hub: tuple[str, str | None],
    hub_split: str = "",
) -> list[Row]:
    """The rows of a split, with the wanted columns.

    Args:
        data_path: folder with train.jsonl and test.jsonl; empty: the hub.
        split: which of the two.
        columns: names that every row must have, as text.
        hub: (data set, configuration) on the hub.
        hub_split: what the split is called there; empty: the same.

    Raises:
        ValueError: no such file, or a row that is not usable: file, line and what was found.
    """
    if not data_path:
        return _hub_rows(hub_split or split, columns, hub)
    path = os.path.join(data_path, f"{split}.jsonl")
    try:
        file = open(path, encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); task.data_path wants a folder with "
            "train.jsonl and test.jsonl"
        ) from None
    with file:
        rows = [
            _parse(line, columns, f"{path}, line {number}")
            for number, line in enumerate(file, start=1)
            if line.strip()
        ]
    if not rows:
        raise ValueError(f"{path} holds no rows; want one JSON object per line")
    return rows


def _parse(line: str, columns: Sequence[str], where: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error}); got {line.strip()[:80]!r}") from None
    return _checked(row, columns, where)


def _checked(row: object, columns: Sequence[str], where: str) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: want an object with {', '.join(columns)}; got {row!r:.80}")
    for column in columns:
        if not isinstance(row.get(column), str):
            got = f"{column} = {row[column]!r:.80}" if column in row else f"keys {sorted(row)}"
            raise ValueError(f"{where}: want text under {column!r}; got {got}")
    return {column: row[column] for column in columns}


def _hub_rows(split: str, columns: Sequence[str], hub: tuple[str, str | None]) -> list[Row]:
    name, configuration = hub
    try:
        import datasets  # pyright: ignore[reportMissingImports]  # an optional dependency
    except ImportError:
        raise ValueError(
            f"task.data_path is empty, and reading {name} from the Hugging Face hub needs the "
            "package `datasets`: pip install 'tba_jax[hub]', or set task.data_path to a folder "
            "with train.jsonl and test.jsonl"
        ) from None
    table = datasets.load_dataset(name, configuration, split=split)
    return [
        _checked(dict(row), columns, f"{name}, {split} row {index}")
        for index, row in enumerate(table)
    ]


class RowTask:
    """A task whose problems are the rows of a published train and test file.

    A subclass says `columns`, `hub` (data set and configuration), where that is not "test" the name
    of the held-out split there, and `problem`. Files are read when
    a split is first used. Invariant: a problem's index is its row in the file.

    Args:
        data_path: folder with train.jsonl and test.jsonl; empty: the hub.
    """

    columns: tuple[str, ...]
    hub: tuple[str, str | None]
    hub_eval_split = "test"

    def __init__(self, data_path: str) -> None:
        self._data_path = data_path

    @staticmethod
    def problem(row: Row) -> tuple[str, dict[str, Any]]:
        """Prompt text of a row, and the columns that the reward needs."""
        raise NotImplementedError

    @functools.cached_property
    def _train(self) -> list[Row]:
        return load_rows(self._data_path, "train", self.columns, hub=self.hub)

    @functools.cached_property
    def _eval(self) -> list[Row]:
        return load_rows(
            self._data_path,
            "test",
            self.columns,
            hub=self.hub,
            hub_split=self.hub_eval_split,
        )

    def train_size(self) -> int:
        """Number of training problems."""
        return len(self._train)

    def eval_size(self) -> int:
        """Number of held-out problems."""
        return len(self._eval)

    def train_problem(self, index: int) -> tuple[str, dict[str, Any]]:
        """Prompt text and reward columns of a training problem."""
        return self.problem(self._train[index])

    def eval_problem(self, index: int) -> tuple[str, dict[str, Any]]:
        """Prompt text and reward columns of a held-out problem."""
        return self.problem(self._eval[index])
