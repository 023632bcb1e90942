# SPDX-License-Identifier: Apache-2.0
"""PPO: clipped token ratios with generalised advantages over learned values of states."""

import jax
import jax.numpy as jnp

from tba_jax.train.groups import Groups, Terms
from tba_jax.train.losses import (
    Beta,
    ClipHigh,
    ClipLow,
    Epochs,
    clipped,
    log_ratio,
    regularised,
    summed,
)
from tba_jax.train.objectives import Needs, objective

VALUE_WEIGHT = 0.1  # of the value loss


@objective(Needs(total="tokens", head="value"))
def ppo(
    groups: Groups,
    beta: Beta,
    *,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
    epochs: Epochs = 1,
) -> Terms:
    """-min(rho A, clip(rho) A) + 0.1 (V - stop(A + V))^2 / 2 for each token.

    R = r - beta (log mu - log pi_ref), at the last token
    A_t = R - V(s_t), the generalised advantage with lambda = 1

    State s_t is a prompt with the response tokens before t. V is a head on the policy's last hidden
    state; its gradient flows into the policy. V is fitted to R. If a step makes several updates, A
    and the target of V come from the policy at the start of the step.

    References:
        PPO, arXiv:1707.06347, eq. 7; generalised advantages, arXiv:1506.02438.
    """
    values = groups.values
    assert values is not None, "PPO needs the value head"
    start = jax.lax.stop_gradient(values if groups.start_values is None else groups.start_values)
    reward = regularised(groups, groups.behavior, beta)
    advantage = jnp.where(groups.mask, reward[..., None] - start, 0)
    gain, metrics = clipped(jnp.exp(log_ratio(groups)), advantage, clip_low, clip_high)
    error = jnp.square(values - advantage - start) / 2
    return Terms(summed(groups, VALUE_WEIGHT * error - gain), metrics | {"value_loss": error})
