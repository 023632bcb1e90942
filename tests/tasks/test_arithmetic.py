# SPDX-License-Identifier: Apache-2.0
"""The arithmetic task."""

import subprocess
import sys

import pytest

from tba_jax.tasks import arithmetic

TASK = arithmetic.Arithmetic()
TRAIN_0 = ("8+7-8+4-4+7", 14)
EVAL_0 = ("5+9+2-7-9+9", 9)
TRAIN_BILLION = ("4-2+4-3+8+1", 12)


def test_problems_are_the_published_ones():
    # Made by this module when the start model was pretrained. They may never change: the start
    # model and every published figure belong to these problems.
    assert arithmetic.problem(0, "train") == TRAIN_0
    assert arithmetic.problem(0, "eval") == EVAL_0
    assert arithmetic.problem(10**9, "train") == TRAIN_BILLION
    assert TASK.problem("train", 0) == (TRAIN_0[0], {"answer": str(TRAIN_0[1])})
    assert TASK.problem("eval", 0) == (EVAL_0[0], {"answer": str(EVAL_0[1])})


def test_problems_do_not_depend_on_the_process():
    """Python's own `hash` of a text differs per process; ours must not."""
    code = (
        "from tba_jax.tasks import arithmetic as a;"
        "print([a.problem(i, s) for i in (0, 7, 99) for s in ('train', 'eval')]);"
        "import sys; print([m for m in ('jax', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "1"},
        timeout=60,
    ).stdout.splitlines()
    here = [arithmetic.problem(i, s) for i in (0, 7, 99) for s in ("train", "eval")]
    assert out == [str(here), "[]"]  # and the task imports nothing heavy


@pytest.mark.parametrize("split", ["train", "eval"])
def test_problems_have_six_terms_totals_within_bounds_and_the_right_answer(split):
    for i in range(500):
        expression, answer = arithmetic.problem(i, split)
        assert len(expression) == arithmetic.MAX_PROMPT_CHARS
        assert all(c in "123456789" for c in expression[::2])
        assert all(c in "+-" for c in expression[1::2])
        totals = arithmetic.running_totals(expression)
        # eval of a text that the two lines above have checked.
        assert totals == [eval(expression[: 2 * n + 1]) for n in range(1, 6)]
        assert answer == totals[-1]
        assert all(0 <= t <= 20 for t in totals)


def test_evaluation_expressions_are_distinct_and_never_in_training():
    held_out = {TASK.problem("eval", i)[0] for i in range(TASK.size("eval"))}
    assert len(held_out) == TASK.size("eval") >= 512
    assert all(arithmetic.split_of(e) == "eval" for e in held_out)
    train = {arithmetic.problem(i, "train")[0] for i in range(20_000)}
    assert len(train) > 19_800  # repeats are possible and rare
    assert not held_out & train


@pytest.mark.parametrize(
    "text, kind",
    [
        (":12,9,17,11,13", "worked"),
        (":1,1,1,1,1", "worked"),  # the kind is the form, right or wrong
        ("=-3", "hasty"),
        (":12,9,17,11", None),
        ("=13 ", None),
    ],
)
def test_response_kind(text, kind):
    assert TASK.response_kind(text) == kind
    assert arithmetic.is_worked(text) == (kind == "worked")
    assert kind is None or kind in TASK.response_kinds
