# SPDX-License-Identifier: Apache-2.0
"""Layout of draws: where every token lies, and how many rows are compiled and filled."""

import dataclasses

import fake_groups
import numpy as np
import pytest

from tba_jax.flow.layout import RowLayout, most_rows
from tba_jax.flow.padding import Padding, bucket_length, length_buckets, place, row_buckets
from tba_jax.flow.trajectory import Draw, Prompt


def make_trajectory(tokens, **changes):
    given = {"version_max": 0, "sampling_temperature": 1.0}
    given["reference_token_logprobs"] = np.full(len(tokens), -2.5, np.float32)
    return dataclasses.replace(fake_groups.make_trajectory(0, tokens), **given | changes)


def make_draw(size, responses, index=0):
    prompt = Prompt(index, "", np.arange(1, size + 1, dtype=np.int32), {})
    responses = tuple(responses)
    return Draw(prompt, responses, True, tuple(range(len(responses))))


def two_draws():
    return [
        make_draw(3, [make_trajectory([7, 8], reward=1.0), make_trajectory([9])]),
        make_draw(2, [make_trajectory([4], version_min=3), make_trajectory([5, 6, 7])], 1),
    ]


def repeated_draws():
    """Four responses to each prompt: one four times; one three times, of which one equals it."""
    first, second = two_draws()
    one, (four, other) = first.trajectories[0], second.trajectories
    twin = dataclasses.replace(four, reward=2.0)
    return [make_draw(3, [one] * 4), make_draw(2, [four, four, twin, other], 1)]


def layout_of(draws, *, prompts=(4,), pad_id=0, response=4, **options):
    group_size = max(len(d.trajectories) for d in draws)
    padding = Padding(prompts, (response,), pad_id)
    return RowLayout(len(draws), group_size, padding, **options)


def lay_out(draws, **options):
    return layout_of(draws, **options).batch(draws, 3)


def assert_connected(batch, draws):
    """Every token of every response lies at its source, in the row of its prompt."""
    per_row = batch.tokens.shape[1]
    if batch.response_lengths is not None:
        per_row = batch.response_lengths.shape[1] * batch.source.shape[2]
    for i, draw in enumerate(draws):
        for j, y in enumerate(draw.trajectories):
            n = len(y.response_tokens)
            rows, columns = np.divmod(batch.source[i, j, :n], per_row)
            columns = columns + batch.tokens.shape[1] - per_row
            np.testing.assert_array_equal(batch.tokens[rows, columns], y.response_tokens)
            assert (batch.source[i, j, n:] == len(batch.tokens) * per_row).all()
            assert batch.mask[i, j].sum() == n and batch.is_drawn[i, j]
            np.testing.assert_array_equal(batch.behavior[i, j, :n], y.behavior_token_logprobs)


LAYOUTS = [
    {},
    {"shares_prompts": True},
    {"row_length": 12, "shares_prompts": True},
    {"row_length": 8, "micro_batch_rows": 4, "is_whole": True},
]


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
@pytest.mark.parametrize("draws", [two_draws(), repeated_draws()], ids=["two", "repeated"])
def test_every_token_has_its_source(draws, options):
    assert_connected(lay_out(draws, **options), draws)


def test_rows_of_one_response_and_values_of_responses():
    batch = lay_out(two_draws(), prompts=(4, 8), row_multiple=3)
    assert batch.tokens.tolist() == [
        [0, 1, 2, 3, 7, 8, 0, 0],
        [0, 1, 2, 3, 9, 0, 0, 0],
        [0, 0, 1, 2, 4, 0, 0, 0],
        [0, 0, 1, 2, 5, 6, 7, 0],
        *[[0] * 8] * 2,
    ]
    assert batch.prompt_lengths.tolist() == [3, 3, 2, 2, 0, 0]
    assert batch.response_lengths.tolist() == [[2], [1], [1], [3], [0], [0]]
    assert batch.rewards.tolist() == [[1.0, 0.0], [0.0, 0.0]]
    assert batch.staleness.tolist() == [[3, 3], [0, 3]]
    assert batch.reference[1, 1].tolist() == [-2.5, -2.5, -2.5, 0]
    assert batch.missing is None and batch.num_computed == 6


def test_a_response_that_no_version_of_the_policy_sampled_has_no_staleness():
    first, second = two_draws()[0].trajectories
    hot = dataclasses.replace(first, sampling_temperature=2.0)
    given = dataclasses.replace(second, version_min=-1)
    assert lay_out([make_draw(3, [hot, given])]).staleness.tolist() == [[-1, -1]]


def test_rows_of_a_micro_batch_are_spread_over_the_batch():
    # Micro-batches of four rows; groups of 1, 2, 1 and 2 rows: 1 and 3 are the largest.
    batch = lay_out(repeated_draws() * 2, micro_batch_rows=4, is_whole=True)
    part = batch.source[:, :, 0] // 4 % 4
    assert part.tolist() == [[1] * 4, [0] * 4, [1] * 4, [0] * 4]


def test_a_group_is_divided_only_where_it_does_not_fit_a_micro_batch():
    three = [make_trajectory(x) for x in ([4], [5, 6], [7, 8, 9])]
    draws = [make_draw(3, three), make_draw(2, three, 1)]
    # Over two devices: two responses each, so that a group of three has two rows.
    options = {"shares_prompts": True, "micro_batch_rows": 4, "row_multiple": 2, "is_whole": True}
    layout = layout_of(draws, **options)
    assert (layout.responses, layout.at_once, layout.buckets) == (2, 2, (4,))
    batch = layout.batch(draws, 0)
    # Row q of micro-batch b is row 2 q + b.
    assert batch.response_lengths.tolist() == [[1, 2], [1, 2], [3, 0], [3, 0]]
    assert_connected(batch, draws)


def test_rows_that_lack_the_reference_are_listed_in_a_few_sizes():
    def without(y):
        return dataclasses.replace(y, reference_token_logprobs=None)

    first, second = two_draws()
    draws = [first, make_draw(2, [second.trajectories[0], without(second.trajectories[1])], 1)]
    batch = lay_out(draws)
    assert np.isnan(batch.reference[1, 1, :3]).all() and np.isfinite(batch.reference[0]).all()
    assert batch.missing.tolist() == [3]
    assert lay_out(draws, reference="scored").missing.tolist() == [0, 1, 2, 3]
    assert lay_out(draws, reference="none").missing is None


def test_a_response_without_advantages_is_refused_where_the_loss_reads_them():
    with pytest.raises(AssertionError, match="the response has no advantages"):
        lay_out(two_draws(), has_advantages=True)


def test_what_does_not_count_is_not_in_the_mask():
    marked = make_trajectory([5, 6, 7], is_sampled=np.array([True, False, True]))
    batch = lay_out([make_draw(2, [marked, make_trajectory([7])])], uncounted=(7,))
    assert batch.mask[0].astype(int).tolist() == [[1, 0, 0, 0], [0] * 4]
    assert batch.is_drawn.all()


def test_the_largest_batch_has_the_shapes_of_a_batch():
    draws = [make_draw(3, [make_trajectory(range(4 * i, 4 * i + 4)) for i in range(2)])] * 2
    for options in LAYOUTS[:3]:
        layout = layout_of(draws, **options)
        found, planned = layout.batch(draws, 0), layout.largest()
        for name, x in planned._asdict().items():
            y = getattr(found, name)
            assert (x is None) == (y is None) and (x is None or x.shape[1:] == y.shape[1:]), name


def test_numbers_and_lengths_of_rows():
    assert row_buckets(256, 8, 4) == (32, 64, 128, 256)
    assert row_buckets(28, 8, 4) == (8, 16, 32)
    assert RowLayout(7, 20, Padding((4,), (4,), 0), row_length=8).buckets == (5, 9, 18, 35, 70, 140)
    # In micro-batches one number, where each of them leaves four rows that hold no group of 20.
    cut = RowLayout(7, 20, Padding((4,), (4,), 0), micro_batch_rows=24, is_whole=True)
    assert (cut.at_once, cut.buckets) == (24, (7 * 24,))
    assert length_buckets(96, 3) == (24, 48, 96) and length_buckets(5, 3) == (5,)
    assert bucket_length(25, (24, 48, 96)) == 48
    with pytest.raises(ValueError, match="97 tokens does not fit the largest length bucket 96"):
        bucket_length(97, (24, 48, 96))
    with pytest.raises(ValueError, match="has 5 tokens and does not fit a row of 4"):
        lay_out(two_draws(), row_length=4)


@pytest.mark.parametrize("shares", [False, True])
def test_nothing_is_cut_or_overlaps_and_the_bound_holds(shares):
    rng = np.random.default_rng(1)
    for _ in range(200):
        p, k, length = int(rng.integers(1, 9)), int(rng.integers(1, 7)), int(rng.integers(6, 30))
        m, whole = int(rng.integers(k, 4 * k + 1)), bool(rng.integers(2))
        prompts = rng.integers(1, length - 2, p).tolist()
        own = [rng.integers(1, length - x + 1, rng.integers(0, k + 1)).tolist() for x in prompts]
        own[0] = own[0] or [1]
        lengths = [[x + y for y in ys] for x, ys in zip(prompts, own, strict=True)]
        places = place(lengths, length, m if whole else 0, prompts if shares else None)
        assert places.num_rows <= most_rows(p, k, at_once=m, is_whole=whole)
        group = np.repeat(np.arange(p), list(map(len, own)))
        leads = places.leads if shares else np.ones(len(group), bool)
        sizes = np.concatenate(own).astype(int) + np.where(leads, np.array(prompts)[group], 0)
        taken = np.zeros((places.num_rows, length), int)
        for row, start, n in zip(places.rows, places.starts, sizes, strict=True):
            assert start + n <= length
            taken[row, start : start + n] += 1
        assert taken.max() == 1 and taken.sum() == sizes.sum()
        for i in range(p if whole else 0):
            assert len(np.unique(places.rows[group == i] // m)) <= 1
        for row in range(places.num_rows if shares else 0):
            # Side by side, a prompt before all responses to it and once.
            there = places.rows == row
            order = np.argsort(places.starts[there])
            begins, of_group = places.leads[there][order], group[there][order]
            assert begins.sum() == len(set(of_group))
            assert (np.diff(of_group)[~begins[1:]] == 0).all()
