# SPDX-License-Identifier: Apache-2.0
r"""Reward for competition mathematics: the last \boxed{...} of a response, compared by math-verify.

Only reward processes import this module: it needs the package math-verify (extra `math`), and
importing that must be over before the clock of the first item starts. Its own time limits are
switched off: they turn a slow comparison into a silent "wrong", whereas the reward pool's deadline
counts it. Invariant: a response without a boxed answer is wrong, whatever else it says.
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

from tba_jax.rewards.boxed import last_boxed
from tba_jax.rewards.messages import Content, text_of

# It warns, in every process, that its time limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


# 2516_8: math-verify drops the base of a number.
_BASE = re.compile(r"[0-9]_\{?([0-9]+)\}?$")


def _parse(text: str) -> list[Any]:
    # A full stop behind a number would make it unreadable.
    text = text.strip().removesuffix(".")
    return math_verify.parse(f"$\\boxed{{{text}}}$", parsing_timeout=0)


def _have_same_base(gold: str, given: str) -> bool:
    """False where both are written with a base and the bases differ."""
    bases = [_BASE.search(text.strip()) for text in (gold, given)]
    found = [base.group(1) for base in bases if base]
    return len(found) < 2 or found[0] == found[1]


def math_reward(
    prompts: Sequence[Content], completions: Sequence[Content], answer: list[str], **columns: Any
) -> list[float]:
    r"""1.0 where the boxed answer of the response equals the gold one mathematically, else 0.0.

    Args:
        prompts: not looked at.
        completions: the responses, texts or chat messages.
        answer: gold solutions with the answer in \boxed{...}, or the bare answers.
        columns: not looked at.

    Raises:
        ValueError: a gold answer that math-verify cannot read.
    """
    rewards = []
    for completion, gold in zip(completions, answer, strict=True):
        boxed = last_boxed(gold)
        gold_text = gold if boxed is None else boxed
        right = _parse(gold_text)
        if not right:
            raise ValueError(f"gold answer {gold!r:.200} is nothing that math-verify can read")
        given = last_boxed(text_of(completion))
        is_right = (
            given is not None
            and _have_same_base(gold_text, given)
            and math_verify.verify(right, _parse(given), timeout_seconds=0, raise_on_error=True)
        )
        rewards.append(float(is_right))
    return rewards
