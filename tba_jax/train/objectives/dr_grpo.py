# SPDX-License-Identifier: Apache-2.0
"""GRPO without its two normalisations."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from tba_jax.settings import field
from tba_jax.train.objectives.base import GroupData, Loss, Objective
from tba_jax.train.objectives.pieces import (
    centred,
    clipped_gain,
    is_clipped,
    log_ratio,
    sum_over_tokens,
    with_balance,
)


@dataclasses.dataclass(frozen=True)
class DrGrpo(Objective):
    """Clipped token ratios and centred rewards, without division by deviation or length.

    A_j = r_j - mean
    loss = -(1 / (p K)) sum_j w_j sum_t min(rho A_j, clip(rho) A_j),  rho = pi / mu of a token

    The paper divides by the maximum response length. Here the divisor is 1, so that gradients are
    in units of the reward, as in RLOO. There is no KL term.

    References:
        Understanding R1-Zero-like training, arXiv:2503.20783.
    """

    clip_low: float = field(0.2, "how far a ratio may fall below 1 before it is clipped", above=0)
    clip_high: float = field(0.2, "how far a ratio may rise above 1 before it is clipped", above=0)

    needs_behavior = True
    beta_is = "unused"

    def __call__(self, data: GroupData, beta: Float[Array, ""] | float) -> Loss:
        advantage = centred(data, data.reward)[..., None]
        ratio = jnp.exp(log_ratio(data))
        clip = self.clip_low, self.clip_high
        gain = clipped_gain(ratio, advantage, *clip)
        loss = -data.mean_over_responses(sum_over_tokens(data, gain))
        share = data.mean_over_tokens(is_clipped(ratio, advantage, *clip))
        return with_balance(data, beta, loss, clip_fraction=share)


OBJECTIVE = DrGrpo
