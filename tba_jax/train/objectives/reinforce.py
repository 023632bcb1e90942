# SPDX-License-Identifier: Apache-2.0
"""REINFORCE without a baseline."""

import dataclasses

from jaxtyping import Array, Float

from tba_jax.train.objectives.base import GroupData, Loss, Objective
from tba_jax.train.objectives.pieces import regularised, with_balance


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


OBJECTIVE = Reinforce
