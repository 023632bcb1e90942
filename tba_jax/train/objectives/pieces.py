# SPDX-License-Identifier: Apache-2.0
"""Functions that several objectives share: advantages, ratios to the sampler, clipped gains.

Invariant: a response of weight w counts as w responses; K responses form a group.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tba_jax.train.objectives.base import (
    GroupData,
    Loss,
    balance_metrics,
    tb_residual,
    vargrad_log_z,
)

# Added to the deviation of a group's rewards, as in TRL.
STD_EPS = 1e-4


def baseline(data: GroupData, x: Float[Array, "p k"]) -> Float[Array, " p"]:
    """Return the mean of each group, clamped to the range of x against rounding.

    Invariant: if all x of a group are equal, the mean is exactly equal to them.

    Args:
        data: the groups.
        x: numbers through which no gradient flows.
    """
    return _within(data, x, data.mean_over_group(x)[:, None])[:, 0]


def centred(data: GroupData, x: Float[Array, "p k"]) -> Float[Array, "p k"]:
    """Return x minus the mean of its group; exactly 0 if all x of a group are equal."""
    return x - baseline(data, x)[:, None]


def leave_one_out(data: GroupData, x: Float[Array, "p k"]) -> Float[Array, "p k"]:
    """Return the mean of x over the other K - 1 responses, which may repeat the same response.

    In a group of equal x the result is exactly x; for K = 1 the result is 0.
    """
    k = data.num_drawn[:, None]
    total = jnp.sum(x * data.weight, axis=1, keepdims=True)
    others = (total - x) / jnp.maximum(k - 1, 1)
    return jnp.where(k > 1, _within(data, x, others), others)


def _within(
    data: GroupData, x: Float[Array, "p k"], mean: Float[Array, "p n"]
) -> Float[Array, "p n"]:
    """Return `mean` clamped to the range of x in each group; an empty group is not clamped."""
    is_drawn = data.weight > 0
    least = jnp.min(jnp.where(is_drawn, x, jnp.inf), axis=1, keepdims=True)
    greatest = jnp.max(jnp.where(is_drawn, x, -jnp.inf), axis=1, keepdims=True)
    return jnp.where(data.num_drawn[:, None] > 0, jnp.clip(mean, least, greatest), mean)


def group_normalised(data: GroupData, reward: Float[Array, "p k"]) -> Float[Array, "p k"]:
    """Return (r - mean) / (std + 1e-4) of each group, std with K - 1 as in TRL and verl.

    A group with equal rewards becomes exactly 0.
    """
    gap = centred(data, reward)
    k = data.num_drawn
    variance = data.mean_over_group(jnp.square(gap)) * k / jnp.maximum(k - 1, 1)
    # The square root has no gradient at 0; rewards need no gradient.
    std = jnp.sqrt(jax.lax.stop_gradient(variance))[:, None]
    return gap / (std + STD_EPS)


def log_ratio(data: GroupData) -> Float[Array, "p k t"]:
    """Return log pi - log mu of each counted token, mu the sampler; 0 at other tokens."""
    return jnp.where(data.mask, data.policy_token_logprobs - data.behavior_token_logprobs, 0)


def summed_behavior(data: GroupData) -> Float[Array, "p k"]:
    """Return log mu(y|x), mu the sampler, summed over the counted tokens."""
    return jnp.sum(jnp.where(data.mask, data.behavior_token_logprobs, 0), axis=-1)


def num_counted(data: GroupData) -> Float[Array, "p k"]:
    """Return the number of counted tokens of each response; at least 1, as means divide by it."""
    return jnp.maximum(jnp.sum(data.mask, axis=-1), 1)


def sum_over_tokens(data: GroupData, x: Float[Array, "p k t"]) -> Float[Array, "p k"]:
    """Return the sum over the counted tokens of each response."""
    return jnp.sum(jnp.where(data.mask, x, 0), axis=-1)


def mean_of_each(data: GroupData, x: Float[Array, "p k t"]) -> Float[Array, "p k"]:
    """Return the mean over the counted tokens of each response."""
    return sum_over_tokens(data, x) / num_counted(data)


def clipped_gain(
    ratio: Float[Array, "..."], advantage: Float[Array, "..."], low: float, high: float
) -> Float[Array, "..."]:
    """Return min(ratio A, clip(ratio, 1 - low, 1 + high) A), which PPO maximises."""
    clipped = jnp.clip(ratio, 1 - low, 1 + high)
    return jnp.minimum(ratio * advantage, clipped * advantage)


def is_clipped(
    ratio: Float[Array, "..."], advantage: Float[Array, "..."], low: float, high: float
) -> Float[Array, "..."]:
    """Return 1 where `clipped_gain` has no gradient, else 0."""
    above = (ratio > 1 + high) & (advantage > 0)
    below = (ratio < 1 - low) & (advantage < 0)
    return (above | below).astype(ratio.dtype)


def share_outside(data: GroupData, low: float, high: float, is_of_tokens: bool) -> Float[Array, ""]:
    """Return the share of tokens, or of responses, with a ratio outside [1 - low, 1 + high]."""
    ratio = log_ratio(data)
    ratio = jnp.exp(ratio if is_of_tokens else jnp.sum(ratio, axis=-1))
    past = ((ratio < low) | (ratio > high)).astype(ratio.dtype)
    return data.mean_over_tokens(past) if is_of_tokens else data.mean_over_responses(past)


def generalised_advantages(
    data: GroupData,
    values: Float[Array, "p k t"],
    reward: Float[Array, "p k"],
    trace: float,
) -> Float[Array, "p k t"]:
    """Return A_t = sum over l of trace^l delta_(t+l), 0 at uncounted tokens; without gradient.

    delta is V(next state) - V(state), and R - V(state) at the last token: there is no discount, and
    the reward comes at the end. Uncounted tokens are not steps.

    References:
        Generalised advantages, arXiv:1506.02438, eq. 16.
    """
    values, reward = jax.lax.stop_gradient((values, reward))

    def back(
        after: tuple[Array, Array], here: tuple[Array, Array]
    ) -> tuple[tuple[Array, Array], Array]:
        value, counts = here
        advantage = after[0] - value + trace * after[1]
        return jax.tree.map(
            lambda x, y: jnp.where(counts, x, y), (value, advantage), after
        ), jnp.where(counts, advantage, 0)

    steps = jnp.moveaxis(values, -1, 0), jnp.moveaxis(data.mask, -1, 0)
    end = reward.astype(values.dtype), jnp.zeros_like(values[..., 0])
    return jnp.moveaxis(jax.lax.scan(back, end, steps, reverse=True)[1], 0, -1)


def k3(data: GroupData) -> Float[Array, "p k t"]:
    """Return Schulman's estimate of KL(pi || pi_ref) per token: exp(g) - g - 1.

    g = log pi_ref - log pi; needs the reference token by token.
    """
    assert data.reference_token_logprobs is not None
    reference = jax.lax.stop_gradient(data.reference_token_logprobs)
    gap = jnp.where(data.mask, reference - data.policy_token_logprobs, 0)
    return jnp.exp(gap) - gap - 1


def regularised(
    data: GroupData, logprob: Float[Array, "p k"], beta: Float[Array, ""] | float
) -> Float[Array, "p k"]:
    """Return r - beta (logprob - log pi_ref), gradient stopped; the raw reward at beta = 0."""
    kl = jnp.where(beta > 0, logprob - data.reference_logprob, 0)
    return jax.lax.stop_gradient(data.reward - beta * kl)


def with_balance(
    data: GroupData,
    beta: Float[Array, ""] | float,
    loss: Float[Array, ""],
    **metrics: Float[Array, ""],
) -> Loss:
    """Return a loss with its own metrics and the metrics of Trajectory Balance.

    At beta = 0 the metrics of Trajectory Balance are nan, because the target is no distribution.
    """
    divisor = jnp.where(beta > 0, beta, jnp.nan)
    residual = tb_residual(data.policy_logprob, data.reference_logprob, data.reward, beta=divisor)
    known = balance_metrics(data, residual, vargrad_log_z(data, residual))
    return Loss(loss, {**known, **jax.lax.stop_gradient(metrics)})
