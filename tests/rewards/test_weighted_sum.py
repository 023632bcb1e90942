# SPDX-License-Identifier: Apache-2.0
"""A sum of rewards: values, parts, and whose failure is whose."""

import math
import types

import numpy as np
import pytest

from tba_jax.rewards.source import RewardFailure, ScoreResult, WeightedSum, part_means, summed


def test_what_one_fails_on_has_no_reward_and_what_one_does_not_apply_to_has():
    first = ScoreResult(
        [None, None, 3.0, None],
        ["reward_timeout", "reward_none", None, "reward_none"],
        "first",
    )
    second = ScoreResult([1.0, 2.0, None, None], [None, None, "reward_nan", "reward_none"], "")
    got = summed(("f", "m"), (first, second), (2.0, 1.0))
    assert got.rewards == [None, 2.0, None, None]
    assert got.reasons == ["reward_timeout", None, "reward_nan", "reward_none"]
    assert got.first_traceback == "first"
    np.testing.assert_array_equal(got.parts["f"], [math.nan, math.nan, 3.0, math.nan])
    np.testing.assert_array_equal(got.parts["m"], [1.0, 2.0, math.nan, math.nan])
    assert part_means(got.parts) == {"reward_part_f": 3.0, "reward_part_m": 1.5}
    # A part that does not apply is nothing to show a traceback for.
    nothing = ScoreResult([None, 1.0], ["reward_none", None], "returned None")
    got = summed(("f", "m"), (nothing, ScoreResult([1.0] * 2, [None] * 2, "")), (1.0, 1.0))
    assert (got.rewards, got.first_traceback) == ([1.0, 2.0], "")


def test_too_many_failures_stop_the_run_with_the_first_traceback():
    def whole(*reasons, **options):
        rewards = [None if reason else 1.0 for reason in reasons]
        result = ScoreResult(rewards, list(reasons), "Traceback of f")
        source = types.SimpleNamespace(score=lambda: result)
        return WeightedSum(("f",), (source,), (2.0,), max_failure_rate=0.25, **options)

    assert whole("reward_error", None, None, None).score().rewards == [None, 2.0, 2.0, 2.0]
    with pytest.raises(RewardFailure, match="f failed on 2 of 4 items") as error:
        whole("reward_error", "reward_nan", None, None).score()
    for text in ("{'reward_error': 1, 'reward_nan': 1}", "max_failure_rate = 0.25", "Traceback"):
        assert text in str(error.value)
    # An environment adds its rewards: a function need not apply.
    none = ("reward_none", "reward_none", None)
    assert whole(*none, is_part=True).score().reasons == list(none)
    with pytest.raises(RewardFailure):
        whole(*none).score()
