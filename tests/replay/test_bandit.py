# SPDX-License-Identifier: Apache-2.0
"""A policy gradient through the replay buffer is that of the policy itself.

A bandit of three answers is small enough to write the expected gradient down. Most of its samples
are equal, so a buffer that kept one of equal responses would be biased.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_groups import make_buffer, make_groups

from tba_jax.train.groups import of_sums
from tba_jax.train.losses import rloo

LOGITS = np.array([2.0, 0.5, -0.5])
REWARD = np.array([0.2, 1.0, 0.5])
REFERENCE = np.log([0.5, 0.2, 0.3])
BETA = 0.1
NUM_DRAWS = 4000


def exact_gradient():
    """Of -E[r - beta (log pi - log pi_ref)] in the logits."""
    policy = np.exp(LOGITS) / np.exp(LOGITS).sum()
    value = REWARD - BETA * (np.log(policy) - REFERENCE)
    return -policy * (value - policy @ value)


def drawn_answers(*, samples, group_size):
    """[draws k]: answers of fresh groups of the policy's own samples."""
    rng = np.random.default_rng(0)
    policy = np.exp(LOGITS) / np.exp(LOGITS).sum()
    buffer = make_buffer(recency_prob=1.0)
    answers = np.zeros((NUM_DRAWS, group_size), int)
    for step in range(NUM_DRAWS):
        found = rng.choice(3, samples, p=policy).tolist()
        groups = make_groups(
            {0: [[a] for a in found]},
            version=step,
            rewards={0: [float(REWARD[a]) for a in found]},
        )
        buffer.merge(groups, step)
        (draw,) = buffer.draw(1, group_size, step)
        assert draw.is_fresh and len(set(draw.ids)) == group_size
        answers[step] = [y.response_tokens[0] for y in draw.trajectories]
    return answers


@pytest.mark.parametrize("samples", [4, 7])
def test_rloo_through_the_buffer_is_unbiased(samples):
    """All of the samples, and a part of them.

    Each of three means is more than 5 standard errors off with probability 6e-7. The seed is fixed.
    """
    answers = drawn_answers(samples=samples, group_size=4)

    def gradient(index):
        def loss(logits):
            policy = jax.nn.log_softmax(logits)[index][None]
            rows = (jnp.asarray(table, jnp.float32)[index][None] for table in (REFERENCE, REWARD))
            return rloo(of_sums(policy, *rows), BETA).loss.mean()

        return jax.grad(loss)(jnp.asarray(LOGITS, jnp.float32))

    gradients = np.asarray(jax.jit(jax.vmap(gradient))(answers), np.float64)
    error = gradients.std(axis=0, ddof=1) / np.sqrt(NUM_DRAWS)
    assert (error < 0.05 * np.abs(exact_gradient()).max()).all()
    assert (np.abs(gradients.mean(axis=0) - exact_gradient()) < 5 * error).all()
