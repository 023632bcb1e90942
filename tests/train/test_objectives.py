# SPDX-License-Identifier: Apache-2.0
"""The objectives against exact statements about them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.train.objectives import pieces
from tba_jax.train.objectives.base import summed, tb_residual, vargrad_log_z
from tba_jax.train.objectives.reinforce import Rloo
from tba_jax.train.objectives.tb import TrajectoryBalance, estimated_log_z

TB, PAPER = TrajectoryBalance(), TrajectoryBalance("paper")


@pytest.fixture
def group():
    """Policy log-probs, reference log-probs and rewards of 3 prompts x 5 responses."""
    rng = np.random.default_rng(0)
    policy, reference, reward = (jnp.asarray(rng.normal(size=(3, 5)), jnp.float32) for _ in "abc")
    return policy, reference, reward


def test_loss_is_zero_and_log_z_exact_at_the_enumerated_optimum():
    # Nine responses, pi = pi_ref exp(r / beta) / Z: residuals are all -log Z.
    rng = np.random.default_rng(1)
    beta = 0.3
    reference = np.log(rng.dirichlet(np.ones(9), size=2))
    reward = rng.normal(size=(2, 9))
    log_z = np.log(np.sum(np.exp(reference + reward / beta), axis=1))
    policy = reference + reward / beta - log_z[:, None]
    with jax.enable_x64(True):
        data = summed(jnp.asarray(policy), jnp.asarray(reference), jnp.asarray(reward))
        loss = TB(data, beta)
        np.testing.assert_allclose(loss.metrics["tb_loss"], 0.0, atol=1e-25)
        np.testing.assert_allclose(loss.metrics["log_z"], log_z.mean(), rtol=1e-14)
        residual = tb_residual(policy, reference, reward, beta=beta)
        np.testing.assert_allclose(vargrad_log_z(data, jnp.asarray(residual)), log_z, rtol=1e-14)


def test_rloo_without_a_kl_has_a_gradient_and_ignores_the_reference(group):
    # It was nan: the residual was divided by beta.
    policy, _, reward = group
    found = Rloo()(summed(*group), 0.0)
    others = (reward.sum(1, keepdims=True) - reward) / 4
    np.testing.assert_allclose(found.loss, -np.mean((reward - others) * policy), rtol=1e-5)
    gradient = jax.grad(lambda p: Rloo()(summed(p, jnp.inf + policy, reward), 0.0).loss)(policy)
    np.testing.assert_allclose(gradient, -(reward - others) / policy.size, atol=1e-6)
    assert np.isnan(found.metrics["tb_loss"])  # there is no target to be far from


def test_a_given_log_z_is_used_and_gets_the_gradient_of_a_square():
    policy, reference = jnp.array([[-1.0, -2.0]]), jnp.array([[-1.5, -1.0]])
    reward, log_z = jnp.array([[0.5, 0.0]]), jnp.array([0.7])

    def loss(log_z):
        return PAPER(summed(policy, reference, reward, log_z), 0.5).loss

    residual = np.array([-1.0 + 1.5 - 1.0, -2.0 + 1.0])
    np.testing.assert_allclose(loss(log_z), np.mean((residual + 0.7) ** 2), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(loss)(log_z), [2 * np.mean(residual + 0.7)], rtol=1e-5)


# How far a group's mean is from its equal rewards in float32 depends on K and on the weights.
@pytest.mark.parametrize("weights", [[1] * 6, [1] * 7, [2, 3, 1, 0], [11, 0, 0]])
@pytest.mark.parametrize("reward", [0.0, 0.1, 7.3, -7.3, 1000.7, 1e6 + 0.1])
def test_equal_rewards_have_an_advantage_of_exactly_zero(reward, weights):
    weight = jnp.asarray([weights], jnp.float32)
    rewards = jnp.where(weight > 0, jnp.float32(reward), 0)
    zeros = jnp.zeros_like(rewards)
    data = summed(zeros, zeros, rewards, weight=weight)
    found = {
        "centred": pieces.centred(data, rewards),
        "leave_one_out": rewards - pieces.leave_one_out(data, rewards),
        "group_normalised": pieces.group_normalised(data, rewards),
        **{
            name: rewards - estimated_log_z(data, name, zeros, rewards)
            for name in ("vargrad", "leave_one_out", "mean_reward")
        },
    }
    for name, advantage in found.items():
        drawn = np.asarray(advantage)[np.asarray(weight) > 0]
        np.testing.assert_array_equal(drawn, 0.0, err_msg=name)


def test_a_single_response_has_no_others_and_a_baseline_of_zero():
    data = summed(*(jnp.full((1, 1), x) for x in (-1.0, -1.0, 2.0)))
    np.testing.assert_array_equal(pieces.leave_one_out(data, data.reward), 0.0)
