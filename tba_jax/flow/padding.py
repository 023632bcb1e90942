# SPDX-License-Identifier: Apache-2.0
"""Padded lengths of sequences, and packing of sequences into rows and micro-batches of rows.

Lengths and numbers of rows are a small set, because every shape is compiled. Packing is first fit,
with the largest sequence first; equal sizes keep their order. Invariant: a sequence is never cut.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SHORT = 32
"""Number of tokens up to which a sequence is short: padding costs less than another program."""


def bucket_length(length: int, buckets: Sequence[int]) -> int:
    """Return the smallest bucket that holds `length` tokens.

    Raises:
        ValueError: no bucket is large enough.
    """
    for bucket in buckets:
        if length <= bucket:
            return bucket
    raise ValueError(
        f"a sequence of {length} tokens does not fit the largest length bucket {buckets[-1]}; "
        "raise the token limit that gives the buckets, such as task.max_prompt_tokens"
    )


def padded_lengths(max_length: int) -> tuple[int, ...]:
    """Return the lengths that training and decoding compile for, ascending."""
    return length_buckets(max_length, 1 if max_length <= SHORT else 3)


def length_buckets(max_length: int, num_buckets: int) -> tuple[int, ...]:
    """Return `max_length`, its half, its quarter, ..., ascending; all but the last multiples of 8.

    Example: length_buckets(96, 3) == (24, 48, 96).
    """
    halves = row_buckets(max_length, 8, num_buckets)
    return tuple(sorted({min(length, max_length) for length in halves}))


def row_buckets(most: int, multiple: int, num: int) -> tuple[int, ...]:
    """Return up to `num` row counts to compile for, ascending: `most`, its half, its quarter, ...

    Args:
        most: number of rows that always suffices.
        multiple: divisor of the counts, which are rounded up.
        num: maximum number of counts.

    Example: row_buckets(256, 8, 4) == (32, 64, 128, 256).
    """
    return tuple(sorted({math.ceil(most / 2**i / multiple) * multiple for i in range(num)}))


def left_pad(rows: Sequence[np.ndarray], length: int, pad_id: int) -> np.ndarray:
    """Return the rows right-aligned in int32 [b length], with `pad_id` before each."""
    out = np.full((len(rows), length), pad_id, np.int32)
    for i, row in enumerate(rows):
        out[i, length - len(row) :] = row
    return out


@dataclasses.dataclass(frozen=True)
class Padding:
    """The padded lengths of a run.

    Attributes:
        prompt_buckets: ascending prompt lengths in tokens.
        response_buckets: ascending response lengths in tokens.
    """

    prompt_buckets: tuple[int, ...]
    response_buckets: tuple[int, ...]
    pad_id: int


class Placements(NamedTuple):
    """Row and start of each sequence, in the order of the given sequences.

    Attributes:
        rows: row of each sequence.
        starts: first position of each sequence in its row.
        leads: whether a copy of the prompt is directly before the sequence; False if the sequence
            uses the copy before another sequence of its group.
        num_rows: number of rows.
    """

    rows: np.ndarray
    starts: np.ndarray
    leads: np.ndarray
    num_rows: int


def place(
    lengths: Sequence[Sequence[int]],
    row_length: int,
    at_once: int = 0,
    prompts: Sequence[int] | None = None,
) -> Placements:
    """Assign all sequences to rows of `row_length` tokens.

    Args:
        lengths: lengths of the sequences of each group, at most `row_length`.
        row_length: number of tokens that fit in a row.
        at_once: rows of a micro-batch that must hold whole groups; 0: no such limit. With several
            micro-batches, `num_rows` of the result is a multiple of this number.
        prompts: length of the common prefix of each group's sequences. A row has the prefix once,
            before the sequences of the group in that row. None: no shared prefix.

    Raises:
        ValueError: a group does not fit a micro-batch.
    """
    flat = np.array([n for group in lengths for n in group], np.int64)
    group_of = np.repeat(np.arange(len(lengths)), [len(group) for group in lengths])
    parts = [np.arange(len(flat))]
    if at_once or prompts is not None:  # group by group, the largest first
        by_size = sorted(range(len(lengths)), key=lambda i: -sum(lengths[i]))
        parts = [np.flatnonzero(group_of == i) for i in by_size if len(lengths[i])]
    most = at_once or len(flat)
    loads: list[list[int]] = []  # used tokens of each row, by micro-batch
    places = np.zeros((3, len(flat)), np.int64)  # row, start, whether it leads
    for part in parts:
        prompt = 0 if prompts is None else prompts[int(group_of[part[0]])]
        for index, known in enumerate([*loads, []]):
            if (found := _fit(known, flat[part].tolist(), row_length, most, prompt)) is not None:
                own, loads[index : index + 1] = found[0], [found[1]]
                own[0] += index * most
                places[:, part] = own
                break
        else:
            raise ValueError(
                f"a group of {len(part)} sequences does not fit the {most} rows of a micro-batch, "
                "which must hold whole groups. Set a larger --config.batch.micro_batch_rows"
            )
    num_rows = len(loads[0]) if len(loads) == 1 else len(loads) * most
    return Placements(places[0], places[1], places[2].astype(bool), num_rows)


def _fit(
    loads: Sequence[int], sizes: Sequence[int], capacity: int, most: int, prompt: int
) -> tuple[np.ndarray, list[int]] | None:
    """Place sequences by first fit in rows with `loads` used tokens; None if they do not fit.

    Rows are added, up to `most` rows. Rows that have the prompt already are tried first, because a
    sequence takes `prompt` tokens less in such a row.

    Returns:
        ([3 n] row, start and whether it leads, of each sequence; the new loads of all rows).
    """
    found, loads = np.zeros((3, len(sizes)), np.int64), list(loads)
    smallest, begin = min(sizes), 0
    holding: dict[int, None] = {}  # rows with the prompt, in the order of their use
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        # Skip rows that are too full for all further sequences.
        while begin < len(loads) and loads[begin] + smallest > capacity:
            begin += 1
        own = sizes[i] - prompt
        row = next((r for r in holding if loads[r] + own <= capacity), -1)
        if row < 0:
            fitting = (r for r in range(begin, len(loads)) if loads[r] + sizes[i] <= capacity)
            row = next(fitting, len(loads))
        if row == most:
            return None
        if row == len(loads):
            loads.append(0)
        leads = row not in holding
        found[:, i] = row, loads[row], leads
        loads[row] += sizes[i] if leads else own
        if prompt:
            holding[row] = None
    return found, loads
