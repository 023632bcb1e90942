# SPDX-License-Identifier: Apache-2.0
"""Group-relative policy optimisation."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from tba_jax.settings import Schedule, field
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
    """Clipped token ratios, rewards divided by the group's deviation, and a KL term per token.

    A_j = (r_j - mean) / (std + 1e-4), std with K - 1
    loss = -(1 / (p K)) sum_j w_j (1 / |y_j|) sum_t [min(rho A, clip(rho) A) - beta k3]

    for rho = pi / mu of a token and k3 = exp(g) - g - 1, g = log pi_ref - log pi.

    Attributes:
        beta: KL coefficient of the run, read only to detect beta = 0 in every step: no reference is
            needed then.

    References:
        DeepSeekMath, arXiv:2402.03300, eq. 3 and 4; TRL `GRPOTrainer`, loss_type="grpo".
    """

    clip_low: float = field(0.2, "how far a ratio may fall below 1 before it is clipped", above=0)
    clip_high: float = field(0.2, "how far a ratio may rise above 1 before it is clipped", above=0)
    beta: Schedule = Schedule(0.04)

    needs_behavior = True
    beta_is = "any"

    @property
    def needs_token_reference(self) -> bool:
        return not self.beta.is_always(0.0)

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
