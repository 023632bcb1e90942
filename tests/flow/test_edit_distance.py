# SPDX-License-Identifier: Apache-2.0
"""Edit distances against the textbook recursion; diversity of known sets."""

import functools

import numpy as np
import pytest

from tba_jax.flow.edit_distance import distinct_n, edit_distances, mean_pairwise_distance


def recursive(a, b):
    @functools.cache
    def distance(i, j):
        if i == 0 or j == 0:
            return i + j
        same = distance(i - 1, j - 1) + (a[i - 1] != b[j - 1])
        return min(distance(i - 1, j) + 1, distance(i, j - 1) + 1, same)

    return distance(len(a), len(b))


def arrays(*rows):
    return [np.array(row, np.int32) for row in rows]


def test_distances_equal_the_recursion():
    rng = np.random.default_rng(0)
    others = [rng.integers(0, 4, rng.integers(0, 9)).astype(np.int32) for _ in range(60)]
    for _ in range(10):
        tokens = rng.integers(0, 4, rng.integers(0, 9)).astype(np.int32)
        expected = [recursive(tuple(tokens.tolist()), tuple(o.tolist())) for o in others]
        assert edit_distances(tokens, others).tolist() == expected
    assert edit_distances(others[0], []).tolist() == []


@pytest.mark.parametrize(
    ("rows", "expected"),
    [([[1, 2]] * 4, 0.0), ([[1, 2], [3, 4], [5, 6]], 1.0), ([[1, 2], [1, 3]], 0.5)],
)
def test_mean_pairwise_distance_of_known_sets(rows, expected):
    assert mean_pairwise_distance(arrays(*rows), max_pairs=100, seed=0) == expected


def test_distinct_n_counts_different_n_grams():
    rows = arrays([1, 2, 3], [1, 2, 4])
    assert distinct_n(rows, 1) == pytest.approx(4 / 6)
    assert distinct_n(rows, 2) == pytest.approx(3 / 4)
    assert distinct_n(rows, 5) == 0.0
