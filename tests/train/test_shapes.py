# SPDX-License-Identifier: Apache-2.0
"""Tests check annotations with beartype: a wrong shape names the function and the argument."""

import sys

import jax.numpy as jnp
import pytest
from conftest import CHECKED
from jaxtyping import TypeCheckError

from tba_jax.flow import layout
from tba_jax.train import groups, losses, ppo


def test_a_wrong_shape_or_type_is_refused_in_tests():
    made = groups.of_sums(jnp.zeros((2, 3)), jnp.zeros((2, 3)), jnp.ones((2, 3)))
    for name, call in {
        "clipped": lambda: losses.clipped(jnp.zeros((2, 3)), jnp.zeros((4, 3)), 0.2, 0.2),
        "tb": lambda: losses.tb(made, jnp.ones(2)),
        "of_sums": lambda: groups.of_sums(*(jnp.zeros((2, n)) for n in (3, 2, 3))),
        "ppo": lambda: ppo.ppo(made._replace(values=made.logp), jnp.ones(2)),
        "rows_at_once": lambda: layout.rows_at_once(2.5, 1, 1),
    }.items():
        with pytest.raises(TypeCheckError, match=name):
            call()
    loaders = {
        type(sys.modules[name].__loader__).__name__ for name in CHECKED if name in sys.modules
    }
    assert loaders == {"_JaxtypingLoader"}
