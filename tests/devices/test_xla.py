# SPDX-License-Identifier: Apache-2.0
"""Compiler options of the train step."""

import jax
import jax.numpy as jnp

from tba_jax.devices import xla


def test_products_of_wide_models_on_cpu_are_those_of_eigen():
    x = jnp.ones((64, 64))

    def compiled(hidden_size):
        given = xla.step_options(jax.devices()[0], hidden_size)
        return jax.jit(jnp.matmul, compiler_options=given).lower(x, x).compile().as_text()

    assert "ynn" in compiled(511) and "ynn" not in compiled(512)
