# SPDX-License-Identifier: Apache-2.0
"""Off-policy diagnostics against numpy."""

import jax.numpy as jnp
import numpy as np

from tba_jax.train.step_metrics import (
    Measured,
    low_ess_warnings,
    named_strata,
    off_policy_stats,
    stratified,
)


def test_off_policy_stats():
    policy = jnp.log(jnp.array([[0.5, 0.25], [0.125, 0.125]]))
    same = off_policy_stats(policy, policy, jnp.ones((2, 2)))
    np.testing.assert_allclose(same.ess_fraction, 1.0, rtol=1e-6)
    np.testing.assert_allclose(same.log_ratio_p50, 0.0, atol=1e-7)
    weights = np.array([4.0, 1.0, 1.0, 1.0])
    behavior = policy - jnp.log(jnp.asarray(weights.reshape(2, 2), jnp.float32))
    stats = off_policy_stats(policy, behavior, jnp.ones((2, 2)))
    np.testing.assert_allclose(
        stats.ess_fraction, weights.sum() ** 2 / (4 * (weights**2).sum()), rtol=1e-5
    )
    np.testing.assert_allclose(stats.log_ratio_p95, np.quantile(np.log(weights), 0.95), rtol=1e-5)


def test_strata_are_the_statistics_of_the_repeated_rows_of_each_age():
    rng = np.random.default_rng(0)
    shape = (3, 4)
    staleness = np.array([[0, 0, 3, 9], [3, 2, 40, 0], [0, 3, 3, 0]])
    weight = np.array([[2, 1, 1, 2], [3, 1, 1, 1], [1, 1, 4, 0]])
    tokens = rng.integers(1, 6, shape).astype(float)
    policy, behavior, reference, residual = rng.normal(-2, 1, (4, *shape))
    far = np.minimum(tokens, rng.integers(0, 3, shape))
    arrays = (policy, behavior, reference, tokens, far, residual)
    made = Measured(
        *(jnp.asarray(x, jnp.float32) for x in arrays),
        jnp.asarray(staleness),
        jnp.asarray(weight, jnp.float32),
    )
    found = named_strata(np.asarray(stratified(made)))
    ages = {key.split("/")[0] for key in found}
    assert ages == {"stale_0", "stale_2", "stale_8", "stale_32"}  # none is 1, 4 to 7 or 16 to 31

    at = (staleness == 2) | (staleness == 3)
    rows = [np.repeat(x[at], weight[at]) for x in arrays]
    policy, behavior, reference, tokens, far, residual = rows
    ratio = np.exp(policy - behavior)
    expected = {
        "share": len(policy) / weight.sum(),
        "ess_fraction": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
        "log_ratio_p05": np.quantile(np.log(ratio), 0.05),
        "log_ratio_p50": np.quantile(np.log(ratio), 0.5),
        "log_ratio_p95": np.quantile(np.log(ratio), 0.95),
        "residual_rms": np.sqrt(np.mean(residual**2)),
        "kl_reference": np.mean(policy - reference),
        "kl_behavior": np.mean(behavior - policy),
        "clip_fraction": far.sum() / tokens.sum(),
        "entropy": -behavior.sum() / tokens.sum(),
        "unique_share": (weight[at] > 0).sum() / len(policy),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(found[f"stale_2/{name}"], value, rtol=1e-5, err_msg=name)
    assert len(found) == 4 * len(expected)


def test_a_low_effective_sample_size_is_reported_once_in_the_batch():
    strata = {"stale_0/share": 0.6, "stale_0/ess_fraction": 0.9, "stale_8/share": 0.4}
    assert low_ess_warnings({**strata, "stale_8/ess_fraction": 0.11}) == []
    (line,) = low_ess_warnings({**strata, "stale_8/ess_fraction": 0.02})
    assert line.startswith(
        "responses that are at least 8 steps stale (40% of a batch) have an effec"
    )
    assert low_ess_warnings({**strata, "stale_8/share": 0.01, "stale_8/ess_fraction": 0.02}) == []
