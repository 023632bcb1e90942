# SPDX-License-Identifier: Apache-2.0
"""Padding and stacking."""

import dataclasses

import numpy as np
import pytest

from tba_jax.flow.packing import pack_batch, pack_rows, row_buckets
from tba_jax.flow.padding import Padding, bucket_length, left_pad, length_buckets
from tba_jax.flow.trajectory import Draw, Prompt, Trajectory


def make_trajectory(tokens, *, reward=0.0, version=0, prompt_id=0) -> Trajectory:
    tokens = np.array(tokens, np.int32)
    return Trajectory(
        prompt_id=prompt_id,
        response_tokens=tokens,
        reward=reward,
        reward_parts={},
        behavior_token_logprobs=-np.arange(1, len(tokens) + 1, dtype=np.float32),
        reference_logprob=-2.5,
        version_min=version,
        version_max=version,
        searcher=0,
        round=0,
        sampling_temperature=1.0,
        finish_reason="eos",
    )


def two_draws():
    prompts = [Prompt(i, "", np.arange(1, n + 1, dtype=np.int32), {}) for i, n in ((0, 3), (1, 2))]
    return [
        Draw(
            prompts[0],
            (make_trajectory([7, 8], reward=1.0), make_trajectory([9])),
            (1, 1),
            True,
            (0, 1),
            0,
        ),
        Draw(
            prompts[1],
            (make_trajectory([4], version=3), make_trajectory([5, 6, 7])),
            (1, 1),
            False,
            (2, 3),
            0,
        ),
    ]


def test_pack_batch_places_every_value():
    batch = pack_batch(two_draws(), Padding((4, 8), (4,), 0))
    assert batch.tokens.tolist() == [
        [[0, 1, 2, 3, 7, 8, 0, 0], [0, 1, 2, 3, 9, 0, 0, 0]],
        [[0, 0, 1, 2, 4, 0, 0, 0], [0, 0, 1, 2, 5, 6, 7, 0]],
    ]
    assert batch.prompt_lengths.tolist() == [[3, 3], [2, 2]]
    assert batch.response_lengths.tolist() == [[2, 1], [1, 3]]
    assert batch.rewards.tolist() == [[1.0, 0.0], [0.0, 0.0]]
    assert batch.versions.tolist() == [[0, 0], [3, 0]]
    assert batch.behavior_token_logprobs[1, 1].tolist() == [-1.0, -2.0, -3.0, 0.0]
    assert batch.reference_logprob.tolist() == [[-2.5, -2.5], [-2.5, -2.5]]


def test_buckets():
    assert length_buckets(96, 3) == (24, 48, 96)
    assert length_buckets(100, 2) == (56, 100)
    assert length_buckets(5, 3) == (5,)
    assert bucket_length(25, (24, 48, 96)) == 48
    with pytest.raises(ValueError, match="97 tokens does not fit the largest length bucket 96"):
        bucket_length(97, (24, 48, 96))


def test_left_pad_of_an_empty_row():
    assert left_pad([np.array([], np.int32), np.array([1, 2])], 3, 9).tolist() == [
        [9, 9, 9],
        [9, 1, 2],
    ]


def test_pack_rows_places_every_value():
    # Sequences of 5, 4, 3 and 5 tokens: the two of five fill rows with neither of the others.
    batch = pack_rows(two_draws(), row_length=8, row_buckets=(2, 4), pad_id=9)
    assert batch.tokens.tolist() == [
        [1, 2, 3, 7, 8, 1, 2, 4],
        [1, 2, 5, 6, 7, 9, 9, 9],
        [1, 2, 3, 9, 9, 9, 9, 9],
        [9, 9, 9, 9, 9, 9, 9, 9],
    ]
    assert batch.segments.tolist() == [
        [1, 1, 1, 1, 1, 3, 3, 3],
        [4, 4, 4, 4, 4, 0, 0, 0],
        [2, 2, 2, 2, 0, 0, 0, 0],
        [0] * 8,
    ]
    assert batch.positions.tolist() == [
        [0, 1, 2, 3, 4, 0, 1, 2],
        [0, 1, 2, 3, 4, 0, 0, 0],
        [0, 1, 2, 3, 0, 0, 0, 0],
        [0] * 8,
    ]
    assert batch.behavior_token_logprobs.tolist() == [
        [0, 0, 0, -1, -2, 0, 0, -1],
        [0, 0, -1, -2, -3, 0, 0, 0],
        [0, 0, 0, -1, 0, 0, 0, 0],
        [0] * 8,
    ]
    padded = pack_batch(two_draws(), Padding((4,), (4,), 0))
    for name in ("prompt_lengths", "response_lengths", "rewards", "reference_logprob", "versions"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(padded, name))
        assert getattr(batch, name).dtype == getattr(padded, name).dtype


def test_marks_of_an_environment_lie_where_its_tokens_do():
    draws = two_draws()
    padding = Padding((4,), (4,), 0)
    rows = {"row_length": 8, "row_buckets": (3,), "pad_id": 0}
    # Where the policy wrote everything no mask is carried: the compiled step is the same.
    assert pack_batch(draws, padding).is_action is None
    assert pack_rows(draws, **rows).is_action is None
    first, last = draws[1].trajectories
    last = dataclasses.replace(last, is_action=np.array([True, False, True]))
    draws[1] = draws[1]._replace(trajectories=(first, last))
    assert pack_batch(draws, padding).is_action.astype(int).tolist() == [
        [[1, 1, 0, 0], [1, 0, 0, 0]],
        [[1, 0, 0, 0], [1, 0, 1, 0]],
    ]
    assert pack_rows(draws, **rows).is_action.astype(int).tolist() == [
        [0, 0, 0, 1, 1, 0, 0, 1],
        [0, 0, 1, 0, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 0, 0],
    ]


def test_packed_rows_hold_all_tokens_with_little_padding():
    rng = np.random.default_rng(0)
    prompts = [Prompt(i, "", rng.integers(1, 9, 20).astype(np.int32), {}) for i in range(16)]
    draws = [
        Draw(
            prompt,
            tuple(make_trajectory(rng.integers(1, 9, rng.integers(5, 100))) for _ in range(8)),
            (1,) * 8,
            True,
            tuple(range(8)),
            0,
        )
        for prompt in prompts
    ]
    batch = pack_rows(draws, row_length=128, row_buckets=row_buckets(128, 4), pad_id=0)
    tokens = (batch.prompt_lengths + batch.response_lengths).sum()
    assert (batch.segments > 0).sum() == tokens
    assert np.bincount(batch.segments.ravel())[1:].tolist() == (
        (batch.prompt_lengths + batch.response_lengths).ravel().tolist()
    )
    # Up to an eighth by the number of rows, and what first-fit decreasing leaves.
    assert tokens / batch.tokens.size > 0.8
    # Lengths are uniform, so every other token of padded rows is padding.
    padded = pack_batch(draws, Padding((20,), (99,), 0))
    assert tokens / padded.tokens.size < 0.65


def test_row_buckets():
    assert row_buckets(16, 2) == (2, 4, 6, 8, 10, 12, 14, 16)
    assert row_buckets(5, 3) == (3, 6)
    buckets = row_buckets(512, 1)
    assert buckets[-1] == 512 and len(buckets) < 50
    assert all(b <= max(a + 1, a * 9 / 8) for a, b in zip(buckets, buckets[1:], strict=False))


def test_packing_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="has 5 tokens and does not fit a row of 4"):
        pack_rows(two_draws(), row_length=4, row_buckets=(4,), pad_id=0)
