# SPDX-License-Identifier: Apache-2.0
"""Schedules against the papers' lines."""

import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.train.schedules import Schedule


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("constant", {0: 1.0, 5: 1.0, 50: 1.0}),
        ("linear", {0: 1.0, 5: 0.75, 10: 0.5, 50: 0.5}),
        ("linear_then_jump", {0: 1.0, 2: 0.9, 3: 0.5, 50: 0.5}),
    ],
)
def test_a_schedule_of_each_shape(shape, expected):
    schedule = Schedule(1.0, 0.5, 10, shape, jump_step=3)
    for step, value in expected.items():
        np.testing.assert_allclose(schedule.at(step), value, rtol=1e-6)
        assert schedule.at(jnp.int32(step)).dtype == jnp.float32


def test_gsm8k_beta_is_the_papers_line():
    # paper: beta_f (t - 1) / 500 + beta_0 (1 - (t - 1) / 500), t counted from 1
    schedule = Schedule(0.014, 0.004, 500, "linear")
    for t in (1, 2, 250, 501, 700):
        share = min(1.0, (t - 1) / 500)
        np.testing.assert_allclose(
            schedule.at(t - 1), 0.004 * share + 0.014 * (1 - share), rtol=1e-5
        )


def test_a_schedule_that_never_leaves_a_value_says_so():
    assert Schedule(1.0).is_always(1.0) and Schedule(1.0, 1.0, 7, "linear").is_always(1.0)
    assert Schedule(1.0, final=9.0).is_always(1.0)  # constant: the final value is not reached
    assert not Schedule(1.0, 2.0, 7, "linear").is_always(1.0)
    assert not Schedule(2.0).is_always(1.0)
