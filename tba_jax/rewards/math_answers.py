# SPDX-License-Identifier: Apache-2.0
r"""Reward for competition mathematics: the last \boxed{...} of a response, compared by math-verify.

Only reward processes import this module: it needs the package math-verify (extra `math`), whose
import must end before the deadline of the first item starts. The package's own time limits are off,
because they would silently grade a slow comparison as wrong; with the reward pool's deadline, a
slow comparison is a failure. Invariant: a response without a boxed answer is wrong.
"""

import logging
import re
from collections.abc import Sequence
from typing import Any

try:
    import math_verify
except ImportError:
    raise ImportError(
        "the reward of task math needs the package math-verify: pip install 'tba_jax[math]'"
    ) from None

from tba_jax.rewards.messages import Content, last_boxed, text_of

# The package warns in every process that its time limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


# Base of answers such as 2516_8, which math-verify drops.
_BASE = re.compile(r"[0-9]_\{?([0-9]+)\}?$")


def _parse(text: str) -> list[Any]:
    # math-verify cannot parse a number followed by a full stop.
    text = text.strip().removesuffix(".")
    return math_verify.parse(f"$\\boxed{{{text}}}$", parsing_timeout=0)


def _have_same_base(gold: str, given: str) -> bool:
    """Return False if both answers have a base and the bases differ."""
    bases = [_BASE.search(text.strip()) for text in (gold, given)]
    found = [base.group(1) for base in bases if base]
    return len(found) < 2 or found[0] == found[1]


def math_reward(
    prompts: Sequence[Content], completions: Sequence[Content], answer: list[str], **columns: Any
) -> list[float]:
    r"""Return 1.0 if the boxed answer equals the gold answer mathematically, else 0.0.

    Args:
        completions: the responses, texts or chat messages.
        answer: gold solutions with the answer in \boxed{...}, or the bare answers.

    Raises:
        ValueError: math-verify cannot parse a gold answer.
    """
    rewards = []
    for completion, gold in zip(completions, answer, strict=True):
        boxed = last_boxed(gold)
        gold_text = gold if boxed is None else boxed
        right = _parse(gold_text)
        if not right:
            raise ValueError(f"math-verify cannot parse the gold answer {gold!r:.200}. Correct it")
        given = last_boxed(text_of(completion))
        is_right = (
            given is not None
            and _have_same_base(gold_text, given)
            and math_verify.verify(right, _parse(given), timeout_seconds=0, raise_on_error=True)
        )
        rewards.append(float(is_right))
    return rewards
