# SPDX-License-Identifier: Apache-2.0
"""Numbers and boxed answers, and the rewards made of them; 275 written pairs of boxed answers."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tba_jax.rewards import graders
from tba_jax.rewards.graders import arithmetic_reward, gsm8k_answer, gsm8k_reward, math_reward
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
    assert graders.last_number(text) == number


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
    chat = [{"role": "assistant", "content": "so 1072"}]
    completions = ["#### 1072", "so 1,072.0 clips", "1072 of 2000", "", "#### 1071", chat]
    rewards = gsm8k_reward(
        prompts=[""] * 6, completions=completions, answer=[gold] * 6, question=[""] * 6
    )
    assert rewards == [1.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="gold solution 'none' has no number"):
        gsm8k_reward(prompts=[""], completions=["4"], answer=["none"])


def test_the_prompt_is_that_of_the_papers_code():
    prompt = GSM8KOfficial.text.format(question="1+1?")
    assert prompt == "[MATH TASK] Problem:\n1+1?\n\nSolution:\n"


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
    assert graders.last_boxed(text) == boxed


def test_gold_answer_that_cannot_be_read_is_refused():
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    with pytest.raises(ValueError, match="math-verify cannot parse the gold answer"):
        math_reward(prompts=[""], completions=[r"\boxed{1}"], answer=[""])


# kind: right (as written), equivalent (otherwise written), wrong, malformed; right: the truth;
# verdict: what the verifier says.
PAIRS = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "boxed_pairs.jsonl").read_text().splitlines()
]


def test_written_pairs_get_their_verdicts():
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    counts = Counter(pair["kind"] for pair in PAIRS)
    assert counts == {"right": 30, "equivalent": 137, "wrong": 76, "malformed": 32}
    verdicts = math_reward(
        prompts=[""] * len(PAIRS),
        completions=[rf"so it is $\boxed{{{pair['answer']}}}$." for pair in PAIRS],
        answer=[rf"thus $\boxed{{{pair['gold']}}}$" for pair in PAIRS],
    )
    wrong_verdicts = [
        (pair["gold"], pair["answer"])
        for pair, verdict in zip(PAIRS, verdicts, strict=True)
        if verdict != float(pair["right"])
    ]
    # What math-verify 0.9 is known to misjudge; a version that judges better fails here too.
    known = [(p["gold"], p["answer"]) for p in PAIRS if p["verdict"] != p["right"]]
    assert len(known) == 4
    assert wrong_verdicts == known
