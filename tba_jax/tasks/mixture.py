# SPDX-License-Identifier: Apache-2.0
"""Several data sets of the user as one task, with a share of the prompts and metrics for each set.

In an epoch every row of every set occurs at least once. If a set is smaller than its share, its
rows occur several times. Every row has a column `data_set`, the name of its set, and the columns of
all sets, with None for columns that its own set lacks.
"""

import bisect
import functools
import itertools
import math
import os
from collections.abc import Sequence
from typing import NamedTuple

from tba_jax.tasks.chats import Problem
from tba_jax.tasks.custom import Custom

COLUMN = "data_set"


class DataSet(NamedTuple):
    """One of several data sets; weight 0 means a share in proportion to its number of rows."""

    path: str
    weight: float


def data_sets(data_path: str) -> list[DataSet]:
    """Return the data sets that `task.data_path` names.

        data_sets("a.jsonl:0.7,b.jsonl:0.3") == [("a.jsonl", 0.7), ("b.jsonl", 0.3)]

    Raises:
        ValueError: only some data sets have a weight, or a weight is not above 0.
    """
    if os.path.exists(data_path) or "," not in data_path:
        return [DataSet(data_path, 0.0)]
    found = [_data_set(part.strip()) for part in data_path.split(",")]
    if len({weight == 0 for _, weight in found}) > 1:
        raise ValueError(
            f"task.data_path={data_path}: some data sets have a weight and some have none. Write "
            'for example --config.task.data_path="a.jsonl:0.7,b.jsonl:0.3"'
        )
    return found


def _data_set(text: str) -> DataSet:
    path, _, weight = text.rpartition(":")
    try:
        number = float(weight)
    except ValueError:
        return DataSet(text, 0.0)
    if not path or not 0 < number < math.inf:
        raise ValueError(f"task.data_path: {path!r} has weight {weight}. Give a weight above 0")
    return DataSet(path, number)


class Mixture:
    """The task `custom` with several data sets.

    Args:
        sets: two or more data sets.
        num_held_out: number of rows to hold out in all, divided by the weights, if a set has no
            test split.

    Raises:
        ValueError: as in `Custom`; or two sets have the same name.
    """

    name, reward, metric = Custom.name, Custom.reward, Custom.metric
    response_kinds: tuple[str, ...] = ()

    def __init__(
        self, sets: Sequence[DataSet], num_held_out: int, chat: bool, columns: str = ""
    ) -> None:
        names = (os.path.basename(path.rstrip("/")) for path, _ in sets)
        self.data_sets = tuple(os.path.splitext(name)[0] for name in names)
        if len({*self.data_sets}) < len(sets):
            raise ValueError(
                f"task.data_path: data sets are named {', '.join(self.data_sets)} in metrics, and "
                "two have the same name. Rename a file"
            )
        total = sum(weight for _, weight in sets)
        self._shares = [weight / total if total else 1 / len(sets) for _, weight in sets]
        self._is_weighted = bool(total)
        self._tasks = [
            Custom(path, max(1, round(share * num_held_out)), chat, columns)
            for (path, _), share in zip(sets, self._shares, strict=True)
        ]

    @functools.cached_property
    def _ends(self) -> list[int]:
        """Number of rows of an epoch up to the end of each data set."""
        sizes = [task.train_size() for task in self._tasks]
        most = max(n / share for n, share in zip(sizes, self._shares, strict=True))
        if self._is_weighted:
            sizes = [max(n, round(x * most)) for n, x in zip(sizes, self._shares, strict=True)]
        return [*itertools.accumulate(sizes)]

    @functools.cached_property
    def _eval_places(self) -> list[tuple[int, int]]:
        """Data set and index of each held-out row; the data sets alternate."""
        sizes = [task.eval_size() for task in self._tasks]
        return [(s, i) for i in range(max(sizes)) for s, size in enumerate(sizes) if i < size]

    @functools.cached_property
    def _columns(self) -> dict[str, None]:
        """Names of the columns of all data sets, as the keys of a dict."""
        firsts = [task.train_problem(0) for task in self._tasks]
        columns = {name: None for _, own in firsts for name in own}
        if COLUMN in columns:
            raise ValueError(
                f"task.data_path: a column {COLUMN!r} would hide the name of a row's data set. "
                f'Rename it, for example --config.task.columns="source={COLUMN}"'
            )
        texts = [isinstance(prompt, str) for prompt, _ in firsts]
        if len({*texts}) > 1:
            raise ValueError(
                f"task.data_path: prompts of {self.data_sets[texts.index(True)]} are texts and "
                f"those of {self.data_sets[texts.index(False)]} are chat messages. Use one form, "
                "or set --config.task.chat=True"
            )
        return columns

    def most_held_out(self, share: float) -> int:
        """Return the most rows that can be held out without using more than `share` of any set."""
        sizes = [task.train_size() + task.eval_size() for task in self._tasks]
        return max(1, min(int(n * share / of) for n, of in zip(sizes, self._shares, strict=True)))

    def train_size(self) -> int:
        return self._ends[-1]

    def eval_size(self) -> int:
        return len(self._eval_places)

    def train_problem(self, index: int) -> Problem:
        number = bisect.bisect_right(self._ends, index)
        task, first = self._tasks[number], self._ends[number - 1] if number else 0
        return self._problem(number, task.train_problem((index - first) % task.train_size()))

    def eval_problem(self, index: int) -> Problem:
        number, at = self._eval_places[index]
        return self._problem(number, self._tasks[number].eval_problem(at))

    def _problem(self, number: int, problem: Problem) -> Problem:
        prompt, columns = problem
        return prompt, {**self._columns, **columns, COLUMN: self.data_sets[number]}

    def response_kind(self, text: str) -> None:
        del text


def custom_task(
    data_path: str, num_held_out: int, chat: bool, columns: str = ""
) -> Custom | Mixture:
    """Return the task `custom` for one or several data sets, as in `data_sets`.

    Raises:
        ValueError: as in `data_sets`, `Custom` and `Mixture`.
    """
    sets = data_sets(data_path)
    if len(sets) == 1:
        return Custom(data_path, num_held_out, chat, columns)
    return Mixture(sets, num_held_out, chat, columns)
