# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding: by itself, and as what moves parameters that are stored in bfloat16."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fake_batches import CONFIG, SETTINGS, make_batch, make_mesh
from fake_models import random_params
from jax.sharding import NamedSharding, PartitionSpec

from tba_jax.settings import Schedule
from tba_jax.train.config import OptimizerSettings
from tba_jax.train.optimizers import make_optimizer
from tba_jax.train.rounding import rounded_like, rounding_key, stochastically_rounded
from tba_jax.train.state import init_state
from tba_jax.train.step import make_train_step

KEY = rounding_key(0, jnp.int32(0))
STOCHASTIC = replace(SETTINGS, rounding_seed=3)
RATE = 1e-5


def rounded(x, n):
    """float64 [n ...]: n stochastic roundings of float32 x."""
    bits = jax.random.bits(KEY, (n, *x.shape), jnp.uint16)
    return np.asarray(stochastically_rounded(jnp.broadcast_to(x, bits.shape), bits), np.float64)


def test_a_number_becomes_one_of_its_neighbours_and_itself_on_the_mean():
    """Each mean is of 4,000 draws, within five standard errors: 12 cases, false alarm 1e-5."""
    x = np.array([0.02, -0.02, 1.001, -3.999, 1e-30, 0.0078, 3e-38, 1e30, 0.3, -0.7, 65000.1, 7])
    x = jnp.asarray(x, jnp.float32)
    draws = rounded(x, 4000)
    for i, number in enumerate(np.asarray(x, np.float64)):
        found = np.unique(draws[:, i])
        assert len(found) <= 2 and found[0] <= number <= found[-1]
        gap = found[-1] - found[0]
        assert gap <= 2**-7 * abs(number) or abs(number) < 1e-37
        assert abs(draws[:, i].mean() - number) <= 5 * gap / 2 / np.sqrt(4000)


def test_what_bfloat16_holds_stays_and_what_is_not_finite_too():
    exact = jnp.asarray([0.0, -0.0, 1.0, -1.5, 2.0**-130, 3.0e38], jnp.bfloat16)
    draws = rounded(exact.astype(jnp.float32), 50)
    np.testing.assert_array_equal(draws, np.broadcast_to(np.asarray(exact, np.float64), (50, 6)))
    assert np.signbit(draws[:, 1]).all()
    wild = jnp.asarray(np.array([np.inf, -np.inf, np.nan], np.float32))
    draws = rounded(wild, 50)
    assert (draws[:, 0] == np.inf).all() and (draws[:, 1] == -np.inf).all()
    assert np.isnan(draws[:, 2]).all()


def test_draws_follow_seed_step_and_place_and_not_the_devices():
    tree = {"a": jnp.full((64, 64), 0.3), "b": jnp.full((64, 64), 0.3), "c": jnp.full(8, 0.3)}
    stored = {name: x.astype(jnp.bfloat16) for name, x in tree.items()} | {"c": tree["c"]}
    program = jax.jit(lambda tree, key: rounded_like(tree, stored, key))
    one = program(tree, KEY)
    assert one["c"].dtype == jnp.float32 and one["a"].dtype == jnp.bfloat16
    assert not np.array_equal(one["a"], one["b"])
    for other in (rounding_key(1, jnp.int32(0)), rounding_key(0, jnp.int32(1))):
        assert not np.array_equal(program(tree, other)["a"], one["a"])
    mesh = make_mesh((1, 2, 4))
    divided, whole = (NamedSharding(mesh, PartitionSpec(*x)) for x in (("fsdp", "model"), ()))
    tree = jax.device_put(tree, {"a": divided, "b": divided, "c": whole})
    again = program(tree, jax.device_put(KEY, whole))
    assert again["a"].sharding.num_devices == 8
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(again), jax.device_get(one))


def direction(params):
    """A number for each weight."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(5), len(leaves))
    drawn = [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, drawn)


def vector_of(tree):
    """All entries, float64."""
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


@pytest.mark.slow
def test_fifty_consistent_steps_move_weights_as_far_as_in_float32():
    """AdamW with one gradient for all steps: exact numbers move by the rate, along its sign."""

    def fixed(updates, params):
        return jax.tree.map(lambda u, d: d.astype(u.dtype), updates, direction(params))

    settings = OptimizerSettings(learning_rate=RATE, clip_norm=0.0, weight_decay=0.0)
    optimizer = optax.chain(optax.stateless(fixed), make_optimizer(settings))
    # Matrices of the size of a real model's.
    params = jax.tree.map(lambda x: (x / 15).astype(jnp.bfloat16), random_params(CONFIG))
    start, wanted = vector_of(params), -50 * RATE * np.sign(vector_of(direction(params)))
    step = make_train_step(CONFIG, optimizer, Schedule(RATE), STOCHASTIC)
    state = init_state(params, optimizer, keep_reference=False)
    for _ in range(50):
        state, _ = step(state, make_batch())
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.bfloat16)}
    moved = vector_of(jax.device_get(state.params)) - start
    assert len(start) > 3000 and (moved != 0).mean() > 0.7
    # Along the direction that all were asked to go. A step's rounding has a variance of at most a
    # quarter of the gap between neighbours, squared: 1/128 of a weight.
    progress = (moved @ wanted) / (wanted @ wanted)
    largest = 50 * ((start / 128) ** 2 / 4) @ wanted**2
    error = np.sqrt(largest) / (wanted @ wanted)
    assert abs(progress - 1) < 4 * error < 0.2
