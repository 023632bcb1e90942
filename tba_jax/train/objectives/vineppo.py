# SPDX-License-Identifier: Apache-2.0
"""PPO-clip with state values estimated by sampling continuations from intermediate states."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from tba_jax.settings import field
from tba_jax.train.objectives.base import GroupData, Loss, Objective
from tba_jax.train.objectives.pieces import clipped_gain, is_clipped, log_ratio, with_balance


@dataclasses.dataclass(frozen=True)
class VinePpo(Objective):
    """Clipped token ratios; advantages are differences of values that the searcher estimated.

    loss = -mean over tokens of min(rho A_t, clip(rho) A_t),   rho = pi / mu of a token

    A_t comes from `search.state_values`: the value of the next state minus the value of the state.
    Each value is the mean reward of continuations by the policy that drew the response. There is no
    KL term and no learned value.

    References:
        VinePPO, arXiv:2410.01679.
    """

    clip_low: float = field(0.2, "how far a ratio may fall below 1 before it is clipped", above=0)
    clip_high: float = field(0.2, "how far a ratio may rise above 1 before it is clipped", above=0)
    epochs: int = field(1, "passes over each batch", at_least=1)
    minibatches: int = field(
        1, "optimiser updates of a pass, each by an equal part of the batch", at_least=1
    )
    vine_tokens: int = field(
        8, "tokens of a response between two states with estimated values", at_least=1
    )
    vine_samples: int = field(
        4, "continuations per state for the estimate of its value", at_least=1
    )

    needs_behavior = True
    needs_advantages = True
    beta_is = "unused"

    def __call__(self, data: GroupData, beta: Float[Array, ""] | float) -> Loss:
        advantage = data.token_advantages
        assert advantage is not None, "VinePPO needs the searcher's advantages"
        ratio = jnp.exp(log_ratio(data))
        clip = self.clip_low, self.clip_high
        loss = -data.mean_over_tokens(clipped_gain(ratio, advantage, *clip))
        share = data.mean_over_tokens(is_clipped(ratio, advantage, *clip))
        return with_balance(data, beta, loss, clip_fraction=share)


OBJECTIVE = VinePpo
