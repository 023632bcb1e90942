# SPDX-License-Identifier: Apache-2.0
"""Updates by the optimiser, and the train state after a step.

Invariant: a non-finite update changes nothing, and a step without a finite update changes only
counters.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from tba_jax.train.minibatches import Update
from tba_jax.train.objectives.base import Loss
from tba_jax.train.optimizers import reset_moments, with_schedule_count
from tba_jax.train.rounding import rounded_like, rounding_key, widened
from tba_jax.train.state import TrainState
from tba_jax.train.step_settings import StepSettings


class UpdateResult(NamedTuple):
    """Result of all updates of a step.

    Attributes:
        policy: log-prob of every token under the policy at the start of the step.
        loss: loss and its metrics.
        trained, opt_state: parameters and optimizer state after the updates.
        made: int32, number of finite updates.
        grad_norm: norm of the gradient; with several updates, the mean of the norms.
    """

    policy: Array
    loss: Loss
    trained: Any
    opt_state: Any
    made: Array
    grad_norm: Array

    def metrics(self, settings: StepSettings) -> dict[str, Array]:
        """Return the metrics of the updates."""
        own = {"loss": self.loss.loss, **self.loss.metrics, "grad_norm": self.grad_norm}
        return own if settings.num_updates == 1 else {**own, "updates": self.made}


def schedule_step(state: TrainState) -> Array:
    """Return the step of the learning-rate schedule, int32: number of steps with an update."""
    return state.step - state.skipped_steps


def update(
    trained: Any,
    opt_state: Any,
    loss: Loss,
    grads: Any,
    number: Array | int,
    *,
    state: TrainState,
    optimizer: optax.GradientTransformation,
    settings: StepSettings,
) -> Update:
    """Make optimiser update `number` of the step that starts from `state`."""
    grad_norm = optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), grads))
    is_finite = jnp.isfinite(loss.loss) & jnp.isfinite(grad_norm)
    stored = trained, opt_state
    seed = settings.rounding_seed
    old, old_opt_state, grads = (*stored, grads) if seed is None else widened((*stored, grads))
    updates: Any
    updates, opt_state = optimizer.update(grads, old_opt_state, old)
    if state.log_z_head is not None:
        # Updates are proportional to the learning rate here, so this scales the learning rate.
        updates = updates[0], jax.tree.map(lambda u: settings.log_z_rate * u, updates[1])
    trained = optax.apply_updates(old, updates)
    if seed is not None:
        key = rounding_key(seed, state.step * settings.num_updates + number)
        trained, opt_state = rounded_like((trained, opt_state), stored, key)
    # Select leaf by leaf: a branch would prevent in-place updates of the old state.
    trained, opt_state = jax.tree.map(
        lambda new, old: jnp.where(is_finite, new, old),
        (trained, opt_state),
        stored,
    )
    return Update(trained, opt_state, is_finite, grad_norm)


def next_state(
    state: TrainState,
    done: UpdateResult,
    optimizer: optax.GradientTransformation,
    settings: StepSettings,
) -> TrainState:
    """Return the state after a step; the step counts as skipped if it made no update."""
    trained, opt_state = done.trained, done.opt_state
    params, head = (trained, None) if state.log_z_head is None else trained
    step = state.step + 1
    if settings.optimizer_reset_period:
        begins = step % settings.optimizer_reset_period == 0
        opt_state = reset_moments(opt_state, optimizer.init(trained), begins)
    reference = next_reference(state.reference_params, params, step, settings)
    skipped = (done.made == 0).astype(jnp.int32)
    new_state = TrainState(
        step,
        params,
        opt_state,
        reference,
        state.skipped_steps + skipped,
        (state.skipped_in_a_row + 1) * skipped,
        head,
    )
    if settings.num_updates == 1:
        return new_state
    # The optimiser counts finite updates only. Without this correction, one non-finite update among
    # several would shift the learning rate of every later step.
    count = schedule_step(new_state) * settings.num_updates
    return new_state._replace(opt_state=with_schedule_count(opt_state, count))


def next_reference(reference: Any, params: Any, step: Array, settings: StepSettings) -> Any:
    """Return the reference after a step that produced `params`."""
    if reference is None:
        return None
    if settings.reference_ema_decay:
        return optax.incremental_update(params, reference, 1 - settings.reference_ema_decay)
    if settings.reference_reset_period:
        reset = step % settings.reference_reset_period == 0
        return jax.tree.map(lambda r, p: jnp.where(reset, p, r), reference, params)
    return reference
