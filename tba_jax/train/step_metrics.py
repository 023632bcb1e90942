# SPDX-License-Identifier: Apache-2.0
"""Metrics of a batch that do not depend on the objective.

Invariant: a response counts as often as it was drawn, except in the number of rows.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from tba_jax.flow.batch import Batch, PackedBatch
from tba_jax.train.micro_batches import Cut
from tba_jax.train.off_policy import Measured, largest_gap, off_policy_stats
from tba_jax.train.rows import Rows, num_valid_tokens

# Of the log-probs of the first prompt's responses among the metrics of a step.
SHOWN_KEY = "shown"


def batch_metrics(
    batch: Batch | PackedBatch,
    rows: Rows,
    policy: Float[Array, "n *r t"],
    reference_logprob: Float[Array, "p k"],
) -> dict[str, Array]:
    """Return metrics of a batch under the policy's log-probs, independent of the objective.

    A response counts as often as it was drawn, except in the number of rows.
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
    """Return the measurements of every response, for the target that the objective receives."""
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
