# SPDX-License-Identifier: Apache-2.0
"""PPO and VinePPO: clipped token ratios with advantages over values of states."""

from typing import Annotated

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
from tba_jax.train.objectives import About, Needs, objective

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


@objective(Needs(beta="unused", total="tokens", advantages=True))
def vineppo(
    groups: Groups,
    beta: Beta,
    *,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
    epochs: Epochs = 1,
    vine_tokens: Annotated[
        int, About("tokens of a response between two states with estimated values", at_least=1)
    ] = 8,
) -> Terms:
    """-min(rho A_t, clip(rho) A_t) for each token; no KL term and no learned value.

    A_t comes from `search.state_values`: the value of the next state minus the value of the state.
    Each value is the mean reward of continuations by the policy that drew the response.

    References:
        VinePPO, arXiv:2410.01679.
    """
    assert groups.advantages is not None, "VinePPO needs the searcher's advantages"
    ratio = jnp.exp(log_ratio(groups))
    gain, metrics = clipped(ratio, groups.advantages, clip_low, clip_high)
    return Terms(-summed(groups, gain), metrics)
