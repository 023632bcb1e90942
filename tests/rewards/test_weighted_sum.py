# SPDX-License-Identifier: Apache-2.0
"""A sum of rewards: values, parts, and whose failure is whose."""

import asyncio
import math

import numpy as np
import pytest

from tba_jax.rewards.scores import (
    RewardFailure,
    RewardSource,
    Scores,
    WeightedSum,
    part_means,
    summed,
)


def test_what_one_fails_on_has_no_reward_and_what_one_does_not_apply_to_has():
    first = Scores(
        [None, None, 3.0, None],
        ["reward_timeout", "reward_none", None, "reward_none"],
        "first",
    )
    second = Scores([1.0, 2.0, None, None], [None, None, "reward_nan", "reward_none"], "")
    got = summed({"f": first, "m": second}, (2.0, 1.0))
    assert got.rewards == [None, 2.0, None, None]
    assert got.reasons == ["reward_timeout", None, "reward_nan", "reward_none"]
    assert got.text == "first"
    np.testing.assert_array_equal(got.parts["f"], [math.nan, math.nan, 3.0, math.nan])
    np.testing.assert_array_equal(got.parts["m"], [1.0, 2.0, math.nan, math.nan])
    assert part_means(got.parts) == {"reward_part_f": 3.0, "reward_part_m": 1.5}
    # A part that does not apply is nothing to show a traceback for.
    nothing = Scores([None, 1.0], ["reward_none", None], "returned None")
    got = summed({"f": nothing, "m": Scores([1.0] * 2, [None] * 2)}, (1.0, 1.0))
    assert (got.rewards, got.text) == ([1.0, 2.0], "")


class Fixed(RewardSource):
    def __init__(self, *reasons):
        self.reasons = reasons

    async def score(self, completions):
        rewards = [None if reason else 1.0 for reason in self.reasons]
        return Scores(rewards, self.reasons, "Traceback of f")


def test_too_many_failures_stop_the_run_with_the_first_traceback():
    def score(*reasons):
        whole = WeightedSum({"f": Fixed(*reasons)}, (2.0,), max_failure_rate=0.25)
        return asyncio.run(whole.score(None))

    assert score("reward_error", None, None, None).rewards == [None, 2.0, 2.0, 2.0]
    with pytest.raises(RewardFailure, match="f failed on 2 of 4 responses") as error:
        score("reward_error", "reward_nan", None, None)
    for text in ("{'reward_error': 1, 'reward_nan': 1}", "max_failure_rate = 0.25", "Traceback"):
        assert text in str(error.value)
    # A function need not apply.
    assert score("reward_none", "reward_none", None).rewards == [None, None, 2.0]
