# SPDX-License-Identifier: Apache-2.0
"""Online DPO."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tba_jax.train.objectives.base import (
    GroupData,
    Loss,
    Objective,
    balance_metrics,
    tb_residual,
    vargrad_log_z,
)


@dataclasses.dataclass(frozen=True)
class OnlineDpo(Objective):
    """Online DPO: prefers the group's best response by reward to its worst.

    loss = -(1 / p) sum_i log sigmoid(beta (h_best - h_worst)),  h = log pi - log pi_ref

    A group with equal rewards has no preference and contributes 0. Only the order of the rewards
    matters; responses between the best and the worst are not used. Beta is the strength of the
    regularisation towards the reference.

    References:
        Direct alignment from online feedback, Guo et al., arXiv:2402.04792; a baseline in TBA,
        arXiv:2503.18929, table 1.
    """

    needs_behavior = True

    def __call__(self, data: GroupData, beta: Float[Array, ""] | float) -> Loss:
        policy_logprob, reward = data.policy_logprob, data.reward
        reference_logprob = jax.lax.stop_gradient(data.reference_logprob)
        residual = tb_residual(policy_logprob, reference_logprob, reward, beta=beta)
        log_ratio = policy_logprob - reference_logprob
        is_drawn = data.weight > 0
        best = jnp.argmax(jnp.where(is_drawn, reward, -jnp.inf), axis=1)
        worst = jnp.argmin(jnp.where(is_drawn, reward, jnp.inf), axis=1)
        rows = jnp.arange(reward.shape[0])
        margin = beta * (log_ratio[rows, best] - log_ratio[rows, worst])
        is_pair = reward[rows, best] > reward[rows, worst]
        loss = -data.mean_over_prompts(jnp.where(is_pair, jax.nn.log_sigmoid(margin), 0.0))
        return Loss(loss, balance_metrics(data, residual, vargrad_log_z(data, residual)))
