# SPDX-License-Identifier: Apache-2.0
"""REINFORCE, without a baseline and with the mean of the other responses (RLOO)."""

import dataclasses

from jaxtyping import Array, Float

from tba_jax.train.objectives.base import GroupData, Loss, Objective
from tba_jax.train.objectives.pieces import leave_one_out, regularised, with_balance


@dataclasses.dataclass(frozen=True)
class Reinforce(Objective):
    """The score-function gradient with the KL penalty inside the reward and no baseline.

    R_j = r_j - beta (log pi - log pi_ref), gradient stopped
    loss = -(1 / (p K)) sum w_j R_j log pi(y_j|x)

    References:
        Williams, 1992; as a baseline for language models arXiv:2402.14740.
    """

    needs_behavior = True
    beta_is = "any"

    def __call__(self, data: GroupData, beta: Float[Array, ""] | float) -> Loss:
        reward = regularised(data, data.policy_logprob, beta)
        return with_balance(data, beta, -data.mean_over_responses(reward * data.policy_logprob))


@dataclasses.dataclass(frozen=True)
class Rloo(Objective):
    """REINFORCE with a leave-one-out baseline and the KL penalty inside the reward.

    R_j = r_j - beta (log pi - log pi_ref), gradient stopped
    A_j = R_j - mean of the other K - 1, which may repeat y_j
    loss = -(1 / (p K)) sum w_j A_j log pi(y_j|x)

    Pi is the current policy, and the loss has no ratio to the sampler. So for beta > 0 the gradient
    equals that of Trajectory Balance (`advantage` scale) times K / (K - 1) on any data, including
    stale data. To compare with a method that is biased on stale data, use beta = 0 or
    `proximal_rloo`, whose KL is that of the sampler.

    References:
        RLOO, arXiv:2402.14740; TBA, arXiv:2503.18929, section 3.3 and appendix A.
    """

    needs_behavior = True
    beta_is = "any"

    def __call__(self, data: GroupData, beta: Float[Array, ""] | float) -> Loss:
        reward = regularised(data, data.policy_logprob, beta)
        advantage = reward - leave_one_out(data, reward)
        loss = -data.mean_over_responses(advantage * data.policy_logprob)
        return with_balance(data, beta, loss)
