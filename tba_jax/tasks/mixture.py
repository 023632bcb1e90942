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

from tba_jax.tasks.custom import Custom
from tba_jax.tasks.task import Problem, Split, Task

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
    found = []
    for part in map(str.strip, data_path.split(",")):
        path, _, text = part.rpartition(":")
        try:
            weight = float(text)
        except ValueError:
            found.append(DataSet(part, 0.0))
            continue
        if not path or not 0 < weight < math.inf:
            raise ValueError(f"task.data_path: {path!r} has weight {text}. Give a weight above 0")
        found.append(DataSet(path, weight))
    if len({weight == 0 for _, weight in found}) > 1:
        raise ValueError(
            f"task.data_path={data_path}: some data sets have a weight and some have none. Write "
            'for example --config.task.data_path="a.jsonl:0.7,b.jsonl:0.3"'
        )
    return found


class Mixture(Task):
    """The task `custom` with several data sets.

    Args:
        sets: two or more data sets.
        num_held_out: number of rows to hold out in all, divided by the weights, if a set has no
            test split.

    Raises:
        ValueError: as in `Custom`; or two sets have the same name.
    """

    name = Custom.name

    def __init__(
        self, sets: Sequence[DataSet], num_held_out: int, chat: bool, columns: str
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
        sizes = [task.size("train") for task in self._tasks]
        most = max(n / share for n, share in zip(sizes, self._shares, strict=True))
        if self._is_weighted:
            sizes = [max(n, round(x * most)) for n, x in zip(sizes, self._shares, strict=True)]
        return [*itertools.accumulate(sizes)]

    @functools.cached_property
    def _eval_places(self) -> list[tuple[int, int]]:
        """Data set and index of each held-out row; the data sets alternate."""
        sizes = [task.size("eval") for task in self._tasks]
        return [(s, i) for i in range(max(sizes)) for s, size in enumerate(sizes) if i < size]

    @functools.cached_property
    def _columns(self) -> dict[str, None]:
        """Names of the columns of all data sets, as the keys of a dict."""
        firsts = [task.problem("train", 0) for task in self._tasks]
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
        sizes = [task.size("train") + task.size("eval") for task in self._tasks]
        return max(1, min(int(n * share / of) for n, of in zip(sizes, self._shares, strict=True)))

    def size(self, split: Split) -> int:
        return self._ends[-1] if split == "train" else len(self._eval_places)

    def problem(self, split: Split, index: int) -> Problem:
        if split == "train":
            number = bisect.bisect_right(self._ends, index)
            index -= self._ends[number - 1] if number else 0
            index %= self._tasks[number].size("train")
        else:
            number, index = self._eval_places[index]
        prompt, columns = self._tasks[number].problem(split, index)
        return prompt, {**self._columns, **columns, COLUMN: self.data_sets[number]}
