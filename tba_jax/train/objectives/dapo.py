# SPDX-License-Identifier: Apache-2.0
"""DAPO's loss: clip-higher and a mean over all tokens."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from tba_jax.settings import field
from tba_jax.train.objectives.base import GroupData, Loss, Objective
from tba_jax.train.objectives.pieces import (
    clipped_gain,
    group_normalised,
    is_clipped,
    log_ratio,
    with_balance,
)


@dataclasses.dataclass(frozen=True)
class Dapo(Objective):
    """GRPO with a wider upper clip and a mean over all tokens of the batch, without a KL term.

    loss = -(1 / sum |y_j|) sum_j w_j sum_t min(rho A_j, clip(rho, 1 - low, 1 + high) A_j)

    DAPO's dynamic sampling is a setting of the buffer: `replay.equal_rewards=redraw`.

    References:
        DAPO, arXiv:2503.14476, eq. 8.
    """

    clip_low: float = field(0.2, "how far a ratio may fall below 1 before it is clipped", above=0)
    clip_high: float = field(0.28, "how far a ratio may rise above 1 before it is clipped", above=0)

    needs_behavior = True
    beta_is = "unused"

    def __call__(self, data: GroupData, beta: Float[Array, ""] | float) -> Loss:
        advantage = group_normalised(data, data.reward)[..., None]
        ratio = jnp.exp(log_ratio(data))
        clip = self.clip_low, self.clip_high
        loss = -data.mean_over_tokens(clipped_gain(ratio, advantage, *clip))
        share = data.mean_over_tokens(is_clipped(ratio, advantage, *clip))
        return with_balance(data, beta, loss, clip_fraction=share)


OBJECTIVE = Dapo
