# SPDX-License-Identifier: Apache-2.0
"""Padded lengths of sequences: a small set, because every shape is compiled.

Invariant: a sequence is never truncated.
"""

import dataclasses
from collections.abc import Sequence

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
    buckets = {max_length}
    length = max_length
    for _ in range(num_buckets - 1):
        length = -(-length // 2)
        buckets.add(min(max_length, -(-length // 8) * 8))
    return tuple(sorted(buckets))


def left_pad(rows: Sequence[np.ndarray], length: int, pad_id: int) -> np.ndarray:
    """Return the rows right-aligned in int32 [b length], with `pad_id` before each."""
    out = np.full((len(rows), length), pad_id, np.int32)
    for i, row in enumerate(rows):
        if len(row):
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

    @property
    def num_shapes(self) -> int:
        """Number of pairs of padded lengths."""
        return len(self.prompt_buckets) * len(self.response_buckets)
