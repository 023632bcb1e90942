# SPDX-License-Identifier: Apache-2.0
"""Trajectory Balance, in its VarGrad form or with a learned log Z."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tba_jax.train.objectives.base import (
    GroupData,
    Loss,
    Objective,
    balance_metrics,
    tb_residual,
    vargrad_log_z,
)


@dataclasses.dataclass(frozen=True)
class TrajectoryBalance(Objective):
    """Trajectory-balance loss, in VarGrad form unless log Z is learned; responses of any sampler.

    paper:      (1 / (p K)) sum_ij w_ij (log_z_i + residual_ij)^2     (no factor 1/2)
    advantage:  beta / 2 times that, whose gradient is exactly
                -(1 / (p K)) sum_ij w_ij A_ij grad log pi(y_ij|x_i) with
                A = (r - mean r) - beta (kl - mean kl), kl = log pi - log pi_ref

    for weights w_ij, how often each response was drawn, K in all for a prompt; means are with them.

    `advantage` keeps the gradient in units of the reward, so that gradient clipping means the same
    at every beta and a moving beta is not a hidden learning-rate schedule.

    Attributes:
        scale: see above; the second form of the gradient holds for VarGrad alone.
        log_z: vargrad: of the group; learned: a head on the prompt, gradients flow there too.

    References:
        TBA, arXiv:2503.18929, eq. 3, 5 and 7; learned log Z: appendix B.3.
    """

    scale: Literal["advantage", "paper"] = "advantage"
    log_z: Literal["vargrad", "learned"] = "vargrad"

    needs_behavior = False

    @property
    def heads(self) -> tuple[Literal["log_z"], ...]:
        """The learned log Z, where it is asked for."""
        return ("log_z",) if self.log_z == "learned" else ()

    def __call__(self, data: GroupData, beta: Float[Array, ""] | float) -> Loss:
        reference_logprob = jax.lax.stop_gradient(data.reference_logprob)
        residual = tb_residual(data.policy_logprob, reference_logprob, data.reward, beta=beta)
        log_z = vargrad_log_z(data, residual) if data.log_z is None else data.log_z
        mean_square = data.mean_over_responses(jnp.square(residual + log_z[:, None]))
        loss = mean_square * (beta / 2) if self.scale == "advantage" else mean_square
        return Loss(loss, balance_metrics(data, residual, log_z))


OBJECTIVE = TrajectoryBalance
