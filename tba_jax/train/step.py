# SPDX-License-Identifier: Apache-2.0
"""The train step: one jitted update of the policy, and the pass that scores the reference.

Scores of the rows, loss of the groups, gradient by each score, pulled back through the model,
update by optax. The state argument is donated: callers must not use the old state again. The step
returns sums for each response, of which `metrics` takes means on the host.

Invariant: the division into micro-batches and the layout of rows change neither gradient nor
metrics beyond rounding.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from tba_jax.flow.layout import Batch
from tba_jax.models.logprobs import Scoring
from tba_jax.models.transformer import Remat, TransformerConfig
from tba_jax.settings import Schedule
from tba_jax.train.groups import Groups, Terms
from tba_jax.train.losses import summed
from tba_jax.train.objectives import Objective
from tba_jax.train.optimizers import value_at
from tba_jax.train.rounding import rounded_like, rounding_key, widened
from tba_jax.train.scoring import (
    MicroBatches,
    Score,
    divide,
    gradients,
    make_score,
    rows_of,
    score_all,
)
from tba_jax.train.state import StepShardings, TrainState, only_finite, trainable


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """Static settings of a train step (hashable).

    The target is log R = [log pi_ref(y|x) / reference_temperature + r(x, y) / beta] /
    reward_temperature. A high reference temperature flattens the reference, so fluency counts less;
    a high reward temperature flattens the whole target (TBA, arXiv:2503.18929, appendix B.3).

    Attributes:
        objective: objective to minimise.
        scoring: settings of the log-probs of policy and reference.
        beta: KL coefficient.
        reference_temperature, reward_temperature: > 0.
        reference_reset_period: steps between updates of the reference to the policy; 0: never.
        micro_batch_rows: responses per micro-batch; 0: all.
        row_multiple: number of devices that share the rows of a micro-batch; it divides them.
        is_whole: whether each group is in a single micro-batch.
        remat: as in `transformer.apply`.
        rounding_seed: seed of the stochastic rounding of arrays stored in bfloat16.
    """

    objective: Objective
    scoring: Scoring
    beta: Schedule
    reference_temperature: Schedule = Schedule(1.0)
    reward_temperature: Schedule = Schedule(1.0)
    reference_reset_period: int = 0
    micro_batch_rows: int = 0
    row_multiple: int = 1
    is_whole: bool = False
    remat: Remat = "none"
    rounding_seed: int = 0


def make_train_step(
    config: TransformerConfig,
    optimizer: optax.GradientTransformation,
    rate: Schedule,
    settings: StepSettings,
    shardings: StepShardings | None = None,
) -> Callable[..., tuple[TrainState, dict[str, Any]]]:
    """Return the jitted train step; its state argument is donated.

    An objective with `epochs` makes several updates with one batch, all with the same learning
    rate. An update whose loss or gradient is not finite changes nothing, and a step without another
    update changes only counters. The learning rate advances with steps that made an update, other
    schedules with every step.

    Args:
        config: architecture; with adapters, only the adapters have gradients.
        optimizer: optimiser whose updates are multiplied by minus the learning rate.
        rate: learning rate, with STEPS filled in.
        shardings: return value of `step_shardings`; None: all arrays are on one device.

    Returns:
        (state, batch) -> (state, outputs), with adapters (state, batch, base); the base is neither
        changed nor donated. The batch has no `missing`, and its reference is known. Outputs are
        those of `metrics.Outputs`.
    """

    def train_step(
        state: TrainState, batch: Batch, base: Any = None
    ) -> tuple[TrainState, dict[str, Any]]:
        guarded = only_finite(optimizer)
        return _train_step(state, batch, base, config, guarded, rate, settings, shardings)

    if shardings is None:
        return jax.jit(train_step, donate_argnums=0)
    base = () if shardings.base is None else (shardings.base,)
    return jax.jit(
        train_step,
        donate_argnums=0,
        # The sharding of a batch depends on its fields: see `shardings.of_batch`.
        in_shardings=(shardings.state, None, *base),
        out_shardings=(shardings.state, shardings.replicated),
        compiler_options=dict(shardings.compiler_options) or None,
    )


def _train_step(
    state: TrainState,
    batch: Batch,
    base: Any,
    config: TransformerConfig,
    optimizer: optax.GradientTransformation,
    rate: Schedule,
    settings: StepSettings,
    shardings: StepShardings | None,
) -> tuple[TrainState, dict[str, Any]]:
    """Return the state after a step, and its outputs; arguments as in `make_train_step`."""
    objective, head = settings.objective, settings.objective.needs.head
    batch, score, cut = _opened(batch, base, config, settings, shardings, bool(head))
    chex.assert_equal_shape([batch.source, batch.mask, batch.behavior, batch.reference])
    chex.assert_equal_shape([batch.rewards, batch.staleness, batch.is_drawn])
    rows, epochs = rows_of(batch), objective.value("epochs", 1)
    targets, temperatures = _targets(batch, state.step, settings)
    beta = value_at(settings.beta, state.step)
    lr = value_at(rate, state.step - state.skipped_steps)
    total = _total(objective.needs.total, batch)

    def loss_of(scored: Array, start_values: Array | None) -> tuple[Array, Any]:
        groups = _with_policy(targets, scored, batch, head)._replace(start_values=start_values)
        terms = objective(groups, beta)
        return jnp.sum(jnp.where(batch.is_drawn, terms.loss, 0)) / total, (terms, groups)

    def update(
        carry: tuple[Any, Any], number: Array | int, start_values: Array | None = None
    ) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        scored, grads = gradients(
            score,
            lambda scored: loss_of(scored, start_values)[0],
            carry[0],
            rows,
            cut,
            is_whole=settings.is_whole,
        )
        loss, (terms, groups) = loss_of(scored, start_values)
        norm = optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), grads))
        # optax looks at the gradient alone, which may be finite where the loss is not.
        grads = jax.tree.map(lambda x: jnp.where(jnp.isfinite(loss), x, jnp.nan), grads)
        key = rounding_key(settings.rounding_seed, state.step * epochs + number)
        carry = _applied(carry, grads, optimizer, lr, key)
        numbers = {"loss": loss, "grad_norm": norm}
        return carry, (groups, (numbers, _own_sums(terms, groups, batch)))

    carry = trainable(state.params, state.head), state.opt_state
    if epochs == 1:
        carry, (first, found) = update(carry, 0)
    else:
        first = _with_policy(targets, score_all(score, carry[0], rows, cut), batch, head)
        again = functools.partial(update, start_values=first.values)
        carry, (_, found) = jax.lax.scan(again, carry, jnp.arange(epochs))
        found = jax.tree.map(lambda x: jnp.mean(x, axis=0), found)
    numbers, own = found
    made = epochs - (carry[1].total_notfinite - state.opt_state.total_notfinite)
    new_state = _next(state, *carry, made, settings)
    numbers |= {"lr": lr, "beta": beta, **temperatures}
    numbers |= {"updates": made} if epochs > 1 else {}
    for name in ("skipped_steps", "skipped_in_a_row"):
        numbers[name] = getattr(new_state, name)
    shown = {"policy": first.logp[0], "reference": batch.reference[0]}
    sums = _measured(first.logp, batch)
    outputs = {"numbers": numbers, "sums": sums, "own": own, "log_z": first.log_z, "shown": shown}
    return new_state, outputs


def make_reference_pass(
    config: TransformerConfig, settings: StepSettings, shardings: StepShardings | None = None
) -> Callable[..., Float[Array, "p k t"]]:
    """Return a jitted function that completes the reference of a batch.

    Returns:
        (reference_params, batch), with adapters (reference_params, batch, base) -> log-probs of the
        reference: those of the batch, and computed ones where the batch has nan. Only the rows
        `batch.missing` are computed.
    """

    def score_reference(params: Any, batch: Batch, base: Any = None) -> Array:
        batch, score, _ = _opened(batch, base, config, settings, shardings)
        missing = batch.missing
        assert missing is not None, "the layout names the rows that lack log-probs"
        rows = jax.tree.map(lambda x: jnp.take(x, missing, axis=0, mode="clip"), rows_of(batch))
        if shardings is not None:
            rows = jax.lax.with_sharding_constraint(rows, shardings.batch)
        cut = divide(rows, len(missing), settings.micro_batch_rows, settings.row_multiple)
        found = score_all(score, params, rows, cut)
        scored = jnp.zeros((batch.tokens.shape[0], found.shape[1]), found.dtype)
        scored = scored.at[missing].set(found, mode="drop")
        computed = jnp.where(batch.mask, _gathered(scored, batch.source), 0)
        return jnp.where(jnp.isnan(batch.reference), computed, batch.reference)

    if shardings is None:
        return jax.jit(score_reference)
    return jax.jit(score_reference, out_shardings=shardings.replicated)


def _opened(
    batch: Batch,
    base: Any,
    config: TransformerConfig,
    settings: StepSettings,
    shardings: StepShardings | None,
    has_head: bool = False,
) -> tuple[Batch, Score, MicroBatches]:
    """Return the batch on its devices, the model as a function of rows, and the micro-batches."""
    if shardings is not None:
        where = shardings.of_batch(batch)
        batch = jax.tree.map(jax.lax.with_sharding_constraint, batch, where)
    score = make_score(
        base,
        batch.source.shape[2],
        has_head=has_head,
        config=config,
        scoring=settings.scoring,
        remat=settings.remat,
        sharding=None if shardings is None else shardings.compute,
    )
    size, multiple = settings.micro_batch_rows, settings.row_multiple
    return batch, score, divide(rows_of(batch), batch.num_computed, size, multiple)


def _targets(
    batch: Batch, step: Int[Array, ""], settings: StepSettings
) -> tuple[Groups, dict[str, Array]]:
    """Return (groups without the policy, temperatures of the target that are not 1).

    Rewards and log-probs of the reference are divided by the temperatures.
    """
    gamma, heat, temperatures = settings.reference_temperature, settings.reward_temperature, {}
    reward, reference = batch.rewards, jnp.where(batch.mask, batch.reference, 0)
    if not (gamma.is_always(1.0) and heat.is_always(1.0)):
        of_reference, of_reward = value_at(gamma, step), value_at(heat, step)
        temperatures = {"reference_temperature": of_reference, "reward_temperature": of_reward}
        reward = reward / of_reward
        reference = reference / (of_reference * of_reward)
    groups = Groups(
        logp=jnp.zeros_like(batch.behavior),
        behavior=jnp.where(batch.mask, batch.behavior, 0),
        reference=reference,
        mask=batch.mask,
        reward=reward,
        staleness=jnp.maximum(batch.staleness, 0),
        advantages=batch.advantages,
    )
    return groups, temperatures


def _with_policy(targets: Groups, scored: Array, batch: Batch, head: str) -> Groups:
    """Return the groups with the policy's log-probs and the head's output, from scores of rows."""
    found = _gathered(scored, batch.source)
    logp = jnp.where(batch.mask, found[..., 0] if head else found, 0)
    if head == "value":
        return targets._replace(logp=logp, values=jnp.where(batch.mask, found[..., 1], 0))
    # The state before the first token has seen the prompt and nothing else.
    return targets._replace(logp=logp, log_z=found[:, 0, 0, 1] if head else None)


def _gathered(scored: Float[Array, "n x *both"], source: Int[Array, "p k t"]) -> Array:
    """Return the scores of each response's tokens, [p k t] or [p k t 2]; 0 at padding."""
    flat = scored.reshape(-1, *scored.shape[2:])
    return jnp.take(flat, source, axis=0, mode="fill", fill_value=0)


def _total(kind: str, batch: Batch) -> Float[Array, ""]:
    """Return what the sum of the terms is divided by; at least 1, because a batch may be empty."""
    is_drawn: Bool[Array, "p k"] = batch.is_drawn
    prompts = jnp.any(is_drawn, axis=1)
    counted = {"tokens": batch.mask, "responses": is_drawn, "prompts": prompts}[kind]
    return jnp.maximum(jnp.sum(counted.astype(jnp.float32)), 1)


def _applied(
    old: tuple[Any, Any], grads: Any, optimizer: optax.GradientTransformation, lr: Array, key: Array
) -> tuple[Any, Any]:
    """Return (trained parameters, optimizer state) after an update with these gradients.

    It is computed in float32 where arrays are stored in bfloat16, and rounded at random.
    """
    trained, opt_state, grads = widened((*old, grads))
    updates: Any
    updates, opt_state = optimizer.update(grads, opt_state, trained)
    updates = jax.tree.map(lambda u: -lr * u, updates)
    return rounded_like((optax.apply_updates(trained, updates), opt_state), old, key)


def _own_sums(terms: Terms, groups: Groups, batch: Batch) -> dict[str, dict[str, Array]]:
    """Return the metrics of a loss by unit, summed over the tokens of each response, [p k]."""
    found: dict[str, dict[str, Array]] = {"tokens": {}, "responses": {}}
    for name, x in jax.lax.stop_gradient(dict(terms.metrics)).items():
        if x.ndim == 3:
            found["tokens"][name] = summed(groups, x)
        else:
            found["responses"][name] = jnp.where(batch.is_drawn, x, 0)
    return found


def _measured(logp: Float[Array, "p k t"], batch: Batch) -> dict[str, Array]:
    """Return sums over the counted tokens of each response, [p k] each."""
    gap = jnp.where(batch.mask, logp - batch.behavior, 0)
    return {
        "policy": jnp.sum(logp, axis=-1),
        "reference": jnp.sum(jnp.where(batch.mask, batch.reference, 0), axis=-1),
        "low_ratios": jnp.sum(gap < jnp.log(0.8), axis=-1),
        "high_ratios": jnp.sum(gap > jnp.log(1.2), axis=-1),
        "largest_gap": jnp.max(jnp.abs(gap), axis=-1),
    }


def _next(
    state: TrainState, trained: Any, opt_state: Any, made: Array, settings: StepSettings
) -> TrainState:
    """Return the state after a step that made `made` updates; without any it is skipped."""
    params, head = (trained, None) if state.head is None else trained
    step, reference = state.step + 1, state.reference_params
    if reference is not None and settings.reference_reset_period:
        is_reset = step % settings.reference_reset_period == 0
        reference = jax.tree.map(lambda r, p: jnp.where(is_reset, p, r), reference, params)
    skipped = (made == 0).astype(jnp.int32)
    return TrainState(
        step=step,
        params=params,
        opt_state=opt_state,
        reference_params=reference,
        skipped_steps=state.skipped_steps + skipped,
        skipped_in_a_row=(state.skipped_in_a_row + 1) * skipped,
        head=head,
    )
