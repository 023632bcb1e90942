# SPDX-License-Identifier: Apache-2.0
"""Values of schedules at a step, on the device."""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from tba_jax.settings import Schedule


def value_at(schedule: Schedule, step: ArrayLike) -> Float[Array, ""]:
    """Return the schedule's value at an optimiser step, float32.

    Args:
        schedule: schedule with STEPS filled in (`Schedule.over`).
        step: step, counted from 0.

    References:
        Linear and step schedules of beta: TBA, arXiv:2503.18929, appendix B.1 and B.2.
    """
    start, final, steps = schedule.start, schedule.final, schedule.steps
    if schedule.shape == "constant":
        value = jnp.float32(start)
    else:
        assert steps is not None, "Schedule.over fills in STEPS"
        share = jnp.asarray(step, jnp.float32) - schedule.begin
        share = jnp.clip(share / steps, 0.0, 1.0)
        if schedule.shape == "cosine":
            share = (1 - jnp.cos(jnp.pi * share)) / 2
        value = start + (final - start) * share
    if schedule.warmup:
        # The first step uses START / warmup, because a rate of 0 would waste the first batch.
        rising = start * (jnp.asarray(step, jnp.float32) + 1) / schedule.warmup
        value = jnp.where(jnp.asarray(step) < schedule.warmup, rising, value)
    if schedule.jump is not None:
        value = jnp.where(jnp.asarray(step) >= schedule.jump, final, value)
    return value.astype(jnp.float32)
