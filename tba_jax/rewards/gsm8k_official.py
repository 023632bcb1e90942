# SPDX-License-Identifier: Apache-2.0
"""The grader of the paper's GSM8K code, for comparisons; prefer `numeric.gsm8k_reward`.

Reward processes import this module, so it imports only the standard library. Invariant: response
and gold solution are parsed by the same rule.
"""

import re
from collections.abc import Sequence
from typing import Any

from tba_jax.rewards.messages import Content, text_of

_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*|e[+-]?\d+)?|\.\d+)")


def last_number_without_commas(text: str) -> float | None:
    """Return the last number after deleting every comma; None without a number.

    A minus between operands counts as a sign ("20-5" ends in -5), a fraction counts as two numbers,
    and numbers after a marked answer count.
    """
    numbers = _NUMBER.findall(text.replace(",", ""))
    return float(numbers[-1]) if numbers else None


def reward(
    prompts: Sequence[Content], completions: Sequence[Content], answer: list[str], **columns: Any
) -> list[float]:
    """Return 1.0 if the last numbers of response and gold solution are equal, else 0.0.

    Args:
        completions: the responses, texts or chat messages.
        answer: the whole gold solutions.

    References:
        `src/gsm8k_utils.py` of github.com/bbartoldson/TBA.
    """
    found = [last_number_without_commas(text_of(completion)) for completion in completions]
    gold = [last_number_without_commas(text) for text in answer]
    return [float(x is not None and x == y) for x, y in zip(found, gold, strict=True)]
