# SPDX-License-Identifier: Apache-2.0
"""State values estimated by sampling continuations, as in VinePPO, and advantages from them.

A state is a prompt with the first tokens of a response. Its value is the mean reward of a few
continuations. The value of the prompt alone is the mean reward of the other responses to it; after
the last token the value is the reward. The tokens between two states have the difference of their
values as advantage. Invariants: the version that drew a ticket's responses also draws their
continuations, with random numbers derived from the ticket number; equal prefixes of a group's
responses have one value.

References:
    VinePPO, arXiv:2410.01679, section 4.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from tba_jax.rewards.grader import Grader, Grades
from tba_jax.search.rollout import Rollout, Sampler
from tba_jax.weights.transport import Published


@dataclasses.dataclass(frozen=True)
class Vine:
    """Estimator of advantages by sampled continuations.

    Attributes:
        sampler: draws continuations.
        grader: grades whole responses.
        every: tokens between two states.
        num_samples: continuations per state.
    """

    sampler: Sampler
    grader: Grader
    every: int
    num_samples: int

    def advantages(
        self,
        rollout: Rollout,
        grades: Grades,
        published: Published,
        *,
        number: int,
        place: int,
    ) -> list[np.ndarray]:
        """Return float32 [t] of each response; 0 for a response without reward.

        Args:
            rollout: the prompt and its responses.
            grades: grades of the responses.
            published: weights that drew them.
            number: number of the round or ticket.
            place: index of the prompt in the round; 0 in a ticket.
        """
        responses = [y.tokens for y in rollout.transcripts]
        values = self._values(rollout, responses, published, number, place)
        rewards = np.array([np.nan if r is None else r for r in grades.rewards], np.float64)
        return [
            between_states(tokens, rewards[j], of_others(rewards, j), values, self.every)
            for j, tokens in enumerate(responses)
        ]

    def _values(
        self,
        rollout: Rollout,
        responses: Sequence[np.ndarray],
        published: Published,
        number: int,
        place: int,
    ) -> dict[bytes, float]:
        """Return the value of every state after the prompt, by its tokens; nan without rewards."""
        states: dict[bytes, np.ndarray] = {}
        for tokens in responses:
            for end in range(self.every, len(tokens), self.every):
                states.setdefault(tokens[:end].tobytes(), tokens[:end])
        if not states:
            return {}
        drawn = self.sampler.go_on(
            rollout.prompt.tokens,
            list(states.values()),
            num_samples=self.num_samples,
            number=number,
            place=place,
            published=published,
        )
        whole = [
            (np.concatenate([state, y.tokens]), y.has_eos)
            for state, of_state in zip(states.values(), drawn, strict=True)
            for y in of_state
        ]
        grades = self.grader.grade(
            [rollout.prompt] * len(whole), [y for y, _ in whole], [ends for _, ends in whole]
        )
        rewards = np.array([np.nan if r is None else r for r in grades.rewards], np.float64)
        rewards = rewards.reshape(len(states), self.num_samples)
        num_known = (~np.isnan(rewards)).sum(axis=1)
        sums = np.nansum(rewards, axis=1)
        means = np.where(num_known > 0, sums / np.maximum(num_known, 1), np.nan)
        return dict(zip(states, means.tolist(), strict=True))


def of_others(rewards: np.ndarray, index: int) -> float:
    """Return the mean reward of a prompt's other responses; the own reward if none has a reward."""
    others = np.delete(rewards, index)
    others = others[~np.isnan(others)]
    return float(others.mean()) if others.size else float(rewards[index])


def between_states(
    tokens: np.ndarray, reward: float, value: float, values: Mapping[bytes, float], every: int
) -> np.ndarray:
    """Return the advantage of each token of a response, float32.

    A_t = V(next state) - V(state before), with the reward as value after the last token.

    Args:
        tokens: tokens of the response.
        reward: its reward; nan: every advantage is 0.
        value: value of the prompt.
        values: values of states, by their tokens; states with nan are skipped.
        every: tokens between two states.
    """
    found = np.zeros(len(tokens), np.float32)
    if np.isnan(reward):
        return found
    start = 0
    for end in range(every, len(tokens), every):
        after = values[tokens[:end].tobytes()]
        if not np.isnan(after):
            found[start:end] = after - value
            start, value = end, after
    found[start:] = reward - value
    return found
