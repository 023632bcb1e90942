# SPDX-License-Identifier: Apache-2.0
"""How far a batch is from the current policy."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class OffPolicyStats(NamedTuple):
    """How far a batch is from the current policy; all scalars, float32.

    Attributes:
        ess_fraction: effective sample size of the sequence ratios pi / mu, over the batch size.
        log_ratio_p05: 5th percentile of log pi(y|x) - log mu(y|x), in nats per response.
        log_ratio_p50: median.
        log_ratio_p95: 95th percentile.
    """

    ess_fraction: Float[Array, ""]
    log_ratio_p05: Float[Array, ""]
    log_ratio_p50: Float[Array, ""]
    log_ratio_p95: Float[Array, ""]


def off_policy_stats(
    policy_logprob: Float[Array, "p k"],
    behavior_logprob: Float[Array, "p k"],
    weight: Float[Array, "p k"],
) -> OffPolicyStats:
    """Diagnostics of the ratio policy / behavior. TB itself needs no ratio (paper section 3.3).

    ess_fraction = (sum v)^2 / (n sum v^2), v = exp(log ratio), computed in log space; sums are over
    the n responses that were drawn, each as often as its weight says.
    """
    log_ratio, weight = (policy_logprob - behavior_logprob).reshape(-1), weight.reshape(-1)
    log_ess = 2 * jax.nn.logsumexp(log_ratio, b=weight) - jax.nn.logsumexp(2 * log_ratio, b=weight)
    p05, p50, p95 = weighted_quantile(log_ratio, weight, jnp.array([0.05, 0.5, 0.95]))
    return OffPolicyStats(jnp.exp(log_ess) / jnp.sum(weight), p05, p50, p95)


def weighted_quantile(
    x: Float[Array, " n"], weight: Float[Array, " n"], q: Float[Array, " q"]
) -> Float[Array, " q"]:
    """`jnp.quantile` of x with each value repeated as its weight says.

    Weights that are no whole numbers give the same step function with steps of their length.
    """
    order = jnp.argsort(x)
    values, ends = x[order], jnp.cumsum(weight[order])
    place = q * (ends[-1] - 1)

    def at(index: Float[Array, " q"]) -> Float[Array, " q"]:
        return values[jnp.searchsorted(ends, index, side="right")]

    low = jnp.floor(place)
    return at(low) + (place - low) * (at(jnp.ceil(place)) - at(low))


def largest_gap(
    policy: Float[Array, "*n t"], behavior: Float[Array, "*n t"], is_current: Bool[Array, "*n t"]
) -> Float[Array, ""]:
    """Largest |policy - behavior| per token over what the very version that is trained drew.

    nan where the batch holds none of it. Anything above rounding means two definitions of
    log-probs.
    """
    gap = jnp.max(jnp.where(is_current, jnp.abs(policy - behavior), -jnp.inf))
    return jnp.where(gap >= 0, gap, jnp.nan)
