# SPDX-License-Identifier: Apache-2.0
"""Rewards that compare the last number of a response with the right answer.

A reward function has TRL's signature: `prompts` and `completions` (the responses' texts, without
special tokens) and one keyword argument per data column, each a list of the same length; it returns
one number per response. It imports only the standard library, because reward processes import it.
Invariant: a text is graded the same way whether it is the response or the gold answer.
"""

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from tba_jax.rewards.messages import Content, text_of

# ASCII digits only: `\d` also matches the digits of other scripts.
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_INTEGER = re.compile(r"-?[0-9]+")
_GSM8K_MARK = "####"


def last_number(text: str) -> float | None:
    """The last number of a text, thousands commas ignored; None where there is none.

    Decimals and exponents count, units and currency signs around the number do not:
    last_number("so $1,234.50 in all") == 1234.5.
    """
    numbers = _NUMBER.findall(text.replace(",", ""))
    return float(numbers[-1]) if numbers else None


def gsm8k_gold(text: str) -> str | None:
    """The answer behind the last "####" of a GSM8K solution, without commas; None without one."""
    _, mark, answer = text.rpartition(_GSM8K_MARK)
    return answer.strip().replace(",", "") if mark else None


def arithmetic_reward(
    prompts: Sequence[Content], completions: Sequence[Content], answer: list[str], **columns: Any
) -> list[float]:
    """1.0 where the last integer of the response is the answer, else 0.0.

    Commas separate integers here (they are the running totals of worked responses).

    Args:
        prompts: not looked at.
        completions: the responses, texts or chat messages.
        answer: the right integer of each problem, as text.
        columns: not looked at.
    """
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        integers = _INTEGER.findall(text_of(completion))
        # Decimal, not int: Python refuses to turn more than 4,300 digits into an int.
        rewards.append(float(bool(integers) and Decimal(integers[-1]) == Decimal(right)))
    return rewards


def gsm8k_reward(
    prompts: Sequence[Content], completions: Sequence[Content], answer: list[str], **columns: Any
) -> list[float]:
    """1.0 where the last number of the response equals the last number of the gold solution.

    The paper's rule for training and evaluation; no "####" is required of the response.

    Args:
        prompts: not looked at.
        completions: the responses, texts or chat messages.
        answer: the gold solutions, whole.
        columns: not looked at.

    Raises:
        ValueError: a gold solution without a number, which would make every response wrong.
    """
    rewards = []
    for completion, gold in zip(completions, answer, strict=True):
        right = last_number(gold)
        if right is None:
            raise ValueError(
                f"gold solution {gold!r} holds no number; want GSM8K's format, ending in '#### 42'"
            )
        rewards.append(float(last_number(text_of(completion)) == right))
    return rewards
