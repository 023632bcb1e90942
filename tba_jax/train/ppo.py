# SPDX-License-Identifier: Apache-2.0
"""PPO: clipped token ratios with generalised advantages over learned values of states."""

from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tba_jax.train.groups import Groups, Terms
from tba_jax.train.losses import (
    Beta,
    ClipHigh,
    ClipLow,
    Epochs,
    HeadRate,
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
    gae_lambda: Annotated[
        float,
        About(
            "lambda of generalised advantages; below 1 they rely more on the learned values",
            at_least=0,
            at_most=1,
        ),
    ] = 1.0,
    epochs: Epochs = 1,
    log_z_rate: HeadRate = 1.0,
) -> Terms:
    """-min(rho A, clip(rho) A) + 0.1 (V - stop(A + V))^2 / 2 for each token.

    R = r - beta (log mu - log pi_ref), at the last token
    A_t = sum over l of gae_lambda^l (V(s_(t+l+1)) - V(s_(t+l))), R for the value after the last

    State s_t is a prompt with the response tokens before t. V is a head on the policy's last hidden
    state; its gradient flows into the policy. With gae_lambda=1, V is fitted to R. If a step makes
    several updates, A and the target of V come from the policy at the start of the step.

    References:
        PPO, arXiv:1707.06347, eq. 7; generalised advantages, arXiv:1506.02438.
    """
    values = groups.values
    assert values is not None, "PPO needs the value head"
    start = jax.lax.stop_gradient(values if groups.start_values is None else groups.start_values)
    reward = regularised(groups, groups.behavior, beta)
    advantage = generalised_advantages(groups, start, reward, gae_lambda)
    gain, metrics = clipped(jnp.exp(log_ratio(groups)), advantage, clip_low, clip_high)
    error = jnp.square(values - advantage - start) / 2
    return Terms(summed(groups, VALUE_WEIGHT * error - gain), metrics | {"value_loss": error})


def generalised_advantages(
    groups: Groups,
    values: Float[Array, "p k t"],
    reward: Float[Array, "p k"],
    gae_lambda: float,
) -> Float[Array, "p k t"]:
    """Return A_t = sum over l of gae_lambda^l delta_(t+l), 0 at uncounted tokens.

    delta is V(next state) - V(state), and R - V(state) at the last token: there is no discount, and
    the reward comes at the end. Uncounted tokens are not steps.

    References:
        Generalised advantages, arXiv:1506.02438, eq. 16.
    """

    def back(
        after: tuple[Array, Array], here: tuple[Array, Array]
    ) -> tuple[tuple[Array, Array], Array]:
        value, counts = here
        advantage = after[0] - value + gae_lambda * after[1]
        before = jnp.where(counts, value, after[0]), jnp.where(counts, advantage, after[1])
        return before, jnp.where(counts, advantage, 0)

    steps = jnp.moveaxis(values, -1, 0), jnp.moveaxis(groups.mask, -1, 0)
    end = reward.astype(values.dtype), jnp.zeros_like(values[..., 0])
    return jnp.moveaxis(jax.lax.scan(back, end, steps, reverse=True)[1], 0, -1)
