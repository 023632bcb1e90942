# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules and the optimisers that follow them, out of parts of optax.

The invariant it owns: `learning_rate` and `weight_decay` mean the same for every optimiser (the
root mean square of a settled update; decay times learning rate, on matrices only).
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from tba_jax.train.config import OptimizerSettings

# Two axes of at least this size are kept as means over each other. The default of optax, 128, would
# leave query matrices [d, heads, 64] whole, as heads have an axis of their own here.
_SMALLEST_FACTORED = 32


def learning_rate_schedule(settings: OptimizerSettings, num_steps: int) -> optax.Schedule:
    """Learning rate as a function of the step.

    constant; linear and cosine: to 0; wsd: stable, then, cosine decay to 0 over `decay_steps`
    (a horizon beyond the last step leaves the rate above 0, as in the paper's Figure 1 run).

    References:
        TBA, arXiv:2503.18929, appendix B.1.
    """

    learning_rate, warmup_steps = settings.learning_rate, settings.warmup_steps
    decay_steps = settings.decay_steps

    def warmup(step: Any) -> Any:
        # From one part in warmup_steps, not from 0, which would waste the first batch.
        return learning_rate * (step + 1) / max(1, warmup_steps)

    left = max(1, num_steps - warmup_steps)
    if settings.schedule == "constant":
        after: optax.Schedule = optax.constant_schedule(learning_rate)
    elif settings.schedule == "linear":
        after = optax.linear_schedule(learning_rate, 0.0, decay_steps or left)
    elif settings.schedule == "cosine":
        after = optax.cosine_decay_schedule(learning_rate, decay_steps or left)
    else:
        after = optax.join_schedules(
            [
                optax.constant_schedule(learning_rate),
                optax.cosine_decay_schedule(learning_rate, decay_steps),
            ],
            [settings.stable_steps],
        )
    return optax.join_schedules([warmup, after], [warmup_steps]) if warmup_steps else after


def make_optimizer(
    settings: OptimizerSettings, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """The optimiser of these settings, after clipping by global norm where `clip_norm` > 0.

    adamw: two moments per parameter, in the dtype of the parameters.
    adafactor: row and column means of the squared gradient in place of two moments, and no
        momentum: `b1`, `b2` and `eps` have no meaning for it. Its steps are not scaled by the size
        of the parameters, so that a learning rate found for AdamW is a sensible one here.

    References:
        AdamW, arXiv:1711.05101; Adafactor, arXiv:1804.04235.
    """
    s, weight_decay = settings, settings.weight_decay
    if s.name == "adamw":
        steps = [
            optax.adamw(
                schedule, b1=s.b1, b2=s.b2, eps=s.eps, weight_decay=weight_decay, mask=is_matrix
            )
        ]
    else:
        # `optax.adafactor` would leave the learning rate out of the weight decay.
        steps = [
            optax.scale_by_factored_rms(min_dim_size_to_factor=_SMALLEST_FACTORED),
            optax.clip_by_block_rms(1.0),
            optax.add_decayed_weights(weight_decay, mask=is_matrix),
            optax.scale_by_learning_rate(schedule),
        ]
    clip = [optax.clip_by_global_norm(s.clip_norm)] if s.clip_norm else []
    return optax.chain(*clip, *steps) if clip or len(steps) > 1 else steps[0]


def with_schedule_count(opt_state: Any, count: Array) -> Any:
    """An optimiser state whose learning-rate schedule reads `count` at the next update.

    Args:
        opt_state: state of an optimiser with a schedule, or of one without.
        count: int32 scalar, updates.
    """

    def choose(x: Any) -> Any:
        return x._replace(count=count) if _is_schedule(x) else x

    return jax.tree.map(choose, opt_state, is_leaf=_is_schedule)


def _is_schedule(x: Any) -> bool:
    return isinstance(x, optax.ScaleByScheduleState)


def begun_anew(opt_state: Any, first: Any, begins: Array) -> Any:
    """Moments, and the count that corrects their bias, as at first; where a schedule is, it stays.

    Args:
        opt_state: of `make_optimizer`.
        first: what its `init` returns.
        begins: bool, whether it does.
    """

    def choose(now: Any, new: Any) -> Any:
        return now if _is_schedule(now) else jnp.where(begins, new, now)

    return jax.tree.map(choose, opt_state, first, is_leaf=_is_schedule)


def is_matrix(params: Any) -> Any:
    """The tree with True at matrices, which decay, and False at norms and biases."""

    # Stacked layers add a leading axis, so norm scales and biases have two axes and their names
    # tell them apart.
    def decide(path: Any, x: Array) -> bool:
        name = jax.tree_util.keystr(path)
        return x.ndim >= 2 and not any(word in name for word in ("norm", "bias"))

    return jax.tree_util.tree_map_with_path(decide, params)
