# SPDX-License-Identifier: Apache-2.0
"""RLOO with a clipped ratio of whole responses."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from tba_jax.settings import field
from tba_jax.train.objectives.base import GroupData, Loss, Objective
from tba_jax.train.objectives.pieces import (
    clipped_gain,
    is_clipped,
    leave_one_out,
    log_ratio,
    regularised,
    summed_behavior,
    with_balance,
)


@dataclasses.dataclass(frozen=True)
class ProximalRloo(Objective):
    """Leave-one-out advantages with PPO's clip of the ratio of whole responses.

    R_j = r_j - beta (log mu - log pi_ref)       mu: the sampler
    A_j = R_j - mean of the other K - 1
    loss = -(1 / (p K)) sum w_j min(rho_j A_j, clip(rho_j, 1 - low, 1 + high) A_j),  rho = pi / mu

    References:
        TBA, arXiv:2503.18929, eq. 6 (a baseline); TRL 0.9 `RLOOTrainer`; arXiv:2410.18252.
    """

    clip_low: float = field(0.2, "how far a ratio may fall below 1 before it is clipped", above=0)
    clip_high: float = field(0.2, "how far a ratio may rise above 1 before it is clipped", above=0)

    needs_behavior = True
    beta_is = "any"

    def __call__(self, data: GroupData, beta: Float[Array, ""] | float) -> Loss:
        reward = regularised(data, summed_behavior(data), beta)
        advantage = reward - leave_one_out(data, reward)
        ratio = jnp.exp(jnp.sum(log_ratio(data), axis=-1))
        clip = self.clip_low, self.clip_high
        loss = -data.mean_over_responses(clipped_gain(ratio, advantage, *clip))
        share = data.mean_over_responses(is_clipped(ratio, advantage, *clip))
        return with_balance(data, beta, loss, clip_fraction=share)


OBJECTIVE = ProximalRloo
