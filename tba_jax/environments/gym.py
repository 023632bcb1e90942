# SPDX-License-Identifier: Apache-2.0
"""Gym-like text environments: `init(prompt)`, then `step(text)` for each turn of the policy.

`step` returns (observation, reward, done, ...) or a mapping with the keys observations, reward and
done, as skyrl-gym does. An observation is a text, None, or a list of chat messages. The reward of
an episode is the sum over its steps.
"""

from collections.abc import Mapping
from typing import Any


class GymLike:
    """Adapter from a gym-like environment to the interface of `host`.

    Args:
        environment: an instance of the user's class.
    """

    has_reward = True

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._rewards: list[Any] = []

    def begin(self, row: Mapping[str, Any]) -> None:
        """Begin an episode; the return value of `init` is ignored, because the prompt is known."""
        self._rewards = []
        self._environment.init(row["prompt"])

    def turn(self, text: str) -> tuple[Any, str]:
        """Return the observation after a turn, and the reason of the episode's end or ""."""
        step = self._environment.step(text)
        if isinstance(step, Mapping):
            step = step["observations"], step["reward"], step["done"]
        observation, reward, done, *_ = step
        self._rewards.append(reward)
        if isinstance(observation, list):
            observation = "".join(message["content"] for message in observation)
        return observation, "done" if done else ""

    def reward(self) -> Any:
        """Return the sum of the rewards of all steps."""
        return sum(self._rewards)
