# SPDX-License-Identifier: Apache-2.0
"""Bin packing of sequences into rows, and of whole groups into micro-batches of rows.

The algorithm is first fit, with the largest sequence first; equal sizes keep their order. A train
step and this module divide rows into micro-batches by the same `rows_at_once`. Invariants: a
sequence is never cut, and a batch never needs more rows than `most_rows`.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Placements(NamedTuple):
    """Row and start of each sequence, in the order of the given sequences.

    Attributes:
        rows: row of each sequence.
        starts: first position of each sequence in its row.
        num_rows: number of rows.
        leads: whether a copy of the prompt is directly before the sequence; False if the sequence
            uses the copy before another sequence of its group.
    """

    rows: np.ndarray
    starts: np.ndarray
    num_rows: int
    leads: np.ndarray


def rows_at_once(responses: int, responses_per_row: int, multiple: int) -> int:
    """Return the number of rows in a micro-batch of at most `responses` responses; 0 for all rows.

    Args:
        responses: maximum number of responses in a micro-batch; 0: all responses.
        responses_per_row: c, number of responses in a row.
        multiple: divisor of the result: number of devices that divide the rows.
    """
    return max(1, responses // multiple // responses_per_row) * multiple if responses else 0


def most_rows(num_prompts: int, group_size: int, *, micro_batch_rows: int, is_whole: bool) -> int:
    """Return a number of rows that always suffices for p groups of K sequences.

    No sequence is longer than a row. If groups stay whole, a group does not fit a micro-batch of m
    rows only if more than m - K rows are in use, so a micro-batch holds at least m // K groups.

    Args:
        num_prompts, group_size: p and K.
        micro_batch_rows: divisor of the result; at least K if groups stay whole.
        is_whole: whether every group is in a single micro-batch.
    """
    if is_whole:
        return math.ceil(num_prompts / (micro_batch_rows // group_size)) * micro_batch_rows
    return math.ceil(num_prompts * group_size / micro_batch_rows) * micro_batch_rows


def place(
    lengths: Sequence[Sequence[int]],
    *,
    row_length: int,
    micro_batch_rows: int = 0,
    prompts: Sequence[int] | None = None,
) -> Placements:
    """Assign all sequences to rows of `row_length` tokens; return their positions by group.

    Args:
        lengths: lengths of the sequences of each group, at most `row_length`.
        row_length: number of tokens that fit in a row.
        micro_batch_rows: rows of a micro-batch that must hold whole groups; 0: no such limit. With
            several micro-batches, `num_rows` of the result is a multiple of this number.
        prompts: length of the common prefix of each group's sequences. A row has the prefix once,
            before the sequences of the group in that row. None: no shared prefix.
    """
    shared = [0] * len(lengths) if prompts is None else prompts
    if not micro_batch_rows and prompts is None:
        flat = [n for group in lengths for n in group]
        fit = _fit([], flat, row_length, len(flat), 0)
        assert fit is not None, "one row for each sequence always suffices"
        return Placements(fit.rows, fit.starts, len(fit.loads), fit.leads)
    size = micro_batch_rows or sum(map(len, lengths))
    bins: list[list[int]] = []  # used tokens of each row, by micro-batch
    found: dict[int, _Fit] = {}
    for i in sorted(range(len(lengths)), key=lambda i: -sum(lengths[i])):
        if not lengths[i]:
            nowhere = np.zeros(0, np.int64)
            found[i] = _Fit(nowhere, nowhere, [], np.zeros(0, bool))
            continue
        for index in range(len(bins) + 1):
            loads = bins[index] if index < len(bins) else []
            fit = _fit(loads, lengths[i], row_length, size, shared[i])
            if fit is not None:
                bins[index:] = [fit.loads, *bins[index + 1 :]]
                found[i] = fit._replace(rows=fit.rows + index * size)
                break
        else:
            raise ValueError(
                f"a group of {len(lengths[i])} sequences does not fit the {size} rows of a "
                "micro-batch, which must hold whole groups. Set a larger "
                "--config.batch.micro_batch_rows"
            )
    in_order = [found[i] for i in range(len(lengths))]
    return Placements(
        np.concatenate([fit.rows for fit in in_order]),
        np.concatenate([fit.starts for fit in in_order]),
        len(bins[0]) if len(bins) == 1 else len(bins) * size,
        np.concatenate([fit.leads for fit in in_order]),
    )


class _Fit(NamedTuple):
    """Result of a successful fit: `rows`, `starts` and `leads` of `Placements`, and the new loads.

    Attributes:
        loads: number of used tokens of each row.
    """

    rows: np.ndarray
    starts: np.ndarray
    loads: list[int]
    leads: np.ndarray


def _fit(
    loads: Sequence[int], sizes: Sequence[int], capacity: int, most: int, prompt: int
) -> _Fit | None:
    """Place sequences by first fit in rows with `loads` used tokens; None if they do not fit.

    Rows are added, up to `most` rows. Rows that have the prompt already are tried first, because a
    sequence takes `prompt` tokens less in such a row.
    """
    loads, smallest, begin = list(loads), min(sizes), 0
    rows, starts = np.zeros(len(sizes), np.int64), np.zeros(len(sizes), np.int64)
    leads = np.ones(len(sizes), bool)
    holding: dict[int, None] = {}
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        # Skip rows that are too full for all further sequences.
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
