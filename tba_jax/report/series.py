# SPDX-License-Identifier: Apache-2.0
"""The numbers of metrics.jsonl as columns.

Invariant: a log is read once, as a stream. Only its numbers, evaluations and counts stay in memory.
"""

import array
import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Record = Mapping[str, Any]
_Column = tuple["array.array[int]", "array.array[float]"]  # index of each line; its value


class Metrics:
    """Columns of the lines of metrics.jsonl.

    Args:
        records: lines of the log in order; each is read once.

    Attributes:
        evaluations: lines with metrics of an evaluation, unchanged.
        staleness: staleness in steps -> number of uses, summed over the run.
        last_step: highest step; 0 without a line.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.evaluations: list[Record] = []
        uses: collections.Counter[int] = collections.Counter()
        self._columns: dict[str, _Column] = collections.defaultdict(
            lambda: (array.array("q"), array.array("d"))
        )
        for line, record in enumerate(records):
            for name, value in record.items():
                if isinstance(value, int | float):
                    lines, values = self._columns[name]
                    lines.append(line)
                    values.append(value)
            if any(name.startswith("eval/") for name in record):
                self.evaluations.append(record)
            for staleness, count in record.get("buffer/staleness_histogram") or ():
                uses[int(staleness)] += int(count)
        self.staleness: Mapping[int, int] = dict(sorted(uses.items()))
        steps = self._columns["step"][1] if "step" in self._columns else []
        self.last_step = int(max(steps, default=0))

    @property
    def names(self) -> Sequence[str]:
        """Return the names of all numbers in the log, sorted."""
        return sorted(self._columns)

    def column(self, x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the values of `x` and `y` in lines with numbers for both, as float64 arrays."""
        if x not in self._columns or y not in self._columns:
            return np.zeros(0), np.zeros(0)
        (x_lines, x_values), (y_lines, y_values) = self._columns[x], self._columns[y]
        _, i, j = np.intersect1d(x_lines, y_lines, assume_unique=True, return_indices=True)
        return np.array(x_values)[i], np.array(y_values)[j]

    def of_evaluations(self, name: str) -> Iterator[Record]:
        """Return the evaluations that have a number of this name."""
        return (r for r in self.evaluations if isinstance(r.get(name), int | float))
