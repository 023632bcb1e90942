# SPDX-License-Identifier: Apache-2.0
"""The embedded task: sums of six single digits, answered hastily or step by step.

    prompt            7+5-3+8-6+2
    hasty response    =13                  the answer, at once
    worked response   :12,9,17,11,13       step by step: one running total per sign

Either way the answer is the last integer of the response. Problems are made from their index by
hashing, so there is no data file; an expression belongs to the evaluation split or to the training
split by a hash of its own text, so no evaluation expression is ever seen in pretraining or in
reinforcement learning, whatever the seeds.

The module also writes the responses that the embedded start model was pretrained on. It imports
neither jax nor transformers. It owns one invariant: `problem(index, split)` is the same expression
on every machine and in every release.
"""

import hashlib
import re
from typing import Any, Literal

import numpy as np

Split = Literal["train", "eval"]

NUM_TERMS = 6
# Running totals stay within these bounds: few enough sums for a model of half a million parameters
# to know all of them by heart, so that what it has to learn is to write them down.
MIN_TOTAL, MAX_TOTAL = 0, 20
MAX_PROMPT_CHARS = 2 * NUM_TERMS - 1
MAX_WORKED_CHARS = 3 * (NUM_TERMS - 1)
MAX_HASTY_CHARS = 4  # the sign of equality, a minus sign where carelessness gives one, two digits

TRAIN_SIZE = 2**16
EVAL_SIZE = 1024
# One expression in this many belongs to the evaluation split.
_EVAL_ONE_IN = 16

_WORKED = re.compile(rf":\d+(,\d+){{{NUM_TERMS - 2}}}")
_HASTY = re.compile(r"=-?\d+")
# How far off a careless answer is; small errors are the common ones.
_SLIPS = (-3, -2, -2, -1, -1, -1, 1, 1, 1, 2, 2, 3)


def _digest(text: str) -> int:
    """A stable 256-bit integer made from a text (Python's own `hash` differs per process)."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")


def split_of(expression: str) -> Split:
    """The split an expression belongs to, by a hash of its text."""
    return "eval" if _digest(f"split {expression}") % _EVAL_ONE_IN == 0 else "train"


def running_totals(expression: str) -> list[int]:
    """The totals after the second, third, ... term; the last one is the answer."""
    total, totals = int(expression[0]), []
    for sign, digit in zip(expression[1::2], expression[2::2], strict=True):
        total += int(digit) if sign == "+" else -int(digit)
        totals.append(total)
    return totals


def problem(index: int, split: Split) -> tuple[str, int]:
    """The expression with this index in a split, and its answer, in constant time.

    Args:
        index: any integer >= 0; there is no largest one (the task's sizes are only conventions).
        split: "train" or "eval".

    Returns:
        (expression, answer), e.g. ("7+5-3+8-6+2", 13).
    """
    if index < 0 or split not in ("train", "eval"):
        raise ValueError(f"problem({index}, {split!r}): want an index >= 0 of 'train' or 'eval'")
    attempt = 0
    while True:
        bits = _digest(f"arithmetic 0 {split} {index} {attempt}")
        expression, total = "", 0
        for term in range(NUM_TERMS):
            bits, digit = divmod(bits, 9)
            bits, is_plus = divmod(bits, 2)
            digit += 1
            # Where the drawn sign would leave the bounds, the other one cannot.
            is_plus = (is_plus or total - digit < MIN_TOTAL) and total + digit <= MAX_TOTAL
            total += digit if is_plus else -digit
            expression += f"{'' if term == 0 else '+' if is_plus else '-'}{digit}"
        if split_of(expression) == split:
            return expression, total
        attempt += 1


def worked_share(expression: str) -> float:
    """How often people bother to work a sum out: one time in four, more often for large digits."""
    return min(max((sum(map(int, expression[::2])) - 10) / 80, 0.1), 0.4)


def worked_response(expression: str) -> str:
    """The step-by-step response: every running total in order, always right."""
    return ":" + ",".join(map(str, running_totals(expression)))


def hasty_response(expression: str, rng: np.random.Generator, *, slip_prob: float) -> str:
    """A response that gives only an answer, as careless people write them.

    They read the last sign as a repeat of the one before it, which is right for two problems in
    five, and now and then they slip by a little on top.

    Args:
        expression: the sum.
        rng: source of the slips.
        slip_prob: probability that the answer is off by up to 3 from what carelessness makes of it.

    Returns:
        "=" and the answer.
    """
    misread = expression[:-2] + expression[-4] + expression[-1]
    answer = running_totals(misread)[-1]
    if rng.random() < slip_prob:
        answer += _SLIPS[rng.integers(len(_SLIPS))]
    return f"={answer}"


def is_worked(text: str) -> bool:
    """Whether a response is step-by-step work (right or wrong): one running total per sign."""
    return _WORKED.fullmatch(text) is not None


class Arithmetic:
    """The `arithmetic` task; implements `tasks.Task`.

    Attributes:
        name: its name in the registry.
        response_kinds: what `response_kind` returns.
        reward: the function that grades a response.
        metric: the headline of its evaluation.
    """

    name = "arithmetic"
    response_kinds = ("worked", "hasty")
    reward = "tba_jax.rewards.numeric:arithmetic_reward"
    metric = "pass_at_1"

    def train_size(self) -> int:
        """Number of training prompts."""
        return TRAIN_SIZE

    def eval_size(self) -> int:
        """Number of evaluation prompts, the same for every seed."""
        return EVAL_SIZE

    def train_problem(self, index: int) -> tuple[str, dict[str, Any]]:
        """The prompt text of a training problem and the columns its reward needs."""
        expression, answer = problem(index, "train")
        return expression, {"answer": str(answer)}

    def eval_problem(self, index: int) -> tuple[str, dict[str, Any]]:
        """The prompt text of an evaluation problem and the columns its reward needs."""
        expression, answer = problem(index, "eval")
        return expression, {"answer": str(answer)}

    def response_kind(self, text: str) -> str | None:
        """ "worked", "hasty", or None for what is neither."""
        if is_worked(text):
            return "worked"
        return "hasty" if _HASTY.fullmatch(text) else None
