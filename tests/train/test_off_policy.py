# SPDX-License-Identifier: Apache-2.0
"""Off-policy diagnostics against numpy."""

import jax.numpy as jnp
import numpy as np

from tba_jax.train.off_policy import off_policy_stats


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
