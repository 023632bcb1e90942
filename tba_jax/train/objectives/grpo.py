# SPDX-License-Identifier: Apache-2.0
"""Group-relative policy optimisation."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from tba_jax.train.objectives.base import GroupData, Loss, Objective
from tba_jax.train.objectives.pieces import (
    clipped_gain,
    group_normalised,
    is_clipped,
    k3,
    log_ratio,
    mean_of_each,
    with_balance,
)


@dataclasses.dataclass(frozen=True)
class Grpo(Objective):
    """Clipped ratios of tokens, rewards over their group's deviation, a KL of tokens in the loss.

    A_j = (r_j - mean) / (std + 1e-4), std with K - 1
    loss = -(1 / (p K)) sum_j w_j (1 / |y_j|) sum_t [min(rho A, clip(rho) A) - beta k3]

    for rho = pi / mu of a token and k3 = exp(g) - g - 1, g = log pi_ref - log pi.

    Attributes:
        clip_low, clip_high: how far the ratio may fall below 1 and rise above it.
        beta, beta_schedule: of the run; only whether beta is always 0 is read, when no reference
            is needed.

    References:
        DeepSeekMath, arXiv:2402.03300, eq. 3 and 4; TRL `GRPOTrainer`, loss_type="grpo".
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    beta: float = 0.04
    beta_schedule: str = "constant"

    needs_behavior = True
    beta_is = "any"

    @property
    def needs_token_reference(self) -> bool:
        """Of the KL, unless its coefficient is always 0."""
        return self.beta > 0 or self.beta_schedule != "constant"

    def __call__(self, data: GroupData, beta: Float[Array, ""] | float) -> Loss:
        advantage = group_normalised(data, data.reward)[..., None]
        ratio = jnp.exp(log_ratio(data))
        clip = self.clip_low, self.clip_high
        gain = clipped_gain(ratio, advantage, *clip)
        if self.needs_token_reference:
            gain = gain - beta * k3(data)
        loss = -data.mean_over_responses(mean_of_each(data, gain))
        share = data.mean_over_tokens(is_clipped(ratio, advantage, *clip))
        return with_balance(data, beta, loss, clip_fraction=share)


OBJECTIVE = Grpo
