# SPDX-License-Identifier: Apache-2.0
"""The environment of the preset agent:toy: sums of the task `arithmetic`, with a calculator.

    prompt          7+5-3+8-6+2
    guess           =13             ends the episode
    call            :               the environment returns all running totals except the last
    observation     12,9,17,11,
    answer          13              ends the episode

The reward is 1 for a correct number, else 0. The start model often guesses wrong, and calls the
calculator in a quarter of its episodes. The stop string ":" ends a turn.
"""

import re

from tba_jax.tasks.arithmetic import running_totals

_INTEGER = re.compile(r"-?\d+")


class Calculator:
    """Environment with gym's `step`."""

    def init(self, prompt: str) -> None:
        self._totals = running_totals(prompt)

    def step(self, text: str) -> tuple[str, float, bool]:
        """Return (observation, reward, done) for a turn of the policy."""
        if text.endswith(":"):
            return ",".join(map(str, self._totals[:-1])) + ",", 0.0, False
        found = _INTEGER.findall(text)
        is_right = bool(found) and int(found[-1]) == self._totals[-1]
        return "", float(is_right), True
