# SPDX-License-Identifier: Apache-2.0
"""Padding and stacking."""

import dataclasses

import numpy as np
import pytest

from tba_jax.flow.packing import Packing, Shape, row_buckets
from tba_jax.flow.padding import Padding, bucket_length, length_buckets
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
            True,
            (0, 1),
            (1, 1),
            0,
        ),
        Draw(
            prompts[1],
            (make_trajectory([4], version=3), make_trajectory([5, 6, 7])),
            False,
            (2, 3),
            (1, 1),
            0,
        ),
    ]


def pack(draws, *, prompts=(4,), group_size=2, pad_id=0, response=4, **options):
    padding = Padding(prompts, (response,), pad_id)
    return Packing(len(draws), group_size, padding, 1.0, **options).batch(draws)


def test_a_padded_batch_places_every_value():
    batch = pack(two_draws(), prompts=(4, 8))
    assert batch.tokens.tolist() == [
        [0, 1, 2, 3, 7, 8, 0, 0],
        [0, 1, 2, 3, 9, 0, 0, 0],
        [0, 0, 1, 2, 4, 0, 0, 0],
        [0, 0, 1, 2, 5, 6, 7, 0],
    ]
    assert batch.slots.tolist() == [[1], [2], [3], [4]]
    assert batch.prompt_lengths.tolist() == [[3, 3], [2, 2]]
    assert batch.response_lengths.tolist() == [[2, 1], [1, 3]]
    assert batch.rewards.tolist() == [[1.0, 0.0], [0.0, 0.0]]
    assert batch.versions.tolist() == [[0, 0], [3, 0]]
    assert batch.behavior_token_logprobs[3].tolist() == [[-1.0, -2.0, -3.0, 0.0]]
    assert batch.reference_logprob.tolist() == [[-2.5, -2.5], [-2.5, -2.5]]
    assert batch.weights.tolist() == [[1, 1], [1, 1]] and batch.prompts is None


def weighted_draws():
    """Four responses of which one was drawn three times, and one that was all that was drawn."""
    first, second = two_draws()
    one = first.trajectories[:1]
    return [
        first._replace(trajectories=one, weights=(4,), ids=(0,)),
        second._replace(weights=(3, 1)),
    ]


def test_a_distinct_response_is_one_row_with_a_weight():
    batch = pack(weighted_draws(), group_size=4, has_prompts=True)
    assert batch.weights.tolist() == [[4, 0, 0, 0], [3, 1, 0, 0]]
    assert batch.response_lengths.tolist() == [[2, 0, 0, 0], [1, 3, 0, 0]]
    # The smallest number of rows that holds three.
    assert batch.slots.tolist() == [[1], [5], [6], [0]] and batch.tokens.shape == (4, 8)
    assert (batch.tokens[3] == 0).all() and batch.rewards.tolist()[0] == [1.0, 0, 0, 0]
    assert batch.prompts.tolist() == [[0, 1, 2, 3], [0, 0, 1, 2]]
    filled = pack(weighted_draws(), group_size=4, has_prompts=True, row_multiple=3)
    assert filled.prompts.tolist() == [[0, 1, 2, 3], [0, 0, 1, 2], [0] * 4]
    rows = pack(weighted_draws(), group_size=4, row_length=12)
    assert rows.slots.tolist() == [[1] * 5 + [6] * 5 + [0] * 2, [5] * 3 + [0] * 9]


def test_rows_of_a_micro_batch_are_spread_over_the_batch():
    draws = weighted_draws()
    draws += [draws[0], draws[1]]
    # Micro-batches of four rows; groups of 1, 2, 1 and 2 rows: 1 and 3 are the largest.
    batch = pack(draws, group_size=4, micro_batch_rows=4, is_whole=True)
    whole = batch.slots.reshape(4, 4).T.tolist()
    assert whole == [[5, 6, 13, 14], [1, 9, 0, 0], [0] * 4, [0] * 4]
    batch = pack(draws, group_size=4, micro_batch_rows=2)
    assert batch.slots.reshape(2, 8).T.tolist() == [[1, 5], [6, 9], [13, 14], *[[0, 0]] * 5]


def test_packed_rows_that_all_fit_one_micro_batch_are_no_more_than_they_need_to_be():
    draws = weighted_draws()
    draws += [draws[0], draws[1]]
    # Two sequences of each of 5, 3 and 5 tokens in rows of 8: four rows.
    options = {"group_size": 4, "row_length": 8, "is_whole": True}
    batch = pack(draws, micro_batch_rows=16, **options)
    assert [sorted({*x.tolist()} - {0}) for x in batch.slots] == [[5, 6], [13, 14], [1], [9]]
    assert len(pack(draws, micro_batch_rows=12, **options).slots) == 6
    assert len(pack(draws, micro_batch_rows=4, **options).slots) == 4
    packing = Packing(4, 4, Padding((4,), (4,), 0), 1.0, 8, micro_batch_rows=4, is_whole=True)
    assert packing.shapes == (Shape(1, 4, (1, 2, 4, 16)),)
    # What does not fit one takes all, of which those of padding are not worked on.
    assert len(pack(draws, group_size=4, row_length=8, micro_batch_rows=3).slots) == 18


def test_a_row_of_a_prompt_and_its_responses_places_every_value():
    batch = pack(two_draws(), shares_prompts=True)
    assert batch.tokens.tolist() == [
        [0, 1, 2, 3, 7, 8, 0, 0, 9, 0, 0, 0],
        [0, 0, 1, 2, 4, 0, 0, 0, 5, 6, 7, 0],
    ]
    assert batch.slots.tolist() == [[1, 2], [3, 4]]
    assert batch.behavior_token_logprobs.tolist() == [
        [[-1, -2, 0, 0], [-1, 0, 0, 0]],
        [[-1, 0, 0, 0], [-1, -2, -3, 0]],
    ]
    alone = pack(two_draws())
    for name in ("prompt_lengths", "response_lengths", "rewards", "reference_logprob", "weights"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(alone, name))


def test_rows_are_as_wide_as_distinct_responses_ask_for():
    # Widths 4, 2 and 1 for two prompts; of four responses one and two are distinct.
    packing = Packing(2, 4, Padding((4,), (4,), 0), 1.0, shares_prompts=True)
    assert packing.shapes == (Shape(4, 0, (2,)), Shape(2, 0, (2,)), Shape(1, 0, (2,)))
    assert packing.batch(weighted_draws()).slots.tolist() == [[1, 0], [5, 6]]


def test_a_group_is_divided_only_where_it_does_not_fit_a_micro_batch():
    padding = Padding((4,), (4,), 0)
    # Over two devices: two responses each, so that a group of three has two rows.
    packing = Packing(
        2, 3, padding, 1.0, shares_prompts=True, micro_batch_rows=4, row_multiple=2, is_whole=True
    )
    assert packing.shapes == (Shape(2, 2, (4,)), Shape(1, 4, (8,)))
    draws = weighted_draws()
    three = draws[1].trajectories + draws[0].trajectories
    draws = [d._replace(trajectories=three, weights=(1, 1, 1)) for d in draws]
    batch = packing.batch(draws)
    # Row q of micro-batch b is row 2 q + b.
    assert batch.slots.tolist() == [[1, 2], [4, 5], [3, 0], [6, 0]]
    # No row of three on each device: none is whole where less than a group is worked on at a time.
    parts = dataclasses.replace(packing, micro_batch_rows=2, is_whole=False)
    assert parts.shapes == (Shape(1, 2, (6,)),)


def test_buckets():
    assert length_buckets(96, 3) == (24, 48, 96)
    assert length_buckets(100, 2) == (56, 100)
    assert length_buckets(5, 3) == (5,)
    assert bucket_length(25, (24, 48, 96)) == 48
    with pytest.raises(ValueError, match="97 tokens does not fit the largest length bucket 96"):
        bucket_length(97, (24, 48, 96))


def test_a_packed_batch_places_every_value():
    # Sequences of 5, 4, 3 and 5 tokens: the two of five fill rows with neither of the others.
    batch = pack(two_draws(), row_length=8, pad_id=9)
    assert batch.tokens.tolist() == [
        [1, 2, 3, 7, 8, 1, 2, 4],
        [1, 2, 5, 6, 7, 9, 9, 9],
        [1, 2, 3, 9, 9, 9, 9, 9],
        [9, 9, 9, 9, 9, 9, 9, 9],
    ]
    assert batch.slots.tolist() == [
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
    padded = pack(two_draws())
    of_responses = set(batch._fields) & set(padded._fields) - {"tokens", "slots", "is_sampled"}
    optional = {"prompts", "token_advantages", "places", "experts"}
    for name in of_responses - {"behavior_token_logprobs"} - optional:
        np.testing.assert_array_equal(getattr(batch, name), getattr(padded, name))
        assert getattr(batch, name).dtype == getattr(padded, name).dtype


def test_advantages_lie_where_their_tokens_do():
    def with_own(y):
        return dataclasses.replace(y, token_advantages=y.response_tokens / np.float32(8))

    draws = [
        d._replace(trajectories=tuple(with_own(y) for y in d.trajectories)) for d in two_draws()
    ]
    padded = pack(draws, has_advantages=True)
    of_responses = padded.tokens.reshape(4, 1, 8)[..., 4:]
    np.testing.assert_array_equal(padded.token_advantages, of_responses / 8)
    packed = pack(draws, row_length=8, has_advantages=True)
    is_response = packed.behavior_token_logprobs < 0
    np.testing.assert_array_equal(
        packed.token_advantages, np.where(is_response, packed.tokens / 8, 0)
    )
    with pytest.raises(ValueError, match="a response to prompt 0 has no advantages"):
        pack(two_draws(), has_advantages=True)


def test_packed_responses_follow_one_prompt():
    # Prompts of 3 and 2 tokens with responses of 2 and 1, of 1 and 3: 6 tokens each.
    batch = pack(two_draws(), row_length=8, pad_id=9, shares_prompts=True)
    assert batch.tokens[:2].tolist() == [[1, 2, 3, 7, 8, 9, 9, 9], [1, 2, 5, 6, 7, 4, 9, 9]]
    assert batch.slots[:2].tolist() == [[1, 1, 1, 1, 1, 2, 0, 0], [4, 4, 4, 4, 4, 3, 0, 0]]
    assert batch.positions[:2].tolist() == [[0, 1, 2, 3, 4, 3, 0, 0], [0, 1, 2, 3, 4, 2, 0, 0]]
    assert batch.contexts[:2].tolist() == [[1] * 6 + [0] * 2] * 2
    assert batch.behavior_token_logprobs[:2].tolist() == [
        [0, 0, 0, -1, -2, -1, 0, 0],
        [0, 0, -1, -2, -3, -1, 0, 0],
    ]
    assert pack(two_draws(), row_length=8).contexts is None
    # Both groups in a row of twelve; in rows of five a prompt is there for each response.
    both = pack(two_draws(), row_length=12, shares_prompts=True)
    assert both.contexts[0].tolist() == [1] * 6 + [2] * 6
    apart = pack(two_draws(), row_length=5, shares_prompts=True)
    assert apart.slots.tolist() == [[1] * 5, [2] * 4 + [0], [4] * 5, [3] * 3 + [0] * 2]


def test_marks_of_an_environment_lie_where_its_tokens_do():
    draws = two_draws()
    # Where the policy wrote everything no mask is carried: the compiled step is the same.
    assert pack(draws).is_sampled is None
    assert pack(draws, row_length=8).is_sampled is None
    first, last = draws[1].trajectories
    last = dataclasses.replace(last, is_sampled=np.array([True, False, True]))
    draws[1] = draws[1]._replace(trajectories=(first, last))
    assert pack(draws).is_sampled[:, 0].astype(int).tolist() == [
        [1, 1, 0, 0],
        [1, 0, 0, 0],
        [1, 0, 0, 0],
        [1, 0, 1, 0],
    ]
    assert pack(draws, row_length=8).is_sampled[:3].astype(int).tolist() == [
        [0, 0, 0, 1, 1, 0, 0, 1],
        [0, 0, 1, 0, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 0, 0],
    ]


def test_row_buckets():
    assert row_buckets(256, 8, 4) == (32, 64, 128, 256)
    assert row_buckets(28, 8, 4) == (8, 16, 32)
    padding = Padding((4,), (4,), 0)
    (packed,) = Packing(7, 20, padding, 1.0, row_length=8).shapes
    assert packed == Shape(1, 0, (5, 9, 18, 35, 70, 140))
    # In micro-batches one number, where each of them leaves four rows that hold no group of 20.
    cut = Packing(7, 20, padding, 1.0, micro_batch_rows=24, is_whole=True)
    assert cut.shapes == (Shape(1, 24, (7 * 24,)),)


def test_packing_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="has 5 tokens and does not fit a row of 4"):
        pack(two_draws(), row_length=4)


def test_a_layout_whose_micro_batch_does_not_hold_a_group_is_left_out():
    """Six rows of two responses do not hold the eight rows of a group; rows of one and three do."""
    padding, six = Padding((4,), (4,), 0), {"row_multiple": 6, "micro_batch_rows": 18}
    shared = Packing(32, 16, padding, 1.0, shares_prompts=True, is_whole=True, **six)
    assert [x.responses for x in shared.shapes] == [3, 1]
