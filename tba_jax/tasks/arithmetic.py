# SPDX-License-Identifier: Apache-2.0
"""The embedded task: sums of six single digits, answered at once or step by step.

    prompt            7+5-3+8-6+2
    hasty response    =13                  the answer alone
    worked response   :12,9,17,11,13       step by step: one running total per sign

The answer is the last integer of either response. Problems are generated from a hash of their
index, so there is no data file. A hash of the text of an expression selects its split, so neither
pretraining nor reinforcement learning sees expressions of the evaluation split. `Calculator` is the
environment of the preset agent:toy.

Invariant: `problem(index, split)` is the same expression on every machine and in every release.
"""

import hashlib
import re

from tba_jax.tasks.task import Problem, Split, Task

NUM_TERMS = 6
# Bounds of running totals: a model of half a million parameters can memorise all sums in this
# range, so it only has to learn to write them step by step.
MIN_TOTAL, MAX_TOTAL = 0, 20

TRAIN_SIZE = 2**16
_WORKED = re.compile(rf":\d+(,\d+){{{NUM_TERMS - 2}}}")
_HASTY = re.compile(r"=-?\d+")
_INTEGER = re.compile(r"-?\d+")


def _digest(text: str) -> int:
    """Return a 256-bit hash of a text, equal in every process unlike Python's `hash`."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")


def split_of(expression: str) -> Split:
    """Return the split of an expression; one expression in 16 is held out."""
    return "eval" if _digest(f"split {expression}") % 16 == 0 else "train"


def running_totals(expression: str) -> list[int]:
    """Return the totals after the second, third, ... term; the last one is the answer."""
    total, totals = int(expression[0]), []
    for sign, digit in zip(expression[1::2], expression[2::2], strict=True):
        total += int(digit) if sign == "+" else -int(digit)
        totals.append(total)
    return totals


def problem(index: int, split: Split) -> tuple[str, int]:
    """Return the expression with this index in a split, and its answer, in constant time.

    problem(0, "train") == ("8+7-8+4-4+7", 14)

    Args:
        index: any integer >= 0, also beyond the task's sizes.
    """
    attempt = 0
    while True:
        bits = _digest(f"arithmetic 0 {split} {index} {attempt}")
        expression, total = "", 0
        for term in range(NUM_TERMS):
            bits, digit = divmod(bits, 9)
            bits, is_plus = divmod(bits, 2)
            digit += 1
            # At most one of the two signs leads out of bounds.
            is_plus = (is_plus or total - digit < MIN_TOTAL) and total + digit <= MAX_TOTAL
            total += digit if is_plus else -digit
            expression += f"{'' if term == 0 else '+' if is_plus else '-'}{digit}"
        if split_of(expression) == split:
            return expression, total
        attempt += 1


class Arithmetic(Task):
    """The `arithmetic` task; responses are worked, hasty, or neither."""

    name = "arithmetic"
    response_kinds = ("worked", "hasty")
    reward = "tba_jax.rewards.graders:arithmetic_reward"
    metric = "pass_at_1"
    makes_problems = True
    sizes = {"train": TRAIN_SIZE, "eval": 1024}

    def problem(self, split: Split, index: int) -> Problem:
        expression, answer = problem(index, split)
        return expression, {"answer": str(answer)}

    def response_kind(self, text: str) -> str | None:
        if _WORKED.fullmatch(text):
            return "worked"
        return "hasty" if _HASTY.fullmatch(text) else None


class Calculator:
    """Environment with gym's `step`: sums of the task, with a calculator.

        prompt          7+5-3+8-6+2
        guess           =13             ends the episode
        call            :               the environment returns all running totals except the last
        observation     12,9,17,11,
        answer          13              ends the episode

    The reward is 1 for a correct number, else 0. The start model often guesses wrong, and calls the
    calculator in a quarter of its episodes. The stop string ":" ends a turn.
    """

    def init(self, prompt: str) -> None:
        self._totals = running_totals(prompt)

    def step(self, text: str) -> tuple[str, float, bool]:
        """Return (observation, reward, done) for a turn of the policy."""
        if text.endswith(":"):
            return ",".join(map(str, self._totals[:-1])) + ",", 0.0, False
        found = _INTEGER.findall(text)
        is_right = bool(found) and int(found[-1]) == self._totals[-1]
        return "", float(is_right), True
