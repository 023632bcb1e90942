# SPDX-License-Identifier: Apache-2.0
"""Metrics of a batch that do not depend on the objective, and its distance from the policy.

Invariant: a response counts once per draw in every metric except the number of rows.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tba_jax.flow.batch import Batch, PackedBatch
from tba_jax.train.micro_batches import Cut
from tba_jax.train.rows import Rows, num_valid_tokens


class OffPolicyStats(NamedTuple):
    """Distance between a batch's sampler and the current policy; float32 scalars.

    Attributes:
        ess_fraction: effective sample size of the sequence ratios pi / mu, over the batch size.
        log_ratio_p05: 5th percentile of log pi(y|x) - log mu(y|x), in nats per response.
        log_ratio_p50: median of the same log-ratio.
        log_ratio_p95: 95th percentile of the same log-ratio.
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
    """Return statistics of the ratio policy / sampler; TB itself needs no ratio.

    ess_fraction = (sum v)^2 / (n sum v^2), v = exp(log ratio), computed in log space. Sums run over
    the n drawn responses, each counted `weight` times.
    """
    log_ratio, weight = (policy_logprob - behavior_logprob).reshape(-1), weight.reshape(-1)
    log_ess = 2 * jax.nn.logsumexp(log_ratio, b=weight) - jax.nn.logsumexp(2 * log_ratio, b=weight)
    p05, p50, p95 = weighted_quantile(log_ratio, weight, jnp.array([0.05, 0.5, 0.95]))
    return OffPolicyStats(jnp.exp(log_ess) / jnp.sum(weight), p05, p50, p95)


# Smallest staleness of each stratum, in steps.
STRATA = (0, 1, 2, 4, 8, 16, 32)
# Key of the strata in the metrics of a step; every other metric is a scalar.
STRATA_KEY = "strata"
# Thresholds of the warning: smallest share of a batch and largest ESS fraction of a stratum.
MIN_WARNED_SHARE, LOW_ESS = 0.05, 0.1


class Measured(NamedTuple):
    """Measurements of every response of a batch, [p k] each; sums are over counted tokens.

    Attributes:
        policy, behavior, reference: log-probs.
        tokens: number of counted tokens.
        far_tokens: counted tokens whose ratio to the sampler is outside 0.8 to 1.2.
        residual: residual of Trajectory Balance minus the group's mean; nan at beta = 0.
        staleness: staleness in steps.
        weight: number of draws of the response.
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
    """Statistics of the responses of similar staleness; scalars, nan in an empty stratum.

    Attributes:
        share: share of the batch's responses.
        ess_fraction, log_ratio_p05, log_ratio_p50, log_ratio_p95: as in `OffPolicyStats`.
        residual_rms: root mean square of the centred residuals.
        kl_reference: mean of log pi - log pi_ref.
        kl_behavior: mean of log mu - log pi: an estimate of KL(mu || pi).
        clip_fraction: share of tokens whose ratio is outside 0.8 to 1.2.
        entropy: entropy of the sampler, in nats per token, estimated from its own samples.
        unique_share: number of distinct responses over number of draws.
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
    """Return the fields of `Stratum` (first axis) for each stratum of `STRATA` (second axis)."""
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
    """Return the statistics of non-empty strata, as "stale_STALENESS/NAME"."""
    return {
        f"stale_{low}/{name}": float(found[j, i])
        for i, low in enumerate(STRATA)
        for j, name in enumerate(Stratum._fields)
        if np.isfinite(found[j, i])
    }


def low_ess_warnings(strata: Mapping[str, float]) -> list[str]:
    """Return a warning for each stratum in which importance ratios have a low ESS.

    A falling effective sample size precedes the collapse of a policy gradient (arXiv:2602.17616).

    Args:
        strata: as `named_strata` returns them.
    """
    lines = []
    for low in STRATA:
        share = strata.get(f"stale_{low}/share", 0.0)
        ess = strata.get(f"stale_{low}/ess_fraction", 1.0)
        if share > MIN_WARNED_SHARE and ess < LOW_ESS:
            lines.append(
                f"responses that are at least {low} steps stale ({share:.0%} of a batch) have an "
                f"effective sample size of {ess:.1%}: objectives with importance ratios learn from "
                "few of them. Lower replay.max_staleness or the learning rate, or set "
                "--config.objective.name=tb"
            )
    return lines


def weighted_quantile(
    x: Float[Array, " n"], weight: Float[Array, " n"], q: Float[Array, " q"]
) -> Float[Array, " q"]:
    """Return `jnp.quantile` of x with each value repeated `weight` times.

    Weights may be fractions.
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
    """Return the largest |policy - behavior| per token over responses of the current version.

    nan if the batch has no such response. A value above rounding means that the searcher and the
    trainer compute different log-probs.
    """
    gap = jnp.max(jnp.where(is_current, jnp.abs(policy - behavior), -jnp.inf))
    return jnp.where(gap >= 0, gap, jnp.nan)


# Key of the log-probs of the first prompt's responses in the metrics of a step.
SHOWN_KEY = "shown"


def batch_metrics(
    batch: Batch | PackedBatch,
    rows: Rows,
    policy: Float[Array, "n *r t"],
    reference_logprob: Float[Array, "p k"],
) -> dict[str, Array]:
    """Return metrics of a batch under the policy's log-probs, independent of the objective.

    A response counts once per draw in every metric except the number of rows.
    """
    behavior, weight = rows.tokens.behavior, batch.weights
    drawn = jnp.sum(weight)

    def mean(x: Float[Array, "p k"]) -> Float[Array, ""]:
        return jnp.sum(x * weight) / drawn

    num_tokens = jnp.sum(batch.response_lengths * weight)
    # Divide by at least 1: a slot may be empty.
    of_group = jnp.maximum(jnp.sum(weight, 1), 1)
    group_mean = jnp.sum(batch.rewards * weight, 1) / of_group
    centred = batch.rewards - group_mean[:, None]
    group_variance = jnp.sum(jnp.square(centred) * weight, 1) / of_group
    off_policy = off_policy_stats(rows.sums(policy), rows.sums(behavior), weight)
    num_rows = jnp.sum(weight > 0).astype(jnp.float32)
    return {
        "reward_mean": mean(batch.rewards),
        "reward_std": jnp.sum(jnp.sqrt(group_variance)) / rows.totals().prompts,
        "kl_reference": mean(rows.sums(policy * rows.tokens.counted) - reference_logprob),
        "nll_per_token": -jnp.sum(rows.sums(policy) * weight) / num_tokens,
        "response_length_mean": num_tokens / drawn,
        "response_tokens": num_tokens,
        "rows": num_rows,
        "rows_share": num_rows / weight.size,
        **off_policy._asdict(),
        "sampler_gap": largest_gap(policy, behavior, rows.is_current),
    }


def measured(rows: Rows, policy: Float[Array, "n *r t"], beta: Float[Array, ""]) -> Measured:
    """Return the measurements of every response; the residuals use this beta."""
    tokens, responses = rows.tokens, rows.responses
    counted, weight = tokens.counted, responses.weight
    log_ratio = jnp.where(counted, policy - tokens.behavior, 0)
    is_far = (log_ratio < jnp.log(0.8)) | (log_ratio > jnp.log(1.2))
    of_policy = rows.sums(policy * counted)
    residual = of_policy - responses.reference_logprob - responses.reward / beta
    of_group = jnp.maximum(jnp.sum(weight, 1, keepdims=True), 1)
    mean = jnp.sum(residual * weight, 1, keepdims=True) / of_group
    return Measured(
        of_policy,
        rows.sums(tokens.behavior * counted),
        responses.reference_logprob,
        rows.sums(counted.astype(jnp.float32)),
        rows.sums(is_far.astype(jnp.float32)),
        residual - mean,
        responses.staleness,
        weight,
    )


def padding_share(batch: Batch | PackedBatch, cut: Cut) -> Float[Array, ""]:
    """Return the share of padding among the computed tokens."""
    worked = cut.used * (batch.tokens.size // cut.num) if cut.num > 1 else batch.tokens.size
    return 1 - num_valid_tokens(batch) / worked
