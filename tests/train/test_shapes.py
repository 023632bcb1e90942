# SPDX-License-Identifier: Apache-2.0
"""Tests check annotations with beartype: a wrong shape names the function and the argument."""

import sys

import jax.numpy as jnp
import pytest
from conftest import CHECKED
from jaxtyping import TypeCheckError

from tba_jax.flow import layout
from tba_jax.train import groups, losses, optimizers, ppo, rounding, vineppo

MODULES = losses, groups, ppo, vineppo, optimizers, rounding, layout
GROUPS = groups.of_sums(jnp.zeros((2, 3)), jnp.zeros((2, 3)), jnp.ones((2, 3)))

WRONG = {
    "losses.group_mean": lambda: losses.group_mean(jnp.zeros((2, 3, 1))),
    "losses.summed": lambda: losses.summed(GROUPS, jnp.zeros((2, 3))),
    "losses.clipped": lambda: losses.clipped(jnp.zeros((2, 3)), jnp.zeros((4, 3)), 0.2, 0.2),
    "losses.tb": lambda: losses.tb(GROUPS, jnp.ones(2)),
    "groups.of_sums": lambda: groups.of_sums(
        jnp.zeros((2, 3)), jnp.zeros((2, 2)), jnp.ones((2, 3))
    ),
    "ppo.ppo": lambda: ppo.ppo(GROUPS._replace(values=GROUPS.logp), jnp.ones(2)),
    "vineppo.vineppo": lambda: vineppo.vineppo(GROUPS._replace(advantages=GROUPS.logp), "0"),
    "rounding.rounding_key": lambda: rounding.rounding_key(0, 1.5),
    "layout.rows_at_once": lambda: layout.rows_at_once(2.5, 1, 1),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_shape_or_type_is_refused_in_tests(name):
    with pytest.raises(TypeCheckError, match=name.rpartition(".")[2]):
        WRONG[name]()


def test_the_checked_modules_are_those_of_the_hook():
    assert {module.__name__ for module in MODULES} == set(CHECKED)
    assert all(
        type(sys.modules[name].__loader__).__name__ == "_JaxtypingLoader" for name in CHECKED
    )
