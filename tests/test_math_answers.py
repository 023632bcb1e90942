# SPDX-License-Identifier: Apache-2.0
"""Boxed answers and their comparison."""

import pytest

from tba_jax.rewards.boxed import last_boxed

pytest.importorskip("math_verify", reason="math-verify is not installed")
from tba_jax.rewards.math_answers import math_reward  # it needs math-verify


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} or rather \boxed{2}", "2"),
        (r"\boxed{1} and then cut off: \boxed{\frac{1}{", "1"),
        (r"\boxed{}", ""),
        (r"\boxed{cut off", None),
        ("1/2", None),
    ],
)
def test_last_boxed(text, boxed):
    assert last_boxed(text) == boxed


def rewards_of(completions, gold):
    n = len(completions)
    return math_reward(prompts=[""] * n, completions=completions, answer=[gold] * n)


def test_equal_answers_may_be_written_differently():
    right = [r"\boxed{\frac{1}{2}}", r"\boxed{0.5}", r"$\boxed{\dfrac12}$", r"\boxed{2^{-1}}"]
    wrong = [
        r"\boxed{\frac{1}{3}}",
        "0.5",
        r"\boxed{}",
        r"\boxed{\text{half?}}",
        "",
        r"\boxed{",
    ]
    assert rewards_of(right, r"so it is $\boxed{\frac{1}{2}}$.") == [1.0] * len(right)
    assert rewards_of(wrong, r"so it is $\boxed{\frac{1}{2}}$.") == [0.0] * len(wrong)


def test_gold_answer_without_a_box():
    assert rewards_of([r"\boxed{x+1}", r"\boxed{1+x}", r"\boxed{x}"], "x+1") == [1.0, 1.0, 0.0]


def test_last_box_of_the_gold_solution_counts():
    assert rewards_of([r"\boxed{2}", r"\boxed{1}"], r"first \boxed{1}, then \boxed{2}") == [
        1.0,
        0.0,
    ]


def test_gold_answer_that_cannot_be_read_is_refused():
    with pytest.raises(ValueError, match="nothing that math-verify can read"):
        rewards_of([r"\boxed{1}"], "")
