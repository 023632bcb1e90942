# SPDX-License-Identifier: Apache-2.0
"""Values of schedules, and optimisers composed of parts of optax.

Invariant: for every optimiser, `learning_rate` is the root mean square of an update after the first
steps, and `weight_decay` times the learning rate is the decay, on matrices only.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from tba_jax.settings import Schedule
from tba_jax.train.config import OptimizerSettings

# Adafactor factors two axes of at least this size. The default of optax, 128, would not factor
# query matrices [d, heads, 64], because heads are a separate axis.
_SMALLEST_FACTORED = 32


def value_at(schedule: Schedule, step: ArrayLike) -> Float[Array, ""]:
    """Return the schedule's value at an optimiser step, float32.

    If the schedule is longer than the run, the value does not reach FINAL, as in the paper's run of
    Figure 1.

    Args:
        schedule: schedule with STEPS filled in (`Schedule.over`).
        step: step, counted from 0.

    References:
        TBA, arXiv:2503.18929, appendix B.1 and B.2.
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


def make_optimizer(settings: OptimizerSettings) -> optax.GradientTransformation:
    """Return the optimiser of these settings, whose updates are in units of the learning rate.

    The step multiplies the updates by minus the learning rate. Gradients are clipped by their
    global norm if `clip_norm` > 0. adamw has two moments per parameter, in the dtype of the
    parameters. adafactor has row and column means of the squared gradient instead, and no momentum;
    it ignores `b1`, `b2` and `eps`. Its updates are not scaled by the parameters' norm, so a
    learning rate for AdamW also suits Adafactor.

    References:
        AdamW, arXiv:1711.05101; Adafactor, arXiv:1804.04235.
    """
    s = settings
    clip = [optax.clip_by_global_norm(s.clip_norm)] if s.clip_norm else []
    if s.name == "adamw":
        scale = [optax.scale_by_adam(b2=s.b2)]
    else:
        scale = [
            optax.scale_by_factored_rms(min_dim_size_to_factor=_SMALLEST_FACTORED),
            optax.clip_by_block_rms(1.0),
        ]
    return optax.chain(*clip, *scale, optax.add_decayed_weights(s.weight_decay, mask=is_matrix))


def is_matrix(params: Any) -> Any:
    """Return a tree with True for matrices, which decay, and False for norms and biases."""

    # Stacked layers add a leading axis, so norm scales and biases also have two axes: only their
    # names distinguish them from matrices.
    def decide(path: Any, x: Array) -> bool:
        name = jax.tree_util.keystr(path)
        return x.ndim >= 2 and not any(word in name for word in ("norm", "bias"))

    return jax.tree_util.tree_map_with_path(decide, params)
