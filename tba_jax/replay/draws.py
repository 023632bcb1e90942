# SPDX-License-Identifier: Apache-2.0
"""Draws of prompts in epochs, draws of responses by weight, and groups of equal rewards.

Invariants: no response is drawn twice while there are enough responses. Between two `recycle` calls
of a PromptPool no prompt is drawn twice, despite additions and removals.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from tba_jax.flow.trajectory import Draw, Trajectory
from tba_jax.replay.config import ReplaySettings

TRIES = 8
"""Maximum draws per slot; the last draw is trained on even if its rewards are equal."""


class PromptPool:
    """Prompts drawn at random without replacement, in epochs, from a changing set.

    The cost of an operation is constant.

    Attributes:
        ids: all IDs; the first `num_left` remain to be drawn in this epoch.
        num_left: number of IDs that remain.
    """

    def __init__(self, ids: Iterable[int] = (), num_left: int = 0) -> None:
        self.ids = list(ids)
        self.num_left = num_left
        self._where = {prompt_id: index for index, prompt_id in enumerate(self.ids)}
        self._aside: list[int] = []

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, prompt_id: int) -> None:
        """Add a prompt to this epoch; do nothing if the pool already has the prompt."""
        if prompt_id not in self._where:
            self._where[prompt_id] = len(self.ids)
            self.ids.append(prompt_id)
            self._move_left(prompt_id)

    def discard(self, prompt_id: int) -> None:
        """Remove a prompt, if present."""
        index = self._where.get(prompt_id)
        if index is None:
            return
        if index < self.num_left:
            self.num_left -= 1
            self._swap(index, self.num_left)
            index = self.num_left
        self._swap(index, len(self.ids) - 1)
        self.ids.pop()
        del self._where[prompt_id]

    def draw(self, rng: np.random.Generator, excluded: Collection[int]) -> int | None:
        """Return a random remaining prompt that is not excluded; None if there is none.

        Excluded prompts that the draw meets are set aside until `give_back` or `recycle`.
        """
        while self.num_left:
            # A float times a count is uniform enough below 2^53, and ten times faster than
            # rng.integers.
            index = int(rng.random() * self.num_left)
            self.num_left -= 1
            self._swap(index, self.num_left)
            prompt_id = self.ids[self.num_left]
            if prompt_id not in excluded:
                return prompt_id
            self._aside.append(prompt_id)
        return None

    def give_back(self) -> None:
        """Make set-aside prompts drawable again in this epoch."""
        for prompt_id in self._aside:
            if prompt_id in self._where:
                self._move_left(prompt_id)
        self._aside.clear()

    def recycle(self) -> None:
        """Begin a new epoch with all prompts."""
        self.num_left = len(self.ids)
        self._aside.clear()

    def _move_left(self, prompt_id: int) -> None:
        index = self._where[prompt_id]
        if index >= self.num_left:
            self._swap(index, self.num_left)
            self.num_left += 1

    def _swap(self, i: int, j: int) -> None:
        ids = self.ids
        ids[i], ids[j] = ids[j], ids[i]
        self._where[ids[i]], self._where[ids[j]] = i, j


def response_log_weights(
    rewards: Float[np.ndarray, " n"], priority_temperature: float
) -> Float[np.ndarray, " n"]:
    """Return the log-probability of each response to a prompt in a replay slot.

    p = softmax(reward / priority_temperature).

    Args:
        rewards: raw rewards of the stored responses.
        priority_temperature: > 0; inf is uniform.
    """
    if math.isinf(priority_temperature):
        return np.full(len(rewards), -math.log(len(rewards)))
    logits = rewards / priority_temperature
    logits = logits - logits.max()
    return logits - np.log(np.exp(logits).sum())


def choose(
    rng: np.random.Generator, log_weights: Float[np.ndarray, " n"], size: int
) -> Int[np.ndarray, " n"]:
    """Return how often each response is drawn, in `size` draws.

    Draws are without replacement. With fewer responses than draws, all are taken, and the rest are
    repeats drawn with replacement.
    """
    num = len(log_weights)
    times = np.zeros(num, np.int64)
    if num >= size:
        # Gumbel top-k: equal to sequential draws without replacement.
        noisy = log_weights + rng.gumbel(size=num)
        times[np.argpartition(-noisy, size - 1)[:size]] = 1
        return times
    weights = np.exp(log_weights - log_weights.max())
    repeats = rng.choice(num, size - num, p=weights / weights.sum())
    return 1 + np.bincount(repeats, minlength=num)


def unite(trajectories: Sequence[Trajectory]) -> list[list[int]]:
    """Return the positions of equal trajectories to one prompt, a list for each distinct one.

    A batch computes equal trajectories once, with their number as weight. Equal tokens with
    different versions or (noisy) rewards are different, because objectives with ratios and
    leave-one-out means need every version and reward.
    """
    found: dict[tuple[Any, ...], list[int]] = {}
    for i, y in enumerate(trajectories):
        more = (y.is_sampled, y.token_advantages)
        key = (
            y.response_tokens.tobytes(),
            y.reward,
            y.version_min,
            y.version_max,
            y.version_spans,
            y.path_lengths,
            y.sampling_temperature,
            *(None if x is None else x.tobytes() for x in more),
        )
        found.setdefault(key, []).append(i)
    return list(found.values())


def is_wanted(settings: ReplaySettings, draw: Draw) -> bool:
    """Return False if replay.equal_rewards=redraw and all rewards of the draw are equal."""
    return settings.equal_rewards != "redraw" or not _is_level(draw)


def without_level(settings: ReplaySettings, draws: Sequence[Draw]) -> tuple[list[Draw], int]:
    """Empty the slots of groups with equal rewards; for replay.equal_rewards=skip.

    A batch that has only such groups stays unchanged.

    Returns:
        The batch, and the number of slots that were emptied.
    """
    level = [settings.equal_rewards == "skip" and _is_level(draw) for draw in draws]
    if all(level):
        return list(draws), 0
    nothing: dict[str, Any] = {
        "trajectories": (),
        "weights": (),
        "trajectory_ids": (),
        "num_repeats": 0,
    }
    kept = [
        draw._replace(**nothing) if is_level else draw
        for draw, is_level in zip(draws, level, strict=True)
    ]
    return kept, sum(level)


def _is_level(draw: Draw) -> bool:
    return float(np.ptp([y.reward for y in draw.trajectories])) == 0
