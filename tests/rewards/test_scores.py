# SPDX-License-Identifier: Apache-2.0
"""A sum of rewards: values, parts, and whose failure is whose."""

import asyncio
import math

import pytest

from tba_jax.rewards.scores import (
    Completion,
    RewardFailure,
    RewardSource,
    Score,
    WeightedSum,
    part_means,
    summed,
)

LATE, NONE = Score(None, "reward_timeout", "late"), Score(None, "reward_none", "returned None")


@pytest.mark.parametrize(
    ("first", "second", "reward", "reason", "text"),
    [
        (LATE, Score(1.0), None, "reward_timeout", "late"),
        (NONE, LATE, None, "reward_timeout", "late"),
        (NONE, Score(2.0), 2.0, None, ""),  # what does not apply needs no description
        (NONE, NONE, None, "reward_none", "returned None"),
        (Score(3.0), Score(1.0), 7.0, None, ""),
    ],
)
def test_what_one_fails_on_has_no_reward_and_what_does_not_apply_is_left_out(
    first, second, reward, reason, text
):
    got = summed({"f": first, "m": second}, (2.0, 1.0))
    assert got[:3] == (reward, reason, text)
    assert [None if math.isnan(x) else x for x in got.parts.values()] == [first[0], second[0]]


def test_the_mean_of_a_part_is_over_the_responses_to_which_it_applies():
    parts = {"f": [math.nan, math.nan, 3.0], "m": [1.0, 2.0, math.nan], "n": [math.nan]}
    means = part_means(parts)
    assert math.isnan(means.pop("reward_part_n"))
    assert means == {"reward_part_f": 3.0, "reward_part_m": 1.5}


class Fixed(RewardSource):
    def __init__(self, *reasons):
        self.reasons = reasons

    async def score(self, completions):
        return [Score(None, x, "Traceback of f") if x else Score(1.0) for x in self.reasons]


def test_too_many_failures_stop_the_run_with_the_first_traceback():
    def rewards(*reasons):
        whole = WeightedSum({"f": Fixed(*reasons)}, (2.0,), max_failure_rate=0.25)
        completions = [Completion("", "")] * len(reasons)
        return [score.reward for score in asyncio.run(whole.score(completions))]

    assert rewards("reward_error", None, None, None) == [None, 2.0, 2.0, 2.0]
    with pytest.raises(RewardFailure, match="f failed on 2 of 4 responses") as error:
        rewards("reward_error", "reward_nan", None, None)
    for text in ("{'reward_error': 1, 'reward_nan': 1}", "max_failure_rate = 0.25", "Traceback"):
        assert text in str(error.value)
    # A function need not apply.
    assert rewards("reward_none", "reward_none", None) == [None, None, 2.0]
