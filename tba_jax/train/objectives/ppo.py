# SPDX-License-Identifier: Apache-2.0
"""PPO-clip with a learned value of the prompt."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tba_jax.train.objectives.base import GroupData, Loss, Objective
from tba_jax.train.objectives.pieces import (
    clipped_gain,
    is_clipped,
    log_ratio,
    regularised,
    summed_behavior,
    with_balance,
)


@dataclasses.dataclass(frozen=True)
class Ppo(Objective):
    """Clipped ratios of tokens, the advantage over a learned value of the prompt.

    R = r - beta (log mu - log pi_ref)            mu: the sampler, as when the response was drawn
    A = R - V(x)
    loss = -mean over tokens of min(rho A, clip(rho) A) + value_weight mean over responses of
           (V(x) - R)^2 / 2

    A response is one action: with a reward at its end, no discount and a trace of 1, generalised
    advantage estimation is R - V(state), and V here is of the first state alone. V is the head that
    log Z is where that is learned, on the policy's own states (`objective.log_z_layers` and
    `log_z_rate` are its); one group gives one value, so K responses share its error.

    Attributes:
        clip_low, clip_high: how far the ratio may fall below 1 and rise above it.
        value_weight: of the value's loss.

    References:
        PPO, arXiv:1707.06347, eq. 7; generalised advantages, arXiv:1506.02438.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    value_weight: float = 0.1

    needs_behavior = True
    beta_is = "any"

    @property
    def heads(self) -> tuple[Literal["log_z"], ...]:
        """The value, which reads the prompt as log Z does."""
        return ("log_z",)

    def __call__(self, data: GroupData, beta: Float[Array, ""] | float) -> Loss:
        assert data.log_z is not None, "the value is the head's"
        value = data.log_z[:, None]
        reward = regularised(data, summed_behavior(data), beta)
        advantage = jax.lax.stop_gradient(reward - value)[..., None]
        ratio = jnp.exp(log_ratio(data))
        clip = self.clip_low, self.clip_high
        gain = data.mean_over_tokens(clipped_gain(ratio, advantage, *clip))
        error = data.mean_over_responses(jnp.square(value - reward) / 2)
        share = data.mean_over_tokens(is_clipped(ratio, advantage, *clip))
        loss = self.value_weight * error - gain
        return with_balance(data, beta, loss, clip_fraction=share, value_loss=error)


OBJECTIVE = Ppo
