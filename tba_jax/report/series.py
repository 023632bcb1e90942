# SPDX-License-Identifier: Apache-2.0
"""The numbers of metrics.jsonl as columns: what figures are drawn from.

It does not know what the metrics mean. Invariant: a log is read once, as a stream; what stays is
a float of every number, the evaluations, and counts.
"""

import array
import collections
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Record = Mapping[str, Any]


class Metrics:
    """Columns of the lines of metrics.jsonl.

    Args:
        records: its lines, in order; each is looked at once.

    Attributes:
        evaluations: the lines that have figures of an evaluation, as they are.
        staleness: staleness in steps -> number of uses, summed over the run.
        last_step: the highest; 0 without a line.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.evaluations: list[Record] = []
        uses: collections.Counter[int] = collections.Counter()
        self._columns: dict[str, array.array[float]] = {}
        self._num_lines = 0
        for record in records:
            self._add(record)
            for staleness, count in record.get("buffer/staleness_histogram") or ():
                uses[int(staleness)] += int(count)
        self.staleness: Mapping[int, int] = dict(sorted(uses.items()))
        steps = self._values("step")
        self.last_step = int(np.nanmax(steps)) if np.isfinite(steps).any() else 0

    def _add(self, record: Record) -> None:
        columns, num_lines, is_evaluation = self._columns, self._num_lines, False
        for name, value in record.items():
            column = columns.get(name)
            if column is None:
                column = columns[name] = array.array("d")
            if isinstance(value, int | float):
                if len(column) < num_lines:
                    column.extend([math.nan] * (num_lines - len(column)))
                column.append(value)
            if name.startswith("eval/"):
                is_evaluation = True
        if is_evaluation:
            self.evaluations.append(record)
        self._num_lines += 1

    @property
    def names(self) -> Sequence[str]:
        """Everything that a line has, sorted."""
        return sorted(self._columns)

    def _values(self, name: str) -> np.ndarray:
        """float64 [lines], nan where a line has no number of this name."""
        values = np.full(self._num_lines, math.nan)
        column = self._columns.get(name, ())
        values[: len(column)] = column
        return values

    def column(self, x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
        """Values of `x` and `y` of the lines that hold a number for both, as float64 arrays."""
        both = self._values(x), self._values(y)
        is_there = np.isfinite(both[0]) & np.isfinite(both[1])
        return both[0][is_there], both[1][is_there]

    def of_evaluations(self, name: str) -> Iterator[Record]:
        """The evaluations that have a number of this name."""
        return (r for r in self.evaluations if isinstance(r.get(name), int | float))
