# SPDX-License-Identifier: Apache-2.0
"""State values estimated from sampled continuations, as in VinePPO, and their advantages.

A state is a prompt with the first tokens of a response. Its value is the mean reward of a few
continuations. The value of the prompt alone is the mean reward of the other responses to it. The
value after the last token is the reward. The advantage of the tokens between two states is the
difference of the states' values. Invariant: equal prefixes of a group's responses have one value.

References:
    VinePPO, arXiv:2410.01679, section 4.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from tba_jax.environments.episode import Episode
from tba_jax.flow.trajectory import Prompt
from tba_jax.rewards.scores import Grader


def states_of(responses: Sequence[np.ndarray], every: int) -> list[np.ndarray]:
    """Return the distinct states: the starts of responses with a multiple of `every` tokens.

    A whole response is not a state.
    """
    states = {
        tokens[:end].tobytes(): tokens[:end]
        for tokens in responses
        for end in range(every, len(tokens), every)
    }
    return list(states.values())


def values_of(
    grader: Grader, prompt: Prompt, continuations: Mapping[bytes, Sequence[Episode]]
) -> dict[bytes, float]:
    """Return the mean reward of the continuations of each state; nan if none has a reward."""
    flat = [y for of_state in continuations.values() for y in of_state]
    if not flat:
        return {}
    grades = grader.grade([prompt] * len(flat), [y.tokens for y in flat], [y.has_eos for y in flat])
    rewards, values = iter([grade.reward for grade in grades]), {}
    for state, of_state in continuations.items():
        known = [r for r in (next(rewards) for _ in of_state) if r is not None]
        # fsum: the mean does not depend on the order in which continuations ended.
        values[state] = math.fsum(known) / len(known) if known else math.nan
    return values


def advantages_of(
    responses: Sequence[np.ndarray],
    rewards: Sequence[float | None],
    values: Mapping[bytes, float],
    every: int,
) -> list[np.ndarray]:
    """Return the advantage of each token of the responses to one prompt, float32 [t] each.

    A_t = V(next state) - V(state before). The value after the last token is the reward; the value
    of the prompt is the mean reward of the other responses. All advantages of a response without a
    reward are 0.

    Args:
        values: tokens of a state -> its value; states with nan are skipped.
        every: number of tokens between two states.
    """
    known = np.array([np.nan if r is None else r for r in rewards], np.float64)
    advantages = []
    for j, (tokens, reward) in enumerate(zip(responses, known, strict=True)):
        found, start = np.zeros(len(tokens), np.float32), 0
        others = np.delete(known, j)
        others = others[~np.isnan(others)]
        value = others.mean() if others.size else reward
        for end in range(every, len(tokens), every):
            after = values[tokens[:end].tobytes()]
            if not np.isnan(after):
                found[start:end] = after - value
                start, value = end, after
        found[start:] = reward - value
        advantages.append(np.zeros_like(found) if np.isnan(reward) else found)
    return advantages
