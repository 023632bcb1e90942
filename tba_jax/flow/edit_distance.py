# SPDX-License-Identifier: Apache-2.0
"""Levenshtein distances between token sequences, a measure of diversity without a model."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int


def edit_distances(
    tokens: Int[np.ndarray, " m"], others: Sequence[Int[np.ndarray, " _"]]
) -> Int[np.ndarray, " n"]:
    """Return the edit distance (insert, delete, replace) from `tokens` to each of `others`.

    The dynamic programs of all n sequences advance together by one token of `tokens`. This takes
    O(m) array operations on [n, longest].
    """
    lengths = np.array([len(other) for other in others], np.int64)
    width = int(lengths.max(initial=0))
    table = np.full((len(others), width), -1, np.int64)  # -1 is no token
    for row, other in zip(table, others, strict=True):
        row[: len(other)] = other
    columns = np.arange(width + 1)
    distance = np.broadcast_to(columns, (len(others), width + 1)).copy()
    for i, token in enumerate(tokens.tolist()):
        replaced = distance[:, :-1] + (table != token)
        new = np.minimum(distance[:, 1:] + 1, replaced)
        new = np.concatenate([np.full((len(others), 1), i + 1), new], axis=1)
        # Insertions chain along the row: min over j' <= j of new[j'] + (j - j').
        distance = np.minimum.accumulate(new - columns, axis=1) + columns
    return distance[np.arange(len(others)), lengths]


def mean_pairwise_distance(
    rows: Sequence[Int[np.ndarray, " _"]], *, max_pairs: int, seed: int
) -> float:
    """Return the mean over pairs of rows of edit distance / length of the longer row.

    Args:
        max_pairs: if there are more pairs, a sample of about this size is used.

    Returns:
        A number in [0, 1], 0 if all rows are equal; nan for fewer than two rows.
    """
    n = len(rows)
    if n < 2:
        return float("nan")
    order = np.random.default_rng(seed).permutation(n)
    # Compare each row with the next rows in a random circular order: all pairs are equally likely.
    per_row = max(1, min(n // 2, max_pairs // n))
    total = 0.0
    for i in range(n):
        others = [rows[order[(i + j) % n]] for j in range(1, per_row + 1)]
        row = rows[order[i]]
        longest = np.maximum([len(other) for other in others], max(len(row), 1))
        total += float((edit_distances(row, others) / longest).mean())
    return total / n


def distinct_n(rows: Sequence[Int[np.ndarray, " _"]], n: int) -> float:
    """Return the share of distinct n-grams among all n-grams; 0 if every row is shorter than n."""
    grams = [tuple(row[i : i + n].tolist()) for row in rows for i in range(len(row) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0
