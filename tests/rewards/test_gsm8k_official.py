# SPDX-License-Identifier: Apache-2.0
"""The grader of the paper's code, where it and ours differ."""

import pytest

from tba_jax.rewards.gsm8k_official import last_number_without_commas, reward
from tba_jax.rewards.numeric import gsm8k_answer
from tba_jax.tasks.gsm8k import GSM8KOfficial


@pytest.mark.parametrize(
    ("text", "official", "ours"),
    [
        ("so 1,234 in all", 1234, 1234),
        ("3.50 dollars", 3.5, 3.5),
        ("1e3", 1000, 1000),
        ("#### 72. Next: 5", 5, 72),
        ("20-5", -5, 5),
        ("1/2", 2, 0.5),
        ("3,4", 34, 4),
        ("none", None, None),
    ],
)
def test_the_last_number_without_commas(text, official, ours):
    assert (last_number_without_commas(text), gsm8k_answer(text)) == (official, ours)


def test_rewards_and_the_prompt_are_those_of_the_code():
    gold = ["48+24\n#### 72", "#### 1,000"]
    assert reward(["", ""], ["it is 72.", "a 1000 or 2"], gold) == [1.0, 0.0]
    assert reward([""], ["no idea"], ["#### 3"]) == [0.0]
    prompt, _ = GSM8KOfficial.problem({"question": "1+1?", "answer": "#### 2"})
    assert prompt == "[MATH TASK] Problem:\n1+1?\n\nSolution:\n"
