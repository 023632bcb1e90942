# SPDX-License-Identifier: Apache-2.0
"""Schedules, their text and the papers' lines; weight decay, clipping, and what optimisers keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_models import random_params, tiny_config

from tba_jax.settings import ConfigError, parse_schedule
from tba_jax.train.config import OptimizerSettings
from tba_jax.train.optimizers import make_optimizer, value_at


@pytest.mark.parametrize(
    "text", ["0.05", "1e-5", "linear(1, 0.05, 128, jump=31)", "cosine(1e-5, 0, warmup=50, hold=9)"]
)
def test_a_schedule_is_printed_as_it_is_written(text):
    schedule = parse_schedule("objective.beta", text)
    assert str(schedule) == text
    assert parse_schedule("objective.beta", schedule.plain) == schedule
    assert isinstance(schedule.plain, str) == ("(" in text)


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("fast", "is neither a number nor KIND"),
        ("linear(1, 2", "cannot be read as KIND"),
        ("linaer(1, 2)", "'linaer' must be one of linear, cosine"),
        ("linear(1)", "linear takes START, FINAL, STEPS, and 1 numbers are given"),
        ("linear(1, 2, 0)", "STEPS = 0 must be a whole number, at least 1"),
        ("linear(1, 'a')", "FINAL = 'a' must be a number"),
    ],
)
def test_a_schedule_that_cannot_be_read_is_refused_in_three_parts(value, rule):
    with pytest.raises(ConfigError) as caught:
        parse_schedule("objective.beta", value)
    start, end = f"config.objective.beta = {value!r}: ", 'linear(0.01, 0.001, 500)".'
    assert str(caught.value).startswith(start + rule) and str(caught.value).endswith(end)


CONFIG = tiny_config()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", {0: 1, 5: 1, 50: 1}),
        ("linear(1, 0.5, 10)", {0: 1, 5: 0.75, 10: 0.5, 50: 0.5}),
        ("linear(1, 0)", {0: 1, 50: 0.5, 100: 0}),
        ("cosine(1, 0.2)", {50: 0.6, 100: 0.2}),
        ("linear(1, 0, warmup=4)", {0: 0.25, 3: 1, 4: 1, 52: 0.5}),
        ("linear(1, 0.5, 10, warmup=4, hold=6, jump=12)", {9: 1, 11: 0.95, 12: 0.5, 99: 0.5}),
        # paper.md 3.1, Figure 1: 50 warm-up, 350 stable, cosine over 600, stopped at 700
        ("cosine(1e-5, 0, 600, warmup=50, hold=350)", {49: 1e-5, 399: 1e-5, 700: 5e-6}),
    ],
)
def test_a_schedule_of_each_shape_in_a_run_of_100_steps(text, expected):
    rate = parse_schedule("optimizer.learning_rate", text).over(100)
    for step, value in expected.items():
        np.testing.assert_allclose(value_at(rate, step), value, rtol=1e-6, atol=1e-7)
        assert value_at(rate, jnp.int32(step)).dtype == jnp.float32


def test_clipping_makes_large_gradients_equal_and_leaves_small_ones():
    # Adam forgets a gradient's scale within a step, so compare second steps: the first moment
    # mixes both, and unclipped it would be dominated by the larger gradient.
    params = {"w": jnp.ones((2, 2))}

    def second_update(first, second, clip_norm):
        optimizer = make_optimizer(OptimizerSettings(weight_decay=0.0, clip_norm=clip_norm))
        state = optimizer.init(params)
        for gradient in (first, second):
            updates, state = jax.jit(optimizer.update)({"w": gradient}, state, params)
        return updates["w"]

    one = jnp.ones((2, 2))  # norm 2
    np.testing.assert_allclose(
        second_update(one, -1000 * one, 0.5), second_update(one, -one, 0.5), rtol=1e-5
    )
    assert not np.allclose(second_update(one, -1000 * one, 0.0), second_update(one, -one, 0.0))
    np.testing.assert_allclose(
        second_update(0.1 * one, -0.2 * one, 0.5), second_update(0.1 * one, -0.2 * one, 0.0)
    )


def numbers(name, **changes):
    return make_optimizer(OptimizerSettings(name, **{"clip_norm": 0.0, **changes}))


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_every_optimizer_decays_matrices_and_nothing_else(name):
    params = random_params(CONFIG)
    zero = jax.tree.map(jnp.zeros_like, params)
    optimizer = numbers(name, weight_decay=0.1)
    updates, _ = jax.jit(optimizer.update)(zero, jax.jit(optimizer.init)(params), params)
    assert float(jnp.abs(updates["layers"]["attn_norm"]).max()) == 0.0
    assert float(jnp.abs(updates["final_norm"]).max()) == 0.0
    for matrix in ("q", "down"):
        expected = 0.1 * params["layers"][matrix]
        np.testing.assert_allclose(updates["layers"][matrix], expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_updates_are_in_units_of_the_learning_rate(name):
    params = {"w": jnp.ones((64, 64))}
    gradient = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), jnp.float32)}
    optimizer = numbers(name)
    state = optimizer.init(params)
    for _ in range(3):
        updates, state = jax.jit(optimizer.update)(gradient, state, params)
        # Adafactor's rows and columns know a matrix of noise less well than its entries.
        assert 0.9 < float(jnp.sqrt(jnp.mean(updates["w"] ** 2))) < 1.3
