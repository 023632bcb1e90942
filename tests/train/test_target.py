# SPDX-License-Identifier: Apache-2.0
"""Tempered targets against the paper's."""

import jax.numpy as jnp
import numpy as np

from tba_jax.train.objectives.base import tb_residual
from tba_jax.train.step_settings import tempered_target


def test_tempered_target_is_the_papers_log_reward():
    reference, reward = jnp.array([[-3.0, -5.0]]), jnp.array([[-0.2, -1.0]])
    scaled = tempered_target(reference, reward, reference_temperature=1.5, reward_temperature=2.0)
    residual = tb_residual(jnp.zeros((1, 2)), *scaled, beta=0.05)
    # log R = (log p_ref / gamma + log R_tox / beta) / T_r; the residual is -log R for log pi = 0
    expected = -(np.array([[-3.0, -5.0]]) / 1.5 + np.array([[-0.2, -1.0]]) / 0.05) / 2.0
    np.testing.assert_allclose(residual, expected, rtol=1e-6)
