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
from jaxtyping import Array, Float

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
    Cut,
    Rows,
    Scorer,
    all_params,
    cut_rows,
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

    An objective with `epochs` and `minibatches` makes several updates with one batch, all with the
    same learning rate. A non-finite update changes nothing, and a step without a finite update
    changes only counters. The learning rate advances with steps that made an update, other
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
    guarded = only_finite(optimizer)

    def train_step(
        state: TrainState, batch: Batch, base: Any = None
    ) -> tuple[TrainState, dict[str, Any]]:
        batch = batch if shardings is None else shardings.placed(batch)
        chex.assert_equal_shape([batch.source, batch.mask, batch.behavior, batch.reference])
        chex.assert_equal_shape([batch.rewards, batch.staleness, batch.is_drawn])
        groups, beta, temperatures = _groups(batch, state.step, settings)
        lr = jnp.asarray(rate(state.step - state.skipped_steps), jnp.float32)
        stored = trainable(state.params, state.head)
        # Learned log Z of the prompts, a function of policy and head.
        log_z_pull = None
        if settings.objective.needs.head == "log_z":
            log_z_pull = _log_z(stored, batch, config, settings, shardings, base)
        scorer = _scorer(config, settings, shardings, batch, base)
        work = _Work(settings, guarded, state, batch, groups, beta, lr, scorer, log_z_pull)
        if work.num_updates > 1:
            done = work.several_updates(stored)
        else:
            done = work.update(0, stored, state.opt_state, groups)
        new_state = _next(state, done, work.num_updates, settings)
        numbers = {
            **done.numbers,
            "lr": lr,
            "beta": beta,
            **temperatures,
            "skipped_steps": new_state.skipped_steps,
            "skipped_in_a_row": new_state.skipped_in_a_row,
        }
        logp = jnp.where(batch.mask, work.gathered(done.scored)[0], 0)
        return new_state, {
            "numbers": numbers,
            "sums": _measured(logp, batch),
            "own": done.own,
            "log_z": None if log_z_pull is None else log_z_pull[0],
            "shown": {"policy": logp[0], "reference": batch.reference[0]},
        }

    return _jitted(train_step, shardings)


class _Done(NamedTuple):
    """Result of the updates of a step.

    Attributes:
        trained, opt_state: parameters and optimizer state after the last update.
        scored: scores of all rows under the policy at the start of the step.
        numbers: loss and norm of the gradient: means over the updates.
        own: metrics of the objective, as `_sums`: means over the passes.
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
    log_z: tuple[Array, Callable[[Array], tuple[Any, Any]]] | None

    @property
    def num_updates(self) -> int:
        """Number of updates of a step."""
        return self.settings.objective.num_updates

    @functools.cached_property
    def cut(self) -> Cut:
        """Division of the rows into minibatches and micro-batches."""
        parts = self.settings.objective.value("minibatches", 1)
        return _cut(self.batch, self.settings, parts)

    @property
    def has_values(self) -> bool:
        """Whether scores are log-probs and values of states, [n x 2]."""
        return self.settings.objective.needs.head == "value"

    def score(self, trained: Any, rows: Rows) -> Array:
        """Return the scores of some rows."""
        if self.has_values:
            return self.scorer(trained[0], rows, trained[1])
        return self.scorer(trained, rows)

    def gathered(self, scored: Array) -> tuple[Array, Array | None]:
        """Return log-probs and values of each response's tokens, [p k t], from scores of rows."""
        found = _gathered(scored, self.batch.source)
        return (found[..., 0], found[..., 1]) if self.has_values else (found, None)

    def terms(
        self, scored: Array, log_z: Array | None, groups: Groups, is_here: Array
    ) -> tuple[Array, tuple[Terms, Groups]]:
        """Return (loss of the responses in `is_here`, (terms, groups)), from scores of all rows."""
        logp, values = self.gathered(scored)
        groups = groups._replace(
            logp=jnp.where(groups.mask, logp, 0),
            mask=groups.mask & is_here[..., None],
            log_z=log_z,
            values=None if values is None else jnp.where(groups.mask, values, 0),
        )
        objective = self.settings.objective
        terms = objective(groups, self.beta)
        total = _total(objective.needs.total, groups, is_here)
        return jnp.sum(jnp.where(is_here, terms.loss, 0)) / total, (terms, groups)

    def update(self, number: Array | int, trained: Any, opt_state: Any, groups: Groups) -> _Done:
        """Make update `number` of the step."""
        batch, cut = self.batch, self.cut
        part, is_here = number % cut.parts, batch.is_drawn
        if cut.parts > 1:
            is_here &= cut.part_of(batch.source[..., 0] // _positions(batch)) == part
        log_z, pull = (None, None) if self.log_z is None else self.log_z
        scored, grads = gradients(
            self.score,
            lambda scored: self.terms(scored, log_z, groups, is_here)[0],
            trained if pull is None else trained[0],
            rows_of(batch),
            cut,
            used=_used(batch, cut),
            is_whole=self.settings.is_whole,
            part=part,
        )
        loss, (terms, seen) = self.terms(scored, log_z, groups, is_here)
        if pull is not None:
            by_log_z = jax.grad(lambda z: self.terms(scored, z, groups, is_here)[0])(log_z)
            through_states, of_head = pull(by_log_z)
            grads = jax.tree.map(jnp.add, grads, through_states), of_head
        norm = optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), grads))
        trained, opt_state = self.applied(number, trained, opt_state, grads)
        numbers = {"loss": loss, "grad_norm": norm}
        return _Done(trained, opt_state, scored, numbers, _sums(terms, seen, is_here))

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
        if self.state.head is not None:
            factor = self.settings.objective.value("log_z_rate", 1.0)
            updates = updates[0], jax.tree.map(lambda u: factor * u, updates[1])
        new = optax.apply_updates(old, updates)
        key = rounding_key(self.settings.rounding_seed, self.state.step * self.num_updates + number)
        return rounded_like((new, new_state), (trained, opt_state), key)

    def several_updates(self, stored: Any) -> _Done:
        """Make several passes over the minibatches of a batch, with an update for each.

        Values of states that the objective holds fixed are those of the start.
        """
        scored = score_all(
            self.score, stored, rows_of(self.batch), self.cut, _used(self.batch, self.cut)
        )
        values = self.gathered(scored)[1]
        groups = self.groups._replace(
            start_values=None if values is None else jnp.where(self.groups.mask, values, 0)
        )

        def one(number: Array, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            trained, opt_state, sums = carry
            done = self.update(number, trained, opt_state, groups)
            sums = jax.tree.map(jnp.add, sums, (done.numbers, done.own))
            return done.trained, done.opt_state, sums

        def sums_of(trained: Any, opt_state: Any) -> tuple[Any, Any]:
            done = self.update(0, trained, opt_state, groups)
            return done.numbers, done.own

        begin = stored, self.state.opt_state
        shapes = jax.eval_shape(sums_of, *begin)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        trained, opt_state, (numbers, own) = jax.lax.fori_loop(
            0, self.num_updates, one, (*begin, zeros)
        )
        numbers = jax.tree.map(lambda x: x / self.num_updates, numbers)
        numbers["updates"] = _made(self.state, opt_state, self.num_updates)
        passes = self.num_updates // self.cut.parts
        own = jax.tree.map(lambda x: x / passes, own)
        return _Done(trained, opt_state, scored, numbers, own)


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
        cut = cut_rows(
            len(missing), _per_row(batch), settings.micro_batch_rows, settings.row_multiple
        )
        found = score_all(scorer, params, rows, cut, cut.num)
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
        cut = _cut(batch, settings, 1)
        scorer = _scorer(config, settings, shardings, batch, base)
        scored = score_all(scorer, params, rows_of(batch), cut, _used(batch, cut))
        logp = jnp.where(batch.mask, _gathered(scored, batch.source), 0)
        return jnp.sum(logp), jnp.sum(batch.mask)

    return jax.jit(log_likelihood)


def _jitted(train_step: Callable[..., Any], shardings: StepShardings | None) -> Callable[..., Any]:
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


def _per_row(batch: Batch) -> int:
    """Return c, the number of responses in a row, as micro-batches count them."""
    return 1 if batch.response_lengths is None else batch.response_lengths.shape[1]


def _positions(batch: Batch) -> int:
    """Return x, the number of scored positions of a row."""
    if batch.response_lengths is None:
        return batch.tokens.shape[1]
    return batch.response_lengths.shape[1] * batch.source.shape[2]


def _cut(batch: Batch, settings: StepSettings, parts: int) -> Cut:
    return cut_rows(
        batch.tokens.shape[0],
        _per_row(batch),
        settings.micro_batch_rows,
        settings.row_multiple,
        parts,
    )


def _used(batch: Batch, cut: Cut) -> Array:
    """Return the number of micro-batches before the first that has only padding."""
    return batch.num_computed // (batch.tokens.shape[0] // cut.num)


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
    batch: Batch, step: Array, settings: StepSettings
) -> tuple[Groups, Array, dict[str, Array]]:
    """Return (groups without log-probs of the policy, beta, temperatures of the target)."""
    heat = {
        "reference_temperature": settings.reference_temperature,
        "reward_temperature": settings.reward_temperature,
    }
    temperatures = {}
    if not all(schedule.is_always(1.0) for schedule in heat.values()):
        temperatures = {name: value_at(schedule, step) for name, schedule in heat.items()}
    reward, reference = batch.rewards, jnp.where(batch.mask, batch.reference, 0)
    if temperatures:
        reward = reward / temperatures["reward_temperature"]
        reference = reference / (
            temperatures["reference_temperature"] * temperatures["reward_temperature"]
        )
    groups = Groups(
        logp=jnp.zeros_like(batch.behavior),
        behavior=jnp.where(batch.mask, batch.behavior, 0),
        reference=reference,
        mask=batch.mask,
        reward=reward,
        staleness=jnp.maximum(batch.staleness, 0),
        advantages=batch.advantages,
    )
    return groups, value_at(settings.beta, step), temperatures


def _gathered(scored: Array, source: Array) -> Array:
    """Return the scores of each response's tokens, [p k t ...]; 0 at padding."""
    flat = scored.reshape(-1, *scored.shape[2:])
    return jnp.take(flat, source, axis=0, mode="fill", fill_value=0)


def _total(kind: str, groups: Groups, is_here: Array) -> Array:
    """Return what the sum of the terms is divided by; at least 1, because parts may be empty."""
    counted = {
        "tokens": lambda: groups.mask,
        "responses": lambda: is_here,
        "prompts": lambda: jnp.any(is_here, axis=1),
    }[kind]()
    return jnp.maximum(jnp.sum(counted.astype(jnp.float32)), 1)


def _sums(terms: Terms, groups: Groups, is_here: Array) -> dict[str, dict[str, Array]]:
    """Return the metrics of a loss by unit, summed over the tokens of each response, [p k]."""
    found: dict[str, dict[str, Array]] = {"tokens": {}, "responses": {}}
    for name, x in jax.lax.stop_gradient(dict(terms.metrics)).items():
        if x.ndim == 3:
            found["tokens"][name] = summed(groups, x)
        else:
            found["responses"][name] = jnp.where(is_here, x, 0)
    return found


def _measured(logp: Array, batch: Batch) -> dict[str, Array]:
    """Return sums over the counted tokens of each response, [p k] each."""
    gap = jnp.where(batch.mask, logp - batch.behavior, 0)
    return {
        "policy": jnp.sum(logp, axis=-1),
        "reference": jnp.sum(jnp.where(batch.mask, batch.reference, 0), axis=-1),
        "low_ratios": jnp.sum(gap < jnp.log(0.8), axis=-1),
        "high_ratios": jnp.sum(gap > jnp.log(1.2), axis=-1),
        "largest_gap": jnp.max(jnp.abs(gap), axis=-1),
    }


def _made(state: TrainState, opt_state: Any, num_updates: int) -> Array:
    """Return the number of finite updates of a step."""
    return num_updates - (opt_state.total_notfinite - state.opt_state.total_notfinite)


def _next(state: TrainState, done: _Done, num_updates: int, settings: StepSettings) -> TrainState:
    """Return the state after a step; the step counts as skipped if it made no update."""
    params, head = (done.trained, None) if state.head is None else done.trained
    step, reference = state.step + 1, state.reference_params
    if reference is not None and settings.reference_reset_period:
        is_reset = step % settings.reference_reset_period == 0
        reference = jax.tree.map(lambda r, p: jnp.where(is_reset, p, r), reference, params)
    skipped = (_made(state, done.opt_state, num_updates) == 0).astype(jnp.int32)
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

    def of_all(params: Any, head: Any) -> Array:
        return log_z(
            head,
            all_params(base, params),
            prompts,
            lengths,
            config=config,
            compute_dtype=jnp.dtype(settings.scoring.compute_dtype),
            remat=settings.remat,
            sharding=None if shardings is None else shardings.compute,
        )[: sizes.size]

    found, pull = jax.vjp(of_all, *stored)
    return found, pull
