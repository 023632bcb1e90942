# SPDX-License-Identifier: Apache-2.0
"""Schedules against the papers' lines, and the text that describes them."""

import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.settings import ConfigError, Schedule, parse_schedule
from tba_jax.train.optimizers import value_at


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", {0: 1.0, 5: 1.0, 50: 1.0}),
        ("linear(1, 0.5, 10)", {0: 1.0, 5: 0.75, 10: 0.5, 50: 0.5}),
        ("linear(1, 0.5, 10, jump=3)", {0: 1.0, 2: 0.9, 3: 0.5, 50: 0.5}),
        ("cosine(1, 0.5, 10)", {0: 1.0, 5: 0.75, 10: 0.5, 50: 0.5}),
    ],
)
def test_a_schedule_of_each_shape(text, expected):
    schedule = parse_schedule("objective.beta", text)
    for step, value in expected.items():
        np.testing.assert_allclose(value_at(schedule, step), value, rtol=1e-6)
        assert value_at(schedule, jnp.int32(step)).dtype == jnp.float32


def test_a_schedule_that_never_leaves_a_value_says_so():
    assert Schedule(1.0).is_always(1.0) and Schedule(1.0, 1.0, 7, "linear").is_always(1.0)
    assert Schedule(1.0, final=9.0).is_always(1.0)  # constant: the final value is not reached
    assert not Schedule(1.0, 2.0, 7, "linear").is_always(1.0)
    assert not Schedule(2.0).is_always(1.0) and not Schedule(1.0, warmup=3).is_always(1.0)


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
        ("linaer(1, 2)", "'linaer' must be one of constant, linear, cosine"),
        ("linear(1)", "linear takes START, FINAL, STEPS, and 1 numbers are given"),
        ("constant(1, hold=2)", "'hold' must be one of warmup"),
        ("linear(1, 2, 0)", "STEPS = 0 must be a whole number, at least 1"),
        ("linear(1, 2, warmup=-1)", "warmup = -1 must be a whole number, at least 0"),
        ("linear(1, 'a')", "FINAL = 'a' must be a number"),
        (True, "must be a number or a schedule"),
    ],
)
def test_a_schedule_that_cannot_be_read_is_refused_in_three_parts(value, rule):
    with pytest.raises(ConfigError) as caught:
        parse_schedule("objective.beta", value)
    start, end = f"config.objective.beta = {value!r}: ", 'linear(0.01, 0.001, 500)".'
    assert str(caught.value).startswith(start + rule) and str(caught.value).endswith(end)
