# SPDX-License-Identifier: Apache-2.0
"""Which row, and where in it: sequences into rows, and whole groups into micro-batches of rows.

It knows sizes alone, no tokens. First fit, the largest first: equal sizes keep their order. Two
invariants stand here: a sequence is never cut, and nothing needs more rows than `most_rows` says.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Places(NamedTuple):
    """Where sequences lie, in the order they were given.

    Attributes:
        rows: the row of each.
        starts: its first position there.
        num_rows: rows that are needed.
    """

    rows: np.ndarray
    starts: np.ndarray
    num_rows: int


def most_rows(num_prompts: int, group_size: int, *, micro_batch_rows: int, is_whole: bool) -> int:
    """Rows that always suffice for p groups of K sequences, each no longer than a row.

    Where groups stay whole, a micro-batch of m rows is left by a group only when it has more than
    m - K rows in use, so it holds m // K groups at least.

    Args:
        num_prompts, group_size: p and K.
        micro_batch_rows: the result is a multiple; at least K where groups stay whole.
        is_whole: groups stay whole in micro-batches.
    """
    if is_whole:
        return math.ceil(num_prompts / (micro_batch_rows // group_size)) * micro_batch_rows
    return math.ceil(num_prompts * group_size / micro_batch_rows) * micro_batch_rows


def place(
    lengths: Sequence[Sequence[int]], *, row_length: int, micro_batch_rows: int = 0
) -> Places:
    """Places of all sequences, group by group, in rows of `row_length`.

    Args:
        lengths: of the sequences of each group; none above `row_length`.
        row_length: what a row holds.
        micro_batch_rows: rows of a micro-batch that must hold a group whole; 0: groups lie anywhere
            and `num_rows` is as small as first fit finds.
    """
    if not micro_batch_rows:
        flat = [n for group in lengths for n in group]
        fit = _fit([], flat, row_length, len(flat))
        assert fit is not None, "as many rows as sequences always suffice"
        return Places(fit.rows, fit.starts, len(fit.loads))
    bins: list[list[int]] = []  # of each micro-batch, what its rows hold
    rows: dict[int, np.ndarray] = {}
    starts: dict[int, np.ndarray] = {}
    for i in sorted(range(len(lengths)), key=lambda i: -sum(lengths[i])):
        for index in range(len(bins) + 1):
            loads = bins[index] if index < len(bins) else []
            fit = _fit(loads, lengths[i], row_length, micro_batch_rows)
            if fit is not None:
                bins[index:] = [fit.loads, *bins[index + 1 :]]
                rows[i], starts[i] = fit.rows + index * micro_batch_rows, fit.starts
                break
    in_order = range(len(lengths))
    return Places(
        np.concatenate([rows[i] for i in in_order]),
        np.concatenate([starts[i] for i in in_order]),
        len(bins) * micro_batch_rows,
    )


class _Fit(NamedTuple):
    """(row and start of each sequence, what the rows then hold)."""

    rows: np.ndarray
    starts: np.ndarray
    loads: list[int]


def _fit(loads: Sequence[int], sizes: Sequence[int], capacity: int, most: int) -> _Fit | None:
    """First fit into rows that hold `loads` and new ones up to `most`; None: they do not fit."""
    loads, smallest, begin = list(loads), min(sizes), 0
    rows, starts = np.zeros(len(sizes), np.int64), np.zeros(len(sizes), np.int64)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        # Rows that are full for all of them are not looked at again.
        while begin < len(loads) and loads[begin] + smallest > capacity:
            begin += 1
        fitting = (r for r in range(begin, len(loads)) if loads[r] + sizes[i] <= capacity)
        row = next(fitting, len(loads))
        if row == most:
            return None
        if row == len(loads):
            loads.append(0)
        rows[i], starts[i] = row, loads[row]
        loads[row] += sizes[i]
    return _Fit(rows, starts, loads)
