# SPDX-License-Identifier: Apache-2.0
"""The train step: one jitted update of the policy, and the pass that scores the reference.

Policy log-probs of the rows, loss of the groups, gradient by each log-prob, pulled back through the
model, update by optax. The state argument is donated: callers must not use the old state again. The
step returns sums for each response, of which `metrics` takes means on the host.

Invariant: the division into micro-batches and the layout of rows change neither gradient nor
metrics beyond rounding.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from tba_jax.flow.layout import Batch
from tba_jax.models.scoring import Scoring
from tba_jax.models.transformer import Remat, TransformerConfig
from tba_jax.settings import Schedule
from tba_jax.train.groups import Groups, Terms
from tba_jax.train.heads import log_z
from tba_jax.train.losses import summed
from tba_jax.train.objectives import Objective
from tba_jax.train.rounding import rounded_like, rounding_key, widened
from tba_jax.train.schedules import value_at
from tba_jax.train.scoring import (
    MicroBatches,
    Rows,
    Scorer,
    all_params,
    divide,
    gradients,
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
    rate: optax.Schedule,
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
        rate: learning rate by step.
        settings: settings of the step.
        shardings: return value of `step_shardings`; None: all arrays are on one device.

    Returns:
        (state, batch) -> (state, outputs), with adapters (state, batch, base); the base is neither
        changed nor donated. The batch has no `missing`, and its reference is known. Outputs are
        those of `metrics.Outputs`.
    """
    guarded, epochs = only_finite(optimizer), settings.objective.value("epochs", 1)

    def train_step(
        state: TrainState, batch: Batch, base: Any = None
    ) -> tuple[TrainState, dict[str, Any]]:
        batch = batch if shardings is None else shardings.placed(batch)
        chex.assert_equal_shape([batch.source, batch.mask, batch.behavior, batch.reference])
        chex.assert_equal_shape([batch.rewards, batch.staleness, batch.is_drawn])
        groups, temperatures = _groups(batch, state.step, settings)
        beta = value_at(settings.beta, state.step)
        lr = jnp.asarray(rate(state.step - state.skipped_steps), jnp.float32)
        stored = trainable(state.params, state.head)
        log_z_of = None
        if settings.objective.needs.head == "log_z":
            log_z_of = _log_z(stored, batch, config, settings, shardings, base)
        scorer = _scorer(config, settings, shardings, batch, base)
        work = _Work(settings, guarded, state, batch, groups, beta, lr, scorer, log_z_of)
        done = work.update(0, stored, state.opt_state) if epochs == 1 else work.updates(stored)
        made = epochs - (done.opt_state.total_notfinite - state.opt_state.total_notfinite)
        new_state = _next(state, done, made, settings)
        numbers = {
            **done.numbers,
            "lr": lr,
            "beta": beta,
            **temperatures,
            **({"updates": made} if epochs > 1 else {}),
            "skipped_steps": new_state.skipped_steps,
            "skipped_in_a_row": new_state.skipped_in_a_row,
        }
        logp = jnp.where(batch.mask, work.gathered(done.scored)[0], 0)
        return new_state, {
            "numbers": numbers,
            "sums": _measured(logp, batch),
            "own": done.own,
            "log_z": None if log_z_of is None else log_z_of[0],
            "shown": {"policy": logp[0], "reference": batch.reference[0]},
        }

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


class _Done(NamedTuple):
    """Result of the updates of a step.

    Attributes:
        trained, opt_state: parameters and optimizer state after the last update.
        scored: scores of all rows under the policy at the start of the step.
        numbers: loss and norm of the gradient: means over the updates.
        own: metrics of the objective, as `_sums`: means over the updates.
    """

    trained: Any
    opt_state: Any
    scored: Array
    numbers: dict[str, Array]
    own: dict[str, dict[str, Array]]


@dataclasses.dataclass(frozen=True, eq=False)
class _Work:
    """What stays the same during a step, and the updates that are made with it.

    Attributes:
        settings, optimizer: as in `make_train_step`; the optimiser skips non-finite gradients.
        state: the state at the start of the step.
        batch, groups, beta, lr: the batch, its groups without the policy, beta, learning rate.
        scorer: the model.
        log_z: learned log Z of every prompt and its vector-Jacobian product, or None.
    """

    settings: StepSettings
    optimizer: optax.GradientTransformation
    state: TrainState
    batch: Batch
    groups: Groups
    beta: Array
    lr: Array
    scorer: Scorer
    log_z: tuple[Array, Callable[[Array], Any]] | None

    @functools.cached_property
    def cut(self) -> MicroBatches:
        """Division of the rows into micro-batches."""
        return _cut(self.batch, self.settings)

    def score(self, trained: Any, rows: Rows) -> Array:
        """Return log-probs of some rows; with a head of values also the values, [n x 2]."""
        head = self.settings.objective.needs.head
        if head == "value":
            return self.scorer(trained[0], rows, trained[1])
        return self.scorer(trained[0] if head else trained, rows)

    def gathered(self, scored: Array) -> tuple[Array, Array | None]:
        """Return log-probs and values of each response's tokens, [p k t], from scores of rows."""
        found = _gathered(scored, self.batch.source)
        has_values = self.settings.objective.needs.head == "value"
        return (found[..., 0], found[..., 1]) if has_values else (found, None)

    def loss(
        self, scored: Array, log_z: Array | None, start_values: Array | None
    ) -> tuple[Array, tuple[Terms, Groups]]:
        """Return (loss, (terms, groups)) from the scores of all rows."""
        logp, values = self.gathered(scored)
        groups = self.groups._replace(
            logp=jnp.where(self.batch.mask, logp, 0),
            log_z=log_z,
            values=None if values is None else jnp.where(self.batch.mask, values, 0),
            start_values=start_values,
        )
        objective = self.settings.objective
        terms = objective(groups, self.beta)
        total = _total(objective.needs.total, self.batch)
        return jnp.sum(jnp.where(self.batch.is_drawn, terms.loss, 0)) / total, (terms, groups)

    def update(
        self, number: Array | int, trained: Any, opt_state: Any, start_values: Array | None = None
    ) -> _Done:
        """Make update `number` of the step."""
        log_z, pull = (None, None) if self.log_z is None else self.log_z
        scored, grads = gradients(
            self.score,
            lambda scored: self.loss(scored, log_z, start_values)[0],
            trained,
            rows_of(self.batch),
            self.cut,
            is_whole=self.settings.is_whole,
        )
        loss, (terms, groups) = self.loss(scored, log_z, start_values)
        if pull is not None:
            by_log_z = jax.grad(lambda z: self.loss(scored, z, start_values)[0])(log_z)
            grads = jax.tree.map(jnp.add, grads, pull(by_log_z))
        norm = optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), grads))
        # optax looks at the gradient alone, which may be finite where the loss is not.
        grads = jax.tree.map(lambda x: jnp.where(jnp.isfinite(loss), x, jnp.nan), grads)
        trained, opt_state = self.applied(number, trained, opt_state, grads)
        numbers = {"loss": loss, "grad_norm": norm}
        return _Done(trained, opt_state, scored, numbers, _sums(terms, groups, self.batch))

    def applied(
        self, number: Array | int, trained: Any, opt_state: Any, grads: Any
    ) -> tuple[Any, Any]:
        """Return (parameters, optimizer state) after an update with these gradients.

        It is computed in float32 where arrays are stored in bfloat16, and rounded at random.
        """
        old, old_state, grads = widened((trained, opt_state, grads))
        updates: Any
        updates, new_state = self.optimizer.update(grads, old_state, old)
        updates = jax.tree.map(lambda u: -self.lr * u, updates)
        objective = self.settings.objective
        if objective.needs.head:
            factor = objective.value("log_z_rate", 1.0)
            updates = updates[0], jax.tree.map(lambda u: factor * u, updates[1])
        new = optax.apply_updates(old, updates), new_state
        total = self.state.step * objective.value("epochs", 1) + number
        key = rounding_key(self.settings.rounding_seed, total)
        return rounded_like(new, (trained, opt_state), key)

    def updates(self, stored: Any) -> _Done:
        """Make several updates with the batch; values of states are also known at the start."""
        scored = score_all(self.score, stored, rows_of(self.batch), self.cut)
        values = self.gathered(scored)[1]
        values = None if values is None else jnp.where(self.batch.mask, values, 0)

        def one(carry: tuple[Any, Any], number: Array) -> tuple[tuple[Any, Any], Any]:
            done = self.update(number, *carry, values)
            return (done.trained, done.opt_state), (done.numbers, done.own)

        numbers = jnp.arange(self.settings.objective.value("epochs", 1))
        last, found = jax.lax.scan(one, (stored, self.state.opt_state), numbers)
        return _Done(*last, scored, *jax.tree.map(lambda x: jnp.mean(x, axis=0), found))


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
        batch = batch if shardings is None else shardings.placed(batch)
        scorer = _scorer(config, settings, shardings, batch, base)
        missing = batch.missing
        assert missing is not None, "the layout names the rows that lack log-probs"
        rows = jax.tree.map(lambda x: jnp.take(x, missing, axis=0, mode="clip"), rows_of(batch))
        if shardings is not None:
            rows = jax.lax.with_sharding_constraint(rows, shardings.batch)
        cut = divide(rows, len(missing), settings.micro_batch_rows, settings.row_multiple)
        found = score_all(scorer, params, rows, cut)
        scored = jnp.zeros((batch.tokens.shape[0], found.shape[1]), found.dtype)
        scored = scored.at[missing].set(found, mode="drop")
        computed = jnp.where(batch.mask, _gathered(scored, batch.source), 0)
        return jnp.where(jnp.isnan(batch.reference), computed, batch.reference)

    if shardings is None:
        return jax.jit(score_reference)
    return jax.jit(score_reference, out_shardings=shardings.replicated)


def make_log_likelihood(
    config: TransformerConfig, settings: StepSettings, shardings: StepShardings | None = None
) -> Callable[..., tuple[Array, Array]]:
    """Return a jitted (params, batch), with adapters (params, batch, base) -> two scalars.

    They are the sum of log pi of the counted tokens of a batch, and the number of these tokens.
    """

    def log_likelihood(params: Any, batch: Batch, base: Any = None) -> tuple[Array, Array]:
        batch = batch if shardings is None else shardings.placed(batch)
        scorer = _scorer(config, settings, shardings, batch, base)
        scored = score_all(scorer, params, rows_of(batch), _cut(batch, settings))
        logp = jnp.where(batch.mask, _gathered(scored, batch.source), 0)
        return jnp.sum(logp), jnp.sum(batch.mask)

    return jax.jit(log_likelihood)


def _cut(batch: Batch, settings: StepSettings) -> MicroBatches:
    size, multiple = settings.micro_batch_rows, settings.row_multiple
    return divide(rows_of(batch), batch.num_computed, size, multiple)


def _scorer(
    config: TransformerConfig,
    settings: StepSettings,
    shardings: StepShardings | None,
    batch: Batch,
    base: Any,
) -> Scorer:
    compute = None if shardings is None else shardings.compute
    t = batch.source.shape[2]
    return Scorer(config, settings.scoring, settings.remat, compute, t, base)


def _groups(
    batch: Batch, step: Int[Array, ""], settings: StepSettings
) -> tuple[Groups, dict[str, Array]]:
    """Return (groups without log-probs of the policy, temperatures of the target that are not 1).

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


def _sums(terms: Terms, groups: Groups, batch: Batch) -> dict[str, dict[str, Array]]:
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


def _next(state: TrainState, done: _Done, made: Array, settings: StepSettings) -> TrainState:
    """Return the state after a step that made `made` updates; without any it is skipped."""
    params, head = (done.trained, None) if state.head is None else done.trained
    step, reference = state.step + 1, state.reference_params
    if reference is not None and settings.reference_reset_period:
        is_reset = step % settings.reference_reset_period == 0
        reference = jax.tree.map(lambda r, p: jnp.where(is_reset, p, r), reference, params)
    skipped = (made == 0).astype(jnp.int32)
    return TrainState(
        step=step,
        params=params,
        opt_state=done.opt_state,
        reference_params=reference,
        skipped_steps=state.skipped_steps + skipped,
        skipped_in_a_row=(state.skipped_in_a_row + 1) * skipped,
        head=head,
    )


def _log_z(
    stored: Any,
    batch: Batch,
    config: TransformerConfig,
    settings: StepSettings,
    shardings: StepShardings | None,
    base: Any,
) -> tuple[Float[Array, " p"], Callable[[Array], tuple[Any, Any]]]:
    """Return (learned log Z of every prompt, its vector-Jacobian product)."""
    prompts, sizes = batch.prompts, batch.prompt_sizes
    assert prompts is not None and sizes is not None, "a learned log Z needs the batch's prompts"
    # Empty rows get one token, so that no mean divides by 0.
    lengths = jnp.pad(sizes, (0, prompts.shape[0] - sizes.size), constant_values=1)

    def of_all(trained: Any) -> Array:
        return log_z(
            trained[1],
            all_params(base, trained[0]),
            prompts,
            lengths,
            config=config,
            compute_dtype=jnp.dtype(settings.scoring.compute_dtype),
            remat=settings.remat,
            sharding=None if shardings is None else shardings.compute,
        )[: sizes.size]

    found, pull = jax.vjp(of_all, stored)
    return found, lambda by_log_z: pull(by_log_z)[0]
