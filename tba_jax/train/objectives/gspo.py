# SPDX-License-Identifier: Apache-2.0
"""Group sequence policy optimisation."""

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
    mean_of_each,
    with_balance,
)


@dataclasses.dataclass(frozen=True)
class Gspo(Objective):
    """GRPO with one ratio per response, the geometric mean of its token ratios.

    s_j = (pi(y_j) / mu(y_j))^(1 / |y_j|)
    loss = -(1 / (p K)) sum_j w_j min(s_j A_j, clip(s_j, 1 - low, 1 + high) A_j)

    References:
        GSPO, arXiv:2507.18071, eq. 5 to 7; clips of section 5.1.
    """

    clip_low: float = field(3e-4, "how far a ratio may fall below 1 before it is clipped", above=0)
    clip_high: float = field(4e-4, "how far a ratio may rise above 1 before it is clipped", above=0)

    needs_behavior = True
    beta_is = "unused"

    def __call__(self, data: GroupData, beta: Float[Array, ""] | float) -> Loss:
        advantage = group_normalised(data, data.reward)
        ratio = jnp.exp(mean_of_each(data, log_ratio(data)))
        clip = self.clip_low, self.clip_high
        loss = -data.mean_over_responses(clipped_gain(ratio, advantage, *clip))
        share = data.mean_over_responses(is_clipped(ratio, advantage, *clip))
        return with_balance(data, beta, loss, clip_fraction=share)


OBJECTIVE = Gspo
