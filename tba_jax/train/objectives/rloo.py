# SPDX-License-Identifier: Apache-2.0
"""REINFORCE with a leave-one-out baseline."""

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
class Rloo(Objective):
    """REINFORCE with a leave-one-out baseline and the KL penalty inside the reward.

    R_j = r_j - beta (log pi - log pi_ref), gradient stopped
    A_j = R_j - mean of the other K - 1, repeats of y_j among them
    loss = -(1 / (p K)) sum w_j A_j log pi(y_j|x)

    An on-policy estimator: on stale responses it is biased, which is the comparison it is here for.

    References:
        RLOO, arXiv:2402.14740; TBA, arXiv:2503.18929, eq. 6.
    """

    needs_behavior = True

    def __call__(self, data: GroupData, beta: Float[Array, ""] | float) -> Loss:
        k = data.num_drawn
        residual = jax.lax.stop_gradient(
            tb_residual(data.policy_logprob, data.reference_logprob, data.reward, beta=beta)
        )
        regularised = -beta * residual
        centred = regularised - data.mean_over_group(regularised)[:, None]
        advantage = centred * (k / jnp.maximum(k - 1, 1))[:, None]
        loss = -data.mean_over_responses(advantage * data.policy_logprob)
        return Loss(loss, balance_metrics(data, residual, vargrad_log_z(data, residual)))


OBJECTIVE = Rloo
