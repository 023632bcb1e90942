# SPDX-License-Identifier: Apache-2.0
"""Compiler options of the train step."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from tba_jax.devices import xla
from tba_jax.train.state import StepShardings
from tba_jax.train.step import _jitted


def test_products_of_wide_models_on_cpu_are_those_of_eigen():
    x = jnp.ones((64, 64))

    def compiled(hidden_size):
        given = xla.step_options(jax.devices()[0], hidden_size)
        return jax.jit(jnp.matmul, compiler_options=given).lower(x, x).compile().as_text()

    assert "ynn" in compiled(511) and "ynn" not in compiled(512)


def test_the_train_step_is_compiled_with_them():
    where: Any = SingleDeviceSharding(jax.devices()[0])
    given = {"xla_no_such_thing": "1"}
    shardings = StepShardings(where, where, where, where, where, compiler_options=given)
    step: Any = _jitted(lambda state, batch: (state, batch), shardings)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_thing"):
        step.lower(jnp.ones(2), jnp.ones(2)).compile()
