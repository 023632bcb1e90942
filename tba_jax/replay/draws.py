# SPDX-License-Identifier: Apache-2.0
"""How the replay buffer draws responses: their weights, and draws without replacement.

It stores nothing. Invariant: without replacement as long as there is enough.
"""

import math

import numpy as np
from jaxtyping import Float, Int


def response_log_weights(
    rewards: Float[np.ndarray, " n"], *, priority_temperature: float, uniform_mix: float
) -> Float[np.ndarray, " n"]:
    """Log-probabilities of a prompt's responses in a replay slot.

    p = uniform_mix / n + (1 - uniform_mix) * softmax(reward / priority_temperature)

    Args:
        rewards: raw rewards of the stored responses.
        priority_temperature: > 0; inf is uniform.
        uniform_mix: share of the uniform distribution, in [0, 1].
    """
    uniform = np.full(len(rewards), -math.log(len(rewards)))
    if math.isinf(priority_temperature) or uniform_mix == 1.0:
        return uniform
    logits = rewards / priority_temperature
    logits = logits - logits.max()
    softmax = logits - np.log(np.exp(logits).sum())
    if uniform_mix == 0.0:
        return softmax
    return np.logaddexp(math.log(uniform_mix) + uniform, math.log1p(-uniform_mix) + softmax)


def choose(
    rng: np.random.Generator, log_weights: Float[np.ndarray, " n"], count: int
) -> tuple[Int[np.ndarray, " m"], Int[np.ndarray, " r"]]:
    """Indices drawn without replacement, and repeats drawn with it when there are too few."""
    n = len(log_weights)
    if n >= count:
        # Gumbel top-k: the same as drawing one by one without replacement.
        noisy = log_weights + rng.gumbel(size=n)
        return np.argpartition(-noisy, count - 1)[:count], np.empty(0, np.int64)
    noisy = log_weights + rng.gumbel(size=(count - n, n))
    return np.arange(n), noisy.argmax(axis=1)
