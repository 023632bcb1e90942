# SPDX-License-Identifier: Apache-2.0
"""Sampling of responses: weights, and draws without replacement.

A row may represent several equal responses, its copies; each copy is drawn like a separate row.
Invariant: no copy is drawn twice while there are enough copies.
"""

import math

import numpy as np
from jaxtyping import Float, Int


def response_log_weights(
    rewards: Float[np.ndarray, " n"],
    copies: Int[np.ndarray, " n"],
    *,
    priority_temperature: float,
    uniform_mix: float,
) -> Float[np.ndarray, " n"]:
    """Return the log-probability of each copy of a prompt's rows in a replay slot.

    p = uniform_mix / N + (1 - uniform_mix) * softmax(reward / priority_temperature),
    with N and the softmax over all N copies.

    Args:
        rewards: raw rewards of the stored rows.
        copies: number of responses of each row.
        priority_temperature: > 0; inf is uniform.
        uniform_mix: share of the uniform distribution, in [0, 1].
    """
    uniform = np.full(len(rewards), -math.log(copies.sum()))
    if math.isinf(priority_temperature) or uniform_mix == 1.0:
        return uniform
    logits = rewards / priority_temperature
    logits = logits - logits.max()
    softmax = logits - np.log((copies * np.exp(logits)).sum())
    if uniform_mix == 0.0:
        return softmax
    return np.logaddexp(math.log(uniform_mix) + uniform, math.log1p(-uniform_mix) + softmax)


def choose(
    rng: np.random.Generator,
    log_weights: Float[np.ndarray, " n"],
    copies: Int[np.ndarray, " n"],
    size: int,
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """Return, per row, the number of drawn copies without replacement, and of repeats.

    Args:
        rng: random generator.
        log_weights: log weight of each copy of a row.
        copies: copies of each row; 0 excludes the row.
        size: total number of draws. With fewer copies, all are taken, and the rest are repeats
            drawn with replacement.
    """
    total = int(copies.sum())
    none = np.zeros(len(copies), np.int64)
    if total >= size:
        row = np.repeat(np.arange(len(copies)), copies)
        # Gumbel top-k: equal to sequential draws without replacement.
        noisy = log_weights[row] + rng.gumbel(size=total)
        drawn = row[np.argpartition(-noisy, size - 1)[:size]]
        return np.bincount(drawn, minlength=len(copies)), none
    weights = copies * np.exp(log_weights - log_weights.max())
    repeats = rng.choice(len(copies), size - total, p=weights / weights.sum())
    return copies, np.bincount(repeats, minlength=len(copies))
