# SPDX-License-Identifier: Apache-2.0
"""CISPO: REINFORCE with clipped importance weights, which keep every token's gradient."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tba_jax.settings import field
from tba_jax.train.objectives.base import GroupData, Loss, Objective
from tba_jax.train.objectives.pieces import (
    group_normalised,
    log_ratio,
    num_counted,
    sum_over_tokens,
    with_balance,
)


@dataclasses.dataclass(frozen=True)
class Cispo(Objective):
    """Score of each token times a capped ratio without gradient, averaged over a prompt's tokens.

    loss = -(1 / p) sum_i (1 / sum_j w_j |y_ij|) sum_j w_j A_ij sum_t stop(min(rho, cap)) log pi

    A group of equal rewards has A = 0, which matches the paper's filter. Log-probs are float32
    throughout.

    References:
        MiniMax-M1, arXiv:2506.13585, eq. 4; scale of the cap and mean over prompts:
        arXiv:2510.13786; TRL loss_type="cispo".
    """

    importance_cap: float = field(
        5.0, "largest ratio to the sampler, 1 + epsilon_high of the paper", above=0
    )

    needs_behavior = True
    beta_is = "unused"

    def __call__(self, data: GroupData, beta: Float[Array, ""] | float) -> Loss:
        advantage = group_normalised(data, data.reward)
        ratio = jnp.exp(log_ratio(data))
        weight = jax.lax.stop_gradient(jnp.minimum(ratio, self.importance_cap))
        scores = sum_over_tokens(data, weight * data.policy_token_logprobs)
        # Tokens of a response over the mean of its group; these factors sum to K over a group.
        per_token = 1 / jnp.maximum(data.mean_over_group(num_counted(data)), 1)
        loss = -data.mean_over_prompts(per_token * data.mean_over_group(advantage * scores))
        share = data.mean_over_tokens((ratio > self.importance_cap).astype(ratio.dtype))
        return with_balance(data, beta, loss, clip_fraction=share)


OBJECTIVE = Cispo
