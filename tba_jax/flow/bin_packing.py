# SPDX-License-Identifier: Apache-2.0
"""Bin packing of pieces into rows, and of whole groups into micro-batches of rows.

The algorithm is first fit, with the largest piece first; equal sizes keep their order. Invariant: a
piece is never cut.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Placements(NamedTuple):
    """Row and start of each piece, in the order of the given pieces.

    Attributes:
        rows: row of each piece.
        starts: first position of each piece in its row.
        num_rows: number of rows.
        leads: whether a copy of the prompt is directly before the piece; False if the piece uses
            the copy before another piece of its group.
        piece_of: index of the piece of each sequence, where pieces have several sequences.
    """

    rows: np.ndarray
    starts: np.ndarray
    num_rows: int
    leads: np.ndarray
    piece_of: Sequence[int] = ()


def place(
    lengths: Sequence[Sequence[int]],
    row_length: int,
    at_once: int = 0,
    prompts: Sequence[int] | None = None,
) -> Placements:
    """Assign all pieces to rows of `row_length` tokens.

    Args:
        lengths: lengths of the pieces of each group, at most `row_length`.
        row_length: number of tokens that fit in a row.
        at_once: rows of a micro-batch that must hold whole groups; 0: no such limit. With several
            micro-batches, `num_rows` of the result is a multiple of this number.
        prompts: length of the common prefix of each group's pieces. A row has the prefix once,
            before the pieces of the group in that row. None: no shared prefix.

    Raises:
        ValueError: a group does not fit a micro-batch.
    """
    total = sum(map(len, lengths))
    rows, starts = np.zeros(total, np.int64), np.zeros(total, np.int64)
    leads = np.ones(total, bool)
    first = np.cumsum([0, *map(len, lengths)])
    # Without a common prefix or whole groups, pieces of all groups are placed by their length.
    is_free = not at_once and prompts is None
    parts = (
        [list(range(total))]
        if is_free
        else [
            list(range(first[i], first[i + 1]))
            for i in sorted(range(len(lengths)), key=lambda i: -sum(lengths[i]))
        ]
    )
    group_of = np.repeat(np.arange(len(lengths)), [len(x) for x in lengths])
    flat = [n for group in lengths for n in group]
    most = at_once or total
    bins: list[list[int]] = [[]]  # used tokens of each row, by micro-batch
    for part in (x for x in parts if x):
        shared = 0 if prompts is None else prompts[group_of[part[0]]]
        for index in range(len(bins) + 1):
            if index == len(bins):
                bins.append([])
            fit = _fit(bins[index], [flat[i] for i in part], row_length, most, shared)
            if fit is not None:
                bins[index] = fit.loads
                rows[part], starts[part], leads[part] = (
                    index * most + fit.rows,
                    fit.starts,
                    fit.leads,
                )
                break
        else:
            raise ValueError(
                f"a group of {len(part)} sequences does not fit the {most} rows of a micro-batch, "
                "which must hold whole groups. Set a larger --config.batch.micro_batch_rows"
            )
    num_rows = len(bins[0]) if len(bins) == 1 else len(bins) * most
    return Placements(rows, starts, num_rows, leads)


class _Fit(NamedTuple):
    """Result of a successful fit: `rows`, `starts` and `leads` of `Placements`, and new loads."""

    rows: np.ndarray
    starts: np.ndarray
    loads: list[int]
    leads: np.ndarray


def _fit(
    loads: Sequence[int], sizes: Sequence[int], capacity: int, most: int, prompt: int
) -> _Fit | None:
    """Place pieces by first fit in rows with `loads` used tokens; None if they do not fit.

    Rows are added, up to `most` rows. Rows that have the prompt already are tried first, because a
    piece takes `prompt` tokens less in such a row.
    """
    loads, smallest, begin = list(loads), min(sizes), 0
    rows, starts = np.zeros(len(sizes), np.int64), np.zeros(len(sizes), np.int64)
    leads = np.ones(len(sizes), bool)
    holding: dict[int, None] = {}
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        # Skip rows that are too full for all further pieces.
        while begin < len(loads) and loads[begin] + smallest > capacity:
            begin += 1
        own = sizes[i] - prompt
        row = next((r for r in holding if loads[r] + own <= capacity), -1) if prompt else -1
        if row < 0:
            fitting = (r for r in range(begin, len(loads)) if loads[r] + sizes[i] <= capacity)
            row = next(fitting, len(loads))
        if row == most:
            return None
        if row == len(loads):
            loads.append(0)
        rows[i], starts[i], leads[i] = row, loads[row], row not in holding
        loads[row] += sizes[i] if leads[i] else own
        if prompt:
            holding[row] = None
    return _Fit(rows, starts, loads, leads)
