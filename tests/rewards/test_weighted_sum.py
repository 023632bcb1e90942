# SPDX-License-Identifier: Apache-2.0
"""A sum of rewards: values, parts, and whose failure is whose."""

import math

import numpy as np

from tba_jax.rewards.pool import RewardPool
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


def test_a_function_that_applies_to_nothing_is_no_failure_beside_another_source(tmp_path):
    path = tmp_path / "f.py"
    path.write_text("def nothing(completions, **kwargs):\n    return [None] * len(completions)\n")
    arguments = {"num_workers": 1, "timeout_s": 10.0, "max_failure_rate": 0.5, "is_part": True}
    pool = RewardPool(f"{path}:nothing", **arguments)
    try:
        got = pool.score(["p"] * 4, ["c"] * 4, {})
        assert got.reasons == ["reward_none"] * 4
    finally:
        pool.close()
