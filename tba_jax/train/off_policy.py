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
    policy_logprob: Float[Array, "p k"], behavior_logprob: Float[Array, "p k"]
) -> OffPolicyStats:
    """Diagnostics of the ratio policy / behavior. TB itself needs no ratio (paper section 3.3).

    ess_fraction = (sum w)^2 / (n sum w^2), w = exp(log ratio), computed in log space.
    """
    log_ratio = (policy_logprob - behavior_logprob).reshape(-1)
    log_ess = 2 * jax.nn.logsumexp(log_ratio) - jax.nn.logsumexp(2 * log_ratio)
    p05, p50, p95 = jnp.quantile(log_ratio, jnp.array([0.05, 0.5, 0.95]))
    return OffPolicyStats(jnp.exp(log_ess) / log_ratio.size, p05, p50, p95)


def largest_gap(
    policy: Float[Array, "n t"], behavior: Float[Array, "n t"], is_current: Bool[Array, "n t"]
) -> Float[Array, ""]:
    """Largest |policy - behavior| per token over what the very version that is trained drew.

    nan where the batch holds none of it. Anything above rounding means two definitions of
    log-probs.
    """
    gap = jnp.max(jnp.where(is_current, jnp.abs(policy - behavior), -jnp.inf))
    return jnp.where(gap >= 0, gap, jnp.nan)
