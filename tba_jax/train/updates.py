# SPDX-License-Identifier: Apache-2.0
"""Updates by the optimiser, one or several per batch, and the train state after a step.

Several updates are epochs over minibatches, as in PPO. Invariants: a non-finite update changes
nothing, and a step without a finite update changes only counters. Every epoch has the same
minibatches, and each row is in exactly one minibatch. A minibatch takes rows from every
micro-batch, so sharded rows stay on their device.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from tba_jax.train.micro_batches import Cut, Score, gradients, score_all
from tba_jax.train.objectives.base import BALANCE, Loss, Totals
from tba_jax.train.optimizers import with_schedule_count
from tba_jax.train.rounding import rounded_like, rounding_key, widened
from tba_jax.train.rows import Rows, Tokens
from tba_jax.train.state import TrainState
from tba_jax.train.step_settings import StepSettings


class Update(NamedTuple):
    """Result of one optimiser update.

    Attributes:
        trained, opt_state: parameters and optimizer state; unchanged if the update was not finite.
        is_finite: whether loss and gradient were finite.
        grad_norm: global norm of the gradient.
    """

    trained: Any
    opt_state: Any
    is_finite: Bool[Array, ""]
    grad_norm: Float[Array, ""]


class UpdateResult(NamedTuple):
    """Result of all updates of a step.

    Attributes:
        policy: log-prob of every token under the policy at the start of the step.
        loss: loss and its metrics. With several updates: means over the updates, and metrics of
            whole groups at the start of the step.
        trained, opt_state: parameters and optimizer state after the last update.
        made: int32, number of finite updates; other updates changed nothing.
        grad_norm: norm of the gradient; with several updates, the mean of the norms.
    """

    policy: Array
    loss: Loss
    trained: Any
    opt_state: Any
    made: Int[Array, ""]
    grad_norm: Float[Array, ""]

    def metrics(self, settings: StepSettings) -> dict[str, Array]:
        """Return the metrics of the updates."""
        own = {"loss": self.loss.loss, **self.loss.metrics, "grad_norm": self.grad_norm}
        return own if settings.num_updates == 1 else {**own, "updates": self.made}


class StepFunctions(NamedTuple):
    """Functions that score a batch and update the parameters.

    Attributes:
        score, cut: as in `gradients`.
        apart: splits scores into (log-probs, values).
        loss_of: (scores of some rows, their tokens, log_z=, totals=) -> loss; by default with the
            learned log Z and the totals of the whole batch.
        update: (trained, opt_state, loss, gradient, index of the update) -> Update.
    """

    score: Score
    apart: Callable[[Array], tuple[Array, Array | None]]
    cut: Cut
    loss_of: Callable[..., Loss]
    update: Callable[[Any, Any, Loss, Any, Array | int], Update]


def minibatch(rows: Rows, index: Array | int, num_parts: int, cut: Cut) -> Rows:
    """Return minibatch `index`: every `num_parts`-th row of each micro-batch.

    Raises:
        ValueError: the minibatches do not divide the rows.
    """
    num_rows = rows.tokens.slots.shape[0]
    if num_rows % (num_parts * cut.num):
        raise ValueError(
            f"objective.minibatches={num_parts} does not divide {num_rows} rows in {cut.num} "
            f"micro-batches. Set --config.objective.minibatches to a divisor of "
            f"{num_rows // cut.num}"
        )

    def take(x: Array) -> Array:
        x = x.reshape(-1, num_parts, cut.num, *x.shape[1:])
        x = jax.lax.dynamic_index_in_dim(x, index, axis=1, keepdims=False)
        return x.reshape(-1, *x.shape[2:])

    inputs, tokens = jax.tree.map(take, (rows.inputs, rows.tokens))
    return rows._replace(inputs=inputs, tokens=tokens)


def totals_of(part: Rows) -> Totals:
    """Return the totals of these rows; each total is at least 1, because means divide by it."""
    weight = jnp.where(part.is_here(part.tokens), part.responses.weight, 0)
    counted = part.sums(part.tokens.counted.astype(jnp.float32))
    has_any = jnp.any(weight > 0, axis=1).astype(jnp.float32)
    found = Totals(jnp.sum(has_any), jnp.sum(weight), jnp.sum(counted * weight))
    return Totals(*(jnp.maximum(x, 1) for x in found))


def one_update(
    rows: Rows,
    trained: Any,
    opt_state: Any,
    how: StepFunctions,
    log_z: tuple[Array, Callable[[Array], tuple[Any, Any]]] | None,
) -> UpdateResult:
    """Make one update with the whole batch.

    Args:
        rows: the batch.
        trained, opt_state: parameters and optimizer state before the update.
        log_z: learned log Z of every prompt and its vector-Jacobian product, or None.
    """
    # A head that only log Z reads is not an input of `score`.
    scored_with = trained if log_z is None else trained[0]
    scored, grads = gradients(
        rows, scored_with, lambda x, tokens: how.loss_of(x, tokens).loss, how.cut, how.score
    )
    loss = how.loss_of(scored, rows.tokens)
    if log_z is not None:
        of_prompts, pull = log_z
        by_log_z = jax.grad(lambda z: how.loss_of(scored, rows.tokens, log_z=z).loss)(of_prompts)
        through_states, of_head = pull(by_log_z)
        grads = jax.tree.map(jnp.add, grads, through_states), of_head
    done = how.update(trained, opt_state, loss, grads, 0)
    made = done.is_finite.astype(jnp.int32)
    return UpdateResult(
        how.apart(scored)[0], loss, done.trained, done.opt_state, made, done.grad_norm
    )


def several_updates(
    rows: Rows, trained: Any, opt_state: Any, how: StepFunctions, settings: StepSettings
) -> UpdateResult:
    """Run several epochs over the minibatches of a batch, with one update per minibatch.

    A minibatch has as many micro-batches as the batch, with fewer rows. Values that the objective
    holds fixed are computed first.
    """
    passes, num_parts = settings.epochs, settings.minibatches
    at_start = score_all(rows, trained, how.cut, how.score)
    policy, values = how.apart(at_start)
    rows = rows._replace(tokens=rows.tokens._replace(start_values=values))

    def one(number: Array, carry: tuple[Any, Any, Array, Any]) -> tuple[Any, Any, Array, Any]:
        trained, opt_state, made, sums = carry
        part = minibatch(rows, number % num_parts, num_parts, how.cut)
        totals = totals_of(part)

        def loss_of(scored: Array, tokens: Tokens) -> Loss:
            return how.loss_of(scored, tokens, totals=totals)

        scored, grads = gradients(
            part, trained, lambda x, tokens: loss_of(x, tokens).loss, how.cut, how.score
        )
        loss = loss_of(scored, part.tokens)
        done = how.update(trained, opt_state, loss, grads, number)
        sums = jax.tree.map(jnp.add, sums, numbers(loss, done.grad_norm))
        return done.trained, done.opt_state, made + done.is_finite.astype(jnp.int32), sums

    def numbers(loss: Loss, grad_norm: Array) -> dict[str, Array]:
        # Minibatches do not have whole groups.
        known = {name: x for name, x in loss.metrics.items() if name not in BALANCE}
        return {"loss": loss.loss, "grad_norm": grad_norm, **known}

    loss = how.loss_of(at_start, rows.tokens)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), numbers(loss, jnp.float32(0)))
    num = passes * num_parts
    begin = trained, opt_state, jnp.int32(0), zeros
    trained, opt_state, made, sums = jax.lax.fori_loop(0, num, one, begin)
    means = {name: x / num for name, x in sums.items()}
    mean_loss, grad_norm = means.pop("loss"), means.pop("grad_norm")
    loss = Loss(mean_loss, {**loss.metrics, **means})
    return UpdateResult(policy, loss, trained, opt_state, made, grad_norm)


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
    settings: StepSettings,
) -> TrainState:
    """Return the state after a step; the step counts as skipped if it made no update."""
    trained, opt_state = done.trained, done.opt_state
    params, head = (trained, None) if state.log_z_head is None else trained
    step = state.step + 1
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
    if settings.reference_reset_period:
        reset = step % settings.reference_reset_period == 0
        return jax.tree.map(lambda r, p: jnp.where(reset, p, r), reference, params)
    return reference
