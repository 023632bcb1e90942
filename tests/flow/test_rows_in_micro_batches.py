# SPDX-License-Identifier: Apache-2.0
"""Sequences in rows, and groups in micro-batches of rows."""

import numpy as np
import pytest

from tba_jax.flow.bin_packing import most_rows, place


def test_first_fit_takes_the_largest_first():
    places = place([[5, 4], [3, 5]], row_length=8)
    assert places.rows.tolist() == [0, 2, 0, 1]
    assert places.starts.tolist() == [0, 0, 5, 0]
    assert places.num_rows == 3


def test_a_group_that_does_not_fit_is_whole_in_the_next_micro_batch():
    places = place([[1, 1], [1, 1, 1], [1]], row_length=1, micro_batch_rows=4)
    assert places.rows.tolist() == [4, 5, 0, 1, 2, 3] and places.num_rows == 8


@pytest.mark.parametrize("is_packed", [False, True])
def test_nothing_is_cut_or_overlaps_and_the_bound_holds(is_packed):
    rng = np.random.default_rng(0)
    for _ in range(200):
        p, k = rng.integers(1, 9), rng.integers(1, 7)
        m, length = int(rng.integers(k, 4 * k + 1)), int(rng.integers(4, 20)) if is_packed else 1
        lengths = [rng.integers(1, length + 1, rng.integers(1, k + 1)).tolist() for _ in range(p)]
        whole = bool(rng.integers(2))
        places = place(lengths, row_length=length, micro_batch_rows=m if whole else 0)
        taken = np.zeros((places.num_rows, length), int)
        sizes = np.concatenate(lengths)
        for row, start, size in zip(places.rows, places.starts, sizes, strict=True):
            assert start + size <= length
            taken[row, start : start + size] += 1
        assert taken.max() == 1 and taken.sum() == sizes.sum()
        assert places.num_rows <= most_rows(p, k, micro_batch_rows=m, is_whole=whole)
        if whole:
            group = np.repeat(np.arange(p), list(map(len, lengths)))
            for i in range(p):
                assert len(np.unique(places.rows[group == i] // m)) == 1


def test_rows_that_hold_a_prompt_take_only_what_is_behind_it():
    rng = np.random.default_rng(1)
    for _ in range(200):
        p, k, length = rng.integers(1, 9), int(rng.integers(1, 7)), int(rng.integers(6, 30))
        m, whole = int(rng.integers(k, 4 * k + 1)), bool(rng.integers(2))
        prompts = rng.integers(1, length - 2, p).tolist()
        own = [rng.integers(1, length - x + 1, rng.integers(1, k + 1)).tolist() for x in prompts]
        lengths = [[x + y for y in ys] for x, ys in zip(prompts, own, strict=True)]
        size = m if whole else 0
        places = place(lengths, row_length=length, micro_batch_rows=size, prompts=prompts)
        assert places.num_rows <= most_rows(p, k, micro_batch_rows=m, is_whole=whole)
        group = np.repeat(np.arange(p), list(map(len, own)))
        sizes = np.concatenate(own) + np.where(places.leads, np.array(prompts)[group], 0)
        taken = np.zeros((places.num_rows, length), int)
        for row, start, n, i in zip(places.rows, places.starts, sizes, group, strict=True):
            assert start + n <= length
            taken[row, start : start + n] = i + 1 - 100 * taken[row, start : start + n]
        assert taken.min() >= 0 and (taken > 0).sum() == sizes.sum()
        for row in range(places.num_rows):
            # Side by side, a prompt before all responses to it and once.
            there = places.rows == row
            order = np.argsort(places.starts[there])
            begins = places.leads[there][order]
            of_group = group[there][order]
            assert (
                begins.sum() == len(set(of_group)) and (np.diff(of_group)[~begins[1:]] == 0).all()
            )


def test_a_group_that_no_micro_batch_holds_is_refused():
    with pytest.raises(ValueError, match="a group of 5 sequences does not fit the 4 rows"):
        place([[1] * 5, [1] * 4], row_length=1, micro_batch_rows=4)
