# SPDX-License-Identifier: Apache-2.0
"""Boxed answers and their comparison; 275 written pairs and the gold answers of GSM8K."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tba_jax.rewards.numeric import last_boxed

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


def test_gold_answer_that_cannot_be_read_is_refused():
    with pytest.raises(ValueError, match="math-verify cannot parse the gold answer"):
        math_reward(prompts=[""], completions=[r"\boxed{1}"], answer=[""])


# kind: right (as written), equivalent (otherwise written), wrong, malformed; right: the truth;
# verdict: what the verifier says.
PAIRS = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "boxed_pairs.jsonl").read_text().splitlines()
]


def test_written_pairs_get_their_verdicts():
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
