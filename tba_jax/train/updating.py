# SPDX-License-Identifier: Apache-2.0
"""What gradients do: updates of the optimiser, and the state after the step that made them.

It knows the train state and the optimiser, not where a gradient comes from. Invariant: an update
that is not finite changes nothing, and a step without a finite one nothing but counters.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from tba_jax.train.minibatches import Update
from tba_jax.train.objectives.base import Loss
from tba_jax.train.optimizers import begun_anew, with_schedule_count
from tba_jax.train.rounding import rounded_like, rounding_key, widened
from tba_jax.train.state import TrainState
from tba_jax.train.step_settings import StepSettings


class Done(NamedTuple):
    """What a step has computed and made.

    Attributes:
        policy: log-prob of every token, of the policy that the step began with.
        loss: and its metrics.
        trained, opt_state: now.
        made: int32, updates that were finite.
        grad_norm: of the gradient, or the mean over several.
    """

    policy: Array
    loss: Loss
    trained: Any
    opt_state: Any
    made: Array
    grad_norm: Array

    def metrics(self, settings: StepSettings) -> dict[str, Array]:
        """What updates say of themselves."""
        own = {"loss": self.loss.loss, **self.loss.metrics, "grad_norm": self.grad_norm}
        return own if settings.num_updates == 1 else {**own, "updates": self.made}


def schedule_step(state: TrainState) -> Array:
    """Step of the learning-rate schedule, int32: steps so far that made an update."""
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
    """One update of the optimiser, the number-th of the step that `state` begins."""
    grad_norm = optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), grads))
    is_finite = jnp.isfinite(loss.loss) & jnp.isfinite(grad_norm)
    stored = trained, opt_state
    seed = settings.rounding_seed
    old, old_opt_state, grads = (*stored, grads) if seed is None else widened((*stored, grads))
    updates: Any
    updates, opt_state = optimizer.update(grads, old_opt_state, old)
    if state.log_z_head is not None:
        # The update of every optimiser here is proportional to the learning rate.
        updates = updates[0], jax.tree.map(lambda u: settings.log_z_rate * u, updates[1])
    trained = optax.apply_updates(old, updates)
    if seed is not None:
        key = rounding_key(seed, state.step * settings.num_updates + number)
        trained, opt_state = rounded_like((trained, opt_state), stored, key)
    # Chosen leaf by leaf: a branch would keep the old state from being updated in place.
    trained, opt_state = jax.tree.map(
        lambda new, old: jnp.where(is_finite, new, old),
        (trained, opt_state),
        stored,
    )
    return Update(trained, opt_state, is_finite, grad_norm)


def stepped(
    state: TrainState,
    done: Done,
    optimizer: optax.GradientTransformation,
    settings: StepSettings,
) -> TrainState:
    """The state after a step, which was skipped if it made no update."""
    trained, opt_state = done.trained, done.opt_state
    params, head = (trained, None) if state.log_z_head is None else trained
    step = state.step + 1
    if settings.optimizer_reset_period:
        begins = step % settings.optimizer_reset_period == 0
        opt_state = begun_anew(opt_state, optimizer.init(trained), begins)
    reference = moved_reference(state.reference_params, params, step, settings)
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
    # The optimiser counts finite updates only. Without this, a step of which one update was not
    # finite would leave every later step between two learning rates.
    count = schedule_step(new_state) * settings.num_updates
    return new_state._replace(opt_state=with_schedule_count(opt_state, count))


def moved_reference(reference: Any, params: Any, step: Array, settings: StepSettings) -> Any:
    """The reference after a step that made these parameters."""
    if reference is None:
        return None
    if settings.reference_ema_decay:
        return optax.incremental_update(params, reference, 1 - settings.reference_ema_decay)
    if settings.reference_reset_period:
        reset = step % settings.reference_reset_period == 0
        return jax.tree.map(lambda r, p: jnp.where(reset, p, r), reference, params)
    return reference
