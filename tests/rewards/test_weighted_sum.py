# SPDX-License-Identifier: Apache-2.0
"""A sum of rewards: values, parts, and whose failure is whose."""

import math

import numpy as np

from tba_jax.rewards.source import ScoreResult, summed


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
    # A part that does not apply is nothing to show a traceback for.
    nothing = ScoreResult([None, 1.0], ["reward_none", None], "returned None")
    got = summed(("f", "m"), (nothing, ScoreResult([1.0] * 2, [None] * 2, "")), (1.0, 1.0))
    assert (got.rewards, got.first_traceback) == ([1.0, 2.0], "")
