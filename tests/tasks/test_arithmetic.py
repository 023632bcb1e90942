# SPDX-License-Identifier: Apache-2.0
"""The arithmetic task."""

import re

from tba_jax.tasks import arithmetic

TASK = arithmetic.Arithmetic()


def test_problems_are_the_published_ones():
    # Made by this module when the start model was pretrained. They may never change: the start
    # model and every published figure belong to these problems.
    assert arithmetic.problem(0, "train") == ("8+7-8+4-4+7", 14)
    assert arithmetic.problem(10**9, "train") == ("4-2+4-3+8+1", 12)
    assert TASK.problem("eval", 0) == ("5+9+2-7-9+9", {"answer": "9"})


def test_problems_have_six_terms_totals_within_bounds_and_the_right_answer():
    for i in range(500):
        expression, answer = arithmetic.problem(i, "train")
        assert re.fullmatch("[1-9]([+-][1-9]){5}", expression)
        totals = arithmetic.running_totals(expression)
        assert totals == [eval(expression[: 2 * n + 1]) for n in range(1, 6)]
        assert answer == totals[-1]
        assert all(0 <= t <= 20 for t in totals)


def test_evaluation_expressions_are_distinct_and_never_in_training():
    held_out = {TASK.problem("eval", i)[0] for i in range(TASK.size("eval"))}
    assert len(held_out) == TASK.size("eval") == 1024
    assert all(arithmetic.split_of(e) == "eval" for e in held_out)
    train = {arithmetic.problem(i, "train")[0] for i in range(20_000)}
    assert len(train) > 19_800  # repeats are possible and rare
    assert not held_out & train


def test_response_kind():
    worked, wrong, hasty = ":12,9,17,11,13", ":1,1,1,1,1", "=-3"  # the kind is the form
    kinds = [TASK.response_kind(text) for text in (worked, wrong, hasty, ":12,9,17,11", "=13 ")]
    assert kinds == ["worked", "worked", "hasty", None, None]
    assert TASK.response_kinds == ("worked", "hasty")
