# SPDX-License-Identifier: Apache-2.0
"""A sum of sources: values, parts, and whose failure is whose."""

import math

import numpy as np

from tba_jax.rewards.pool import RewardPool
from tba_jax.rewards.source import ScoreResult
from tba_jax.rewards.weighted_sum import Summand, WeightedSum


class Fixed:
    """A source that answers what it is told, and counts what is asked of it."""

    def __init__(self, rewards, reasons=None, traceback="", parts=None):
        reasons = reasons or [None] * len(rewards)
        self.result = ScoreResult(rewards, reasons, traceback, parts or {})
        self.calls, self.asked = [], []

    def check(self):
        self.calls.append("check")

    def close(self):
        self.calls.append("close")

    def on(self, site):
        moved = Fixed(self.result.rewards)
        moved.calls = [*self.calls, site]
        return moved

    def score(self, prompts, completions, columns, *, completion_ids, has_eos):
        self.asked.append((prompts, completions, columns, completion_ids, has_eos))
        return self.result


def score(source, n):
    ids = [np.zeros(1, np.int32)] * n
    return source.score(
        ["p"] * n, ["c"] * n, {"a": [1] * n}, completion_ids=ids, has_eos=[True] * n
    )


def test_rewards_are_summed_by_weight_and_parts_are_kept_before_it():
    first = Fixed([1.0, 2.0], parts={"f": [1.0, 0.5], "g": [0.0, 1.5]})
    second = Fixed([10.0, -4.0])
    both = WeightedSum([Summand(first, 1.0, ""), Summand(second, 0.5, "model")])
    got = score(both, 2)
    assert got.rewards == [6.0, 0.0] and got.reasons == [None, None]
    assert got.parts == {"f": [1.0, 0.5], "g": [0.0, 1.5], "model": [10.0, -4.0]}
    assert first.asked == second.asked and len(first.asked) == 1


def test_what_one_fails_on_has_no_reward_and_what_one_does_not_apply_to_has():
    first = Fixed(
        [None, None, 3.0, None],
        ["reward_timeout", "reward_none", None, "reward_none"],
        traceback="first",
    )
    second = Fixed([1.0, 2.0, None, None], [None, None, "reward_nan", "reward_none"])
    got = score(WeightedSum([Summand(first, 2.0, "f"), Summand(second, 1.0, "m")]), 4)
    assert got.rewards == [None, 2.0, None, None]
    assert got.reasons == ["reward_timeout", None, "reward_nan", "reward_none"]
    assert got.first_traceback == "first"
    np.testing.assert_array_equal(got.parts["f"], [math.nan, math.nan, 3.0, math.nan])
    np.testing.assert_array_equal(got.parts["m"], [1.0, 2.0, math.nan, math.nan])
    # A part that does not apply is nothing to show a traceback for.
    nothing = Fixed([None, 1.0], ["reward_none", None], traceback="returned None")
    got = score(WeightedSum([Summand(nothing, 1.0, "f"), Summand(Fixed([1.0, 1.0]), 1.0, "m")]), 2)
    assert (got.rewards, got.first_traceback) == ([1.0, 2.0], "")


def test_every_source_is_checked_moved_and_closed():
    sources = [Fixed([1.0]), Fixed([2.0])]
    both = WeightedSum([Summand(source, 1.0, "x") for source in sources])
    both.check()
    moved = both.on("there")
    assert [s.source.calls for s in moved._summands] == [["check", "there"]] * 2
    assert score(moved, 1).rewards == [3.0]
    both.close()
    assert [source.calls for source in sources] == [["check", "close"]] * 2


def test_a_function_that_applies_to_nothing_is_no_failure_beside_another_source(tmp_path):
    path = tmp_path / "f.py"
    path.write_text("def nothing(completions, **kwargs):\n    return [None] * len(completions)\n")
    arguments = {"num_workers": 1, "timeout_s": 10.0, "max_failure_rate": 0.5, "is_part": True}
    pool = RewardPool(f"{path}:nothing", **arguments)
    try:
        both = WeightedSum([Summand(pool, 1.0, "nothing"), Summand(Fixed([1.0] * 4), 1.0, "m")])
        assert score(both, 4).rewards == [1.0] * 4
    finally:
        pool.close()
