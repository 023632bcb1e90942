# SPDX-License-Identifier: Apache-2.0
"""Number extraction and the rewards made of it."""

import pytest

from tba_jax.rewards import numeric
from tba_jax.rewards.numeric import arithmetic_reward, gsm8k_answer, gsm8k_reward
from tba_jax.tasks.published import GSM8KOfficial


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 42", 42.0),
        ("so $1,234.50 in all.", 1234.5),
        ("the answer is -7", -7.0),
        (".5 of it", 0.5),
        ("2.5e3 grams", 2500.0),
        ("9" * 5000, float("inf")),
        ("no number", None),
        ("\N{ARABIC-INDIC DIGIT FOUR}", None),  # not an ASCII digit
        # A comma is a thousands separator or it separates.
        ("3,4", 4.0),
        ("1,234,56", 56.0),
        # A minus between operands is no sign.
        ("20-5", 5.0),
        ("20 -5", 5.0),
        ("covid-19", 19.0),
        ("20-5=-15", -15.0),
        ("3*-5", -5.0),
        (r"a loss of $-\$1,200$", -1200.0),
        ("\N{MINUS SIGN}5", -5.0),
        ("2e\N{MINUS SIGN}2", 0.02),
        ("1/2", 0.5),
        ("1 1/2 cups", 1.5),
        ("5/6/2020", 2020.0),
        ("60 km/2 h", 2.0),
        ("1/0", None),
        # Units and what belongs to them.
        ("12 m^2", 12.0),
        ("version 1.2.3", 3.0),
    ],
)
def test_last_number(text, number):
    assert numeric.last_number(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 18", 18.0),
        ("so 9 * 2 = 18\n#### 18\nIn 3 days that is 54.", 18.0),
        ("#### 18\n\nProblem:\nTom has 2+3 eggs.\n#### 5", 18.0),
        ("#### 1. Add them\n#### 2) Divide\n#### 18\nCheck: 54/3", 18.0),
        ("#### 1/2\nor 7", 0.5),
        (r"#### \$1,234.50 in 3 days", 1234.5),
        ("#### none, but 5", 5.0),
        ("####", None),
        ("#### 72. Next: 5", 72.0),
    ],
)
def test_gsm8k_answer(text, number):
    assert gsm8k_answer(text) == number


@pytest.mark.parametrize("piece", ["1,111,", "1 1 /", "1/", "1e", "-", "#### ", "####=", " $ "])
def test_no_text_takes_long_to_read(piece):
    # A pattern that goes back over what it has read takes minutes for these.
    assert gsm8k_answer(piece * 20_000 + " = 7") == 7.0


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("13", [":12,9,17,11,13", "=13", "=013"], ["=-13", "", "13 or 12", "=1" + "3" * 5000]),
        ("-3", ["2-5=-3", "\N{MINUS SIGN}3", ":2,-3"], ["2-3", "(2)-3", "=3"]),
    ],
)
def test_arithmetic_reward(answer, right, wrong):
    n = len(right) + len(wrong)
    rewards = arithmetic_reward(prompts=[""] * n, completions=right + wrong, answer=[answer] * n)
    assert rewards == [1.0] * len(right) + [0.0] * len(wrong)


def test_gsm8k_reward_needs_no_mark_and_no_exact_text():
    gold = "She sold 48+24 = <<48+24=1072>>1,072 clips.\n#### 1,072"
    completions = ["#### 1072", "so 1,072.0 clips", "1072 of 2000", "", "#### 1071"]
    rewards = gsm8k_reward(
        prompts=[""] * 5, completions=completions, answer=[gold] * 5, question=[""] * 5
    )
    assert rewards == [1.0, 1.0, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="gold solution 'none' has no number"):
        gsm8k_reward(prompts=[""], completions=["4"], answer=["none"])


def test_chat_messages_are_graded_as_their_text():
    replies = [[{"role": "assistant", "content": text}] for text in ("so 4", "so 5")]
    prompts = [[{"role": "user", "content": "2+2?"}]] * 2
    for reward, answer in ((gsm8k_reward, "#### 4"), (arithmetic_reward, "4")):
        assert reward(prompts=prompts, completions=replies, answer=[answer] * 2) == [1.0, 0.0]


def test_the_prompt_is_that_of_the_papers_code():
    prompt = GSM8KOfficial.text.format(question="1+1?")
    assert prompt == "[MATH TASK] Problem:\n1+1?\n\nSolution:\n"
