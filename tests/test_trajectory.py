# SPDX-License-Identifier: Apache-2.0
"""Padding and stacking."""

import numpy as np
import pytest

from tba_jax.trajectory import (
    Draw,
    Prompt,
    Trajectory,
    bucket_length,
    left_pad,
    length_buckets,
    pack_batch,
)


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


def test_pack_batch_places_every_value():
    prompts = [Prompt(i, "", np.arange(1, n + 1, dtype=np.int32), {}) for i, n in ((0, 3), (1, 2))]
    draws = [
        Draw(
            prompts[0], (make_trajectory([7, 8], reward=1.0), make_trajectory([9])), True, (0, 1), 0
        ),
        Draw(
            prompts[1],
            (make_trajectory([4], version=3), make_trajectory([5, 6, 7])),
            False,
            (2, 3),
            0,
        ),
    ]
    batch = pack_batch(draws, prompt_buckets=(4, 8), response_buckets=(4,), pad_id=0)
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
