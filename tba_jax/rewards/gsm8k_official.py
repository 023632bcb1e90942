# SPDX-License-Identifier: Apache-2.0
"""The grader of the paper's GSM8K code, to the letter; `numeric.gsm8k_reward` is the better one.

It imports only the standard library, because reward processes import it. Invariant: response and
gold solution are read by the same rule.
"""

import re
from collections.abc import Sequence
from typing import Any

from tba_jax.rewards.messages import Content, text_of

_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*|e[+-]?\d+)?|\.\d+)")


def last_number_without_commas(text: str) -> float | None:
    """The last number once every comma is deleted; None where there is none.

    A minus between operands is a sign here ("20-5" ends in -5), a fraction is two numbers, and
    what stands behind a marked answer counts.
    """
    numbers = _NUMBER.findall(text.replace(",", ""))
    return float(numbers[-1]) if numbers else None


def reward(
    prompts: Sequence[Content], completions: Sequence[Content], answer: list[str], **columns: Any
) -> list[float]:
    """1.0 where the last numbers of response and gold solution are equal, else 0.0.

    Args:
        prompts: not looked at.
        completions: the responses, texts or chat messages.
        answer: the gold solutions, whole.
        columns: not looked at.

    References:
        `src/gsm8k_utils.py` of github.com/bbartoldson/TBA.
    """
    found = [last_number_without_commas(text_of(completion)) for completion in completions]
    gold = [last_number_without_commas(text) for text in answer]
    return [float(x is not None and x == y) for x, y in zip(found, gold, strict=True)]
