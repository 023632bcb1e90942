# SPDX-License-Identifier: Apache-2.0
"""PPO-clip with learned values of states and generalised advantages."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tba_jax.settings import field, share
from tba_jax.train.objectives.base import GroupData, Loss, Objective
from tba_jax.train.objectives.pieces import (
    clipped_gain,
    generalised_advantages,
    is_clipped,
    log_ratio,
    regularised,
    summed_behavior,
    with_balance,
)


@dataclasses.dataclass(frozen=True)
class Ppo(Objective):
    """Clipped token ratios with generalised advantages over learned state values.

    R = r - beta (log mu - log pi_ref), at the last token     mu: the sampler
    A_t = sum over l of gae_lambda^l (V(s_(t+l+1)) - V(s_(t+l))), R for the value after the last
    loss = -mean over tokens of min(rho A, clip(rho) A) + value_weight mean over tokens of
           (V(s_t) - stop(A_t + V(s_t)))^2 / 2

    State s_t is a prompt with the response tokens before t. V is a head on the policy's last hidden
    state; its gradient flows into the policy. With gae_lambda=1, the default, V is fitted to R. If
    a step makes several updates (`epochs`, `minibatches`), A and the target of V come from the
    policy at the start of the step.

    Attributes:
        value_weight: weight of the value loss.

    References:
        PPO, arXiv:1707.06347, eq. 7; generalised advantages, arXiv:1506.02438.
    """

    clip_low: float = field(0.2, "how far a ratio may fall below 1 before it is clipped", above=0)
    clip_high: float = field(0.2, "how far a ratio may rise above 1 before it is clipped", above=0)
    epochs: int = field(1, "passes over each batch", at_least=1)
    minibatches: int = field(
        1, "optimiser updates of a pass, each by an equal part of the batch", at_least=1
    )
    gae_lambda: float = share(
        1.0, "lambda of generalised advantages; below 1 they rely more on the learned values"
    )
    log_z_rate: float = field(
        1.0, "learning rate of the value head, divided by the policy's learning rate", above=0
    )
    log_z_layers: int = field(
        1,
        "layers of the value head: 1: linear; more: with GELU and LayerNorm between them",
        at_least=1,
    )
    value_weight: float = 0.1

    needs_behavior = True
    beta_is = "any"

    @property
    def heads(self) -> tuple[Literal["value"], ...]:
        """Learned heads: the value of every state."""
        return ("value",)

    def __call__(self, data: GroupData, beta: Float[Array, ""] | float) -> Loss:
        values = data.token_values
        assert values is not None, "PPO needs the value head"
        reward = regularised(data, summed_behavior(data), beta)
        begun = values if data.start_values is None else data.start_values
        advantage = generalised_advantages(data, begun, reward, self.gae_lambda)
        target = advantage + jax.lax.stop_gradient(begun)
        ratio = jnp.exp(log_ratio(data))
        clip = self.clip_low, self.clip_high
        gain = data.mean_over_tokens(clipped_gain(ratio, advantage, *clip))
        error = data.mean_over_tokens(jnp.square(values - target) / 2)
        share = data.mean_over_tokens(is_clipped(ratio, advantage, *clip))
        loss = self.value_weight * error - gain
        return with_balance(data, beta, loss, clip_fraction=share, value_loss=error)
