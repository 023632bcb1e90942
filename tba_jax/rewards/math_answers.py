# SPDX-License-Identifier: Apache-2.0
r"""Reward for competition mathematics: the last \boxed{...} of a response, compared by math-verify.

Only reward processes import this module. The own time limits of math-verify are off: they would
silently grade a slow comparison as wrong, which is a failure at the deadline of reward processes.
Invariant: a response without a boxed answer is wrong.
"""

import logging
import re
from typing import Any

from tba_jax.rewards.numeric import each, last_boxed, optional

math_verify = optional("math_verify", "the reward of task math", "math")
# The package warns in every process that its time limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)
# Base of answers such as 2516_8, which math-verify drops.
_BASE = re.compile(r"[0-9]_\{?([0-9]+)\}?$")


@each
def math_reward(response: str, answer: str) -> float:
    r"""Return 1.0 if the boxed answer equals the gold answer mathematically, else 0.0.

    Args:
        answer: gold solution with the answer in \boxed{...}, or the bare answer.

    Raises:
        ValueError: math-verify cannot parse the gold answer.
    """
    boxed, given = last_boxed(answer), last_boxed(response)
    gold = answer if boxed is None else boxed
    right = _parse(gold)
    if not right:
        raise ValueError(f"math-verify cannot parse the gold answer {gold!r:.200}. Correct it")
    if given is None:
        return False
    bases = {base[1] for text in (gold, given) if (base := _BASE.search(text.strip()))}
    is_equal = math_verify.verify(right, _parse(given), timeout_seconds=0, raise_on_error=True)
    return len(bases) < 2 and bool(is_equal)


def _parse(text: str) -> list[Any]:
    # math-verify cannot parse a number followed by a full stop.
    text = text.strip().removesuffix(".")
    return math_verify.parse(f"$\\boxed{{{text}}}$", parsing_timeout=0)
