# SPDX-License-Identifier: Apache-2.0
"""The numbers of metrics.jsonl as columns.

Invariant: a log is read once, as a stream. Only one float for each value, the evaluations and
counts stay in memory.
"""

import array
import collections
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Record = Mapping[str, Any]


class _Table:
    """Lines with the same names in the same order; a run writes few kinds of lines.

    Attributes:
        names: name -> position in a row.
        has_evaluation: whether some names are metrics of an evaluation.
        values: float64, one row for each line; nan for values that are not numbers.
        lines: index of each line in the log.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = {name: i for i, name in enumerate(names)}
        self.has_evaluation = any(name.startswith("eval/") for name in names)
        self.values = array.array("d")
        self.lines = array.array("q")

    def add(self, record: Record, line: int) -> None:
        self.values.extend(
            [v if isinstance(v, (int, float)) else math.nan for v in record.values()]
        )
        self.lines.append(line)

    def column(self, name: str) -> np.ndarray:
        return np.array(self.values).reshape(-1, len(self.names))[:, self.names[name]]


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
        self._tables: dict[tuple[str, ...], _Table] = {}
        self._num_lines = 0
        for record in records:
            self._add(record)
            for staleness, count in record.get("buffer/staleness_histogram") or ():
                uses[int(staleness)] += int(count)
        self.staleness: Mapping[int, int] = dict(sorted(uses.items()))
        steps = self._values("step")
        self.last_step = int(np.nanmax(steps)) if np.isfinite(steps).any() else 0

    def _add(self, record: Record) -> None:
        names = tuple(record)
        table = self._tables.get(names)
        if table is None:
            table = self._tables[names] = _Table(names)
        table.add(record, self._num_lines)
        if table.has_evaluation:
            self.evaluations.append(record)
        self._num_lines += 1

    @property
    def names(self) -> Sequence[str]:
        """Return all names in the log, sorted."""
        return sorted({name for names in self._tables for name in names})

    def _values(self, name: str) -> np.ndarray:
        """Return the numbers of this name, float64 [lines]; nan for lines without one."""
        values = np.full(self._num_lines, math.nan)
        for table in self._tables.values():
            if name in table.names:
                values[np.array(table.lines)] = table.column(name)
        return values

    def column(self, x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the values of `x` and `y` in lines with numbers for both, as float64 arrays."""
        both = self._values(x), self._values(y)
        is_there = np.isfinite(both[0]) & np.isfinite(both[1])
        return both[0][is_there], both[1][is_there]

    def of_evaluations(self, name: str) -> Iterator[Record]:
        """Return the evaluations that have a number of this name."""
        return (r for r in self.evaluations if isinstance(r.get(name), int | float))
