# SPDX-License-Identifier: Apache-2.0
"""How far a batch is from the current policy."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


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


# The least staleness of each stratum, in steps.
STRATA = (0, 1, 2, 4, 8, 16, 32)
# Of the strata among the metrics of a step, which are numbers otherwise.
STRATA_KEY = "strata"
# What is said about a stratum: that it is so much of a batch and its ratios weigh so little.
SPENT_SHARE, SPENT_ESS = 0.05, 0.1


class Measured(NamedTuple):
    """What is known of every response of a batch, [p k] each; sums are over the tokens that count.

    Attributes:
        policy, behavior, reference: log-probs.
        tokens: number of tokens that count.
        far_tokens: of these, tokens whose ratio to the sampler is outside 0.8 to 1.2.
        residual: of Trajectory Balance, less its group's mean; nan at beta = 0.
        staleness: in steps.
        weight: how often it was drawn.
    """

    policy: Float[Array, "p k"]
    behavior: Float[Array, "p k"]
    reference: Float[Array, "p k"]
    tokens: Float[Array, "p k"]
    far_tokens: Float[Array, "p k"]
    residual: Float[Array, "p k"]
    staleness: Int[Array, "p k"]
    weight: Float[Array, "p k"]


class Stratum(NamedTuple):
    """Responses of some staleness; scalars, nan where there is none.

    Attributes:
        share: of the batch's responses.
        ess_fraction, log_ratio_p05, log_ratio_p50, log_ratio_p95: as in `OffPolicyStats`.
        residual_rms: of the residuals less their group's mean: how far from balance.
        kl_reference: mean of log pi - log pi_ref.
        kl_behavior: mean of log mu - log pi: an estimate of KL(mu || pi).
        clip_fraction: of the tokens, those whose ratio is outside 0.8 to 1.2.
        entropy: of the sampler, nats per token, of its own samples.
        unique_share: distinct responses, of those that were drawn.
    """

    share: Float[Array, ""]
    ess_fraction: Float[Array, ""]
    log_ratio_p05: Float[Array, ""]
    log_ratio_p50: Float[Array, ""]
    log_ratio_p95: Float[Array, ""]
    residual_rms: Float[Array, ""]
    kl_reference: Float[Array, ""]
    kl_behavior: Float[Array, ""]
    clip_fraction: Float[Array, ""]
    entropy: Float[Array, ""]
    unique_share: Float[Array, ""]


def stratified(measured: Measured) -> Float[Array, "fields s"]:
    """Each stratum of `STRATA`: the fields of `Stratum`, and these along the second axis."""
    low = jnp.asarray(STRATA)
    high = jnp.asarray([*STRATA[1:], jnp.iinfo(jnp.int32).max])

    def of(low: Array, high: Array) -> Stratum:
        age = measured.staleness
        weight = jnp.where((age >= low) & (age < high), measured.weight, 0)
        drawn = jnp.sum(weight)

        def mean(x: Float[Array, "p k"]) -> Float[Array, ""]:
            return jnp.sum(jnp.where(weight > 0, x, 0) * weight) / drawn

        stats = off_policy_stats(measured.policy, measured.behavior, weight)
        found = Stratum(
            drawn / jnp.sum(measured.weight),
            *stats,
            jnp.sqrt(mean(jnp.square(measured.residual))),
            mean(measured.policy - measured.reference),
            mean(measured.behavior - measured.policy),
            mean(measured.far_tokens) / mean(measured.tokens),
            -mean(measured.behavior) / mean(measured.tokens),
            jnp.sum(weight > 0) / drawn,
        )
        return jax.tree.map(lambda x: jnp.where(drawn > 0, x, jnp.nan), found)

    return jnp.stack(jax.vmap(of)(low, high))


def named_strata(found: np.ndarray) -> dict[str, float]:
    """Numbers of the strata that hold something, as "stale_LEAST/NAME"."""
    return {
        f"stale_{low}/{name}": float(found[j, i])
        for i, low in enumerate(STRATA)
        for j, name in enumerate(Stratum._fields)
        if np.isfinite(found[j, i])
    }


def spent_strata(strata: Mapping[str, float]) -> list[str]:
    """What ratios to the sampler no longer learn from, a sentence for each age.

    Falling effective sample size comes before a policy gradient's collapse (arXiv:2602.17616).

    Args:
        strata: as `named_strata` gives them.
    """
    lines = []
    for low in STRATA:
        share = strata.get(f"stale_{low}/share", 0.0)
        ess = strata.get(f"stale_{low}/ess_fraction", 1.0)
        if share > SPENT_SHARE and ess < SPENT_ESS:
            lines.append(
                f"responses from {low} steps old on, {share:.0%} of a batch, have an effective "
                f"sample size of {ess:.1%}: an objective with ratios learns from a few of them. "
                "Lower replay.max_staleness or the learning rate, or take objective.name=tb"
            )
    return lines


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
