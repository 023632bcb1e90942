# SPDX-License-Identifier: Apache-2.0
"""Rewards for the benchmark of the reward pool: that of math with faults on request, and waiting.

Only reward processes import it. Invariant: an item without a fault gets math's own reward.
"""

import os
import signal
import time
from typing import Any

from tba_jax.rewards.math_answers import math_reward


def faulty_math_reward(
    prompts: list[str], completions: list[str], answer: list[str], fault: list[str], **columns: Any
) -> list[float]:
    """math_reward; an item with the fault "kill" kills the process, one with "raise" raises.

    Args:
        prompts, completions, answer: as math_reward.
        fault: "", "kill" or "raise" for each item.
        columns: not looked at.
    """
    if "kill" in fault:
        os.kill(os.getpid(), signal.SIGKILL)
    if "raise" in fault:
        raise RuntimeError("a fault that was asked for")
    return math_reward(prompts, completions, answer, **columns)


def waiting_reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """0 after 2 ms an item, as of a service elsewhere: it needs no core here.

    Args:
        prompts: not looked at.
        completions: counted.
        columns: not looked at.
    """
    time.sleep(0.002 * len(completions))
    return [0.0] * len(completions)
