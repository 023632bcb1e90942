# SPDX-License-Identifier: Apache-2.0
"""The train step: one jitted update of the policy.

Inputs are state and batch, outputs are state and metrics. The state argument is donated: callers
must not use the old state again. Invariant: the division into micro-batches and the layout (padded
or packed) change neither gradient nor metrics beyond rounding.

With `settings.micro_batch_rows`, gradients are accumulated in float32 over micro-batches;
micro-batches that have only padding are skipped. If each group is in one micro-batch (see
`Packing`), each row is scored once. Otherwise all rows are first scored without gradient, because
the gradient with respect to each token's log-prob (for TB the centred residual) needs the whole
group. With these gradients, rows are independent: each row is scored a second time, and the
gradient is the same. Micro-batches take evenly spaced rows, so that sharded rows stay on their
device if the number of devices also divides the rows of a micro-batch.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from tba_jax.flow.batch import Batch, PackedBatch
from tba_jax.flow.bin_packing import rows_at_once
from tba_jax.models.shardings import ComputeSharding
from tba_jax.models.transformer import TransformerConfig
from tba_jax.train.heads import log_z
from tba_jax.train.micro_batches import Cut, Score, cut_rows, score_all
from tba_jax.train.objectives.base import Loss, Objective, Totals
from tba_jax.train.objectives.registry import call_objective
from tba_jax.train.rows import Rows, Tokens, all_params, make_rows
from tba_jax.train.state import StepShardings, TrainState, trainable
from tba_jax.train.step_metrics import (
    SHOWN_KEY,
    STRATA_KEY,
    batch_metrics,
    measured,
    padding_share,
    stratified,
)
from tba_jax.train.step_settings import StepSettings, tempered_target, value_at
from tba_jax.train.updates import (
    StepFunctions,
    next_state,
    one_update,
    schedule_step,
    several_updates,
    update,
)

_SKIPPED = ("skipped_steps", "skipped_in_a_row")


def make_train_step(
    config: TransformerConfig,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    settings: StepSettings,
    shardings: StepShardings | None = None,
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    """Return the jitted train step; its state argument is donated.

    With `settings.epochs` and `minibatches`, a step makes several updates with one batch. Values
    that the objective holds fixed come from the policy at the start of the step. Loss and gradient
    norm are then means over the updates; every other metric describes the policy at the start.

    A non-finite update changes nothing, and a step without a finite update changes only counters.
    The learning rate advances with steps that made an update, other schedules with every step.

    Args:
        config: architecture; with adapters, only the adapters have gradients.
        optimizer, schedule: optimiser of the parameters and its learning rate.
        settings: settings of the step: objective, target, micro-batches, dtypes.
        shardings: return value of `step_shardings`; None: all arrays are on one device.

    Returns:
        (state, batch) -> (state, metrics), with adapters (state, batch, base). Metrics are float32
        scalars, except those of `STRATA_KEY` and `SHOWN_KEY`. The base is neither changed nor
        donated. ValueError: the micro-batches do not divide the rows of a batch.
    """
    compute = None if shardings is None else shardings.compute

    def train_step(
        state: TrainState, batch: Batch | PackedBatch, base: Any = None
    ) -> tuple[TrainState, dict[str, Array]]:
        batch = batch if shardings is None else shardings.placed(batch)
        rows, cut = _cut(batch, state.step, settings, config, compute, base)
        beta = value_at(settings.target.beta, state.step)
        temperatures = settings.target.temperatures(state.step)
        raw = _with_reference(rows, state, cut)
        rows = _with_tempered_target(raw, temperatures)
        score, apart = _score_functions(rows, settings.objective)
        has_log_z = state.log_z_head is not None and "value" not in settings.objective.heads
        learned = _log_z(state, batch, settings, config, compute, base) if has_log_z else None
        of_prompts, of_batch = None if learned is None else learned[0], rows.totals()

        def loss_of(
            scored: Array,
            tokens: Tokens,
            log_z: Array | None = of_prompts,
            totals: Totals = of_batch,
        ) -> Loss:
            data = rows.group_data(*apart(scored), tokens, totals)
            return call_objective(settings.objective, data._replace(log_z=log_z), beta)

        one = functools.partial(update, state=state, optimizer=optimizer, settings=settings)
        stored = trainable(state.params, state.log_z_head), state.opt_state
        how = StepFunctions(score, apart, cut, loss_of, one)
        if settings.num_updates > 1:
            done = several_updates(rows, *stored, how, settings)
        else:
            done = one_update(rows, *stored, how, learned)
        new_state = next_state(state, done, settings)
        metrics = {
            **done.metrics(settings),
            "lr": schedule(schedule_step(state)),
            "beta": beta,
            **temperatures,
            **batch_metrics(batch, rows, done.policy, raw.responses.reference_logprob),
            "padding_share": padding_share(batch, cut),
            **{name: getattr(new_state, name) for name in _SKIPPED},
        }
        shown = _shown(raw, done.policy) if settings.shows_tokens else {}
        strata = {STRATA_KEY: stratified(measured(rows, done.policy, beta))}
        return new_state, {f"train/{name}": x for name, x in metrics.items()} | strata | shown

    return _jitted(train_step, shardings)


def _cut(
    batch: Batch | PackedBatch,
    step: Array,
    settings: StepSettings,
    config: TransformerConfig,
    compute: ComputeSharding | None,
    base: Any,
) -> tuple[Rows, Cut]:
    """Return a batch as rows, and their division into micro-batches."""
    scoring, remat = settings.scoring, settings.remat
    rows = make_rows(batch, step, config, scoring, remat, compute, base)
    c = 1 if isinstance(batch, PackedBatch) else batch.slots.shape[1]
    size = rows_at_once(settings.micro_batch_rows, c, settings.row_multiple)
    return rows, cut_rows(rows, size, is_whole=settings.is_whole)


def _shown(rows: Rows, policy: Array) -> dict[str, Any]:
    """Return log-probs of the tokens of the first prompt's responses, [k t] each."""
    of_batch = {"policy": policy, "reference": rows.tokens.reference}
    known = {name: x for name, x in of_batch.items() if x is not None}
    return {SHOWN_KEY: {name: rows.of_first_prompt(x) for name, x in known.items()}}


def _score_functions(
    rows: Rows, objective: Objective
) -> tuple[Score, Callable[[Array], tuple[Array, Array | None]]]:
    """Return the fields `score` and `apart` of `StepFunctions`."""
    if "value" in objective.heads:
        return rows.score_values, lambda scored: (scored[..., 0], scored[..., 1])
    return rows.score, lambda scored: (scored, None)


def _jitted(
    train_step: Callable[..., tuple[TrainState, dict[str, Array]]], shardings: StepShardings | None
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    if shardings is None:
        return jax.jit(train_step, donate_argnums=0)
    base = () if shardings.base is None else (shardings.base,)
    return jax.jit(
        train_step,
        donate_argnums=0,
        # The sharding of a batch depends on its type: see `shardings.of_batch`.
        in_shardings=(shardings.state, None, *base),
        out_shardings=(shardings.state, shardings.replicated),
        compiler_options=dict(shardings.compiler_options) or None,
    )


def _with_reference(rows: Rows, state: TrainState, cut: Cut) -> Rows:
    """Return rows with log pi_ref(y|x); computed if the state has a reference, else as stored."""
    if state.reference_params is None:
        return rows
    scored = score_all(rows, state.reference_params, cut, rows.score)
    return rows._replace(
        tokens=rows.tokens._replace(reference=scored),
        responses=rows.responses._replace(
            reference_logprob=rows.sums(scored * rows.tokens.counted)
        ),
    )


def _with_tempered_target(rows: Rows, temperatures: dict[str, Float[Array, ""]]) -> Rows:
    """Return rows with reference log-probs and rewards scaled for the tempered target."""
    if not temperatures:
        return rows
    reward, reference = rows.responses.reward, rows.tokens.reference
    if reference is not None:
        reference, _ = tempered_target(reference, reward, **temperatures)
    reference_logprob, reward = tempered_target(
        rows.responses.reference_logprob, reward, **temperatures
    )
    return rows._replace(
        tokens=rows.tokens._replace(reference=reference),
        responses=rows.responses._replace(reference_logprob=reference_logprob, reward=reward),
    )


def _log_z(
    state: TrainState,
    batch: Batch | PackedBatch,
    settings: StepSettings,
    config: TransformerConfig,
    sharding: ComputeSharding | None,
    base: Any,
) -> tuple[Float[Array, " p"], Callable[[Array], tuple[Any, Any]]]:
    """Return (learned log Z of every prompt, its vector-Jacobian product)."""
    prompts, lengths = batch.prompts, batch.prompt_lengths[:, 0]
    assert prompts is not None, "a learned log Z needs the batch's prompts"
    # Give empty rows one token, so that no mean divides by 0.
    empty = prompts.shape[0] - lengths.size
    return jax.vjp(
        lambda params, head: log_z(
            head,
            all_params(base, params),
            prompts,
            jnp.pad(lengths, (0, empty), constant_values=1),
            config=config,
            compute_dtype=jnp.dtype(settings.scoring.compute_dtype),
            remat=settings.remat,
            sharding=sharding,
        )[: lengths.size],
        state.params,
        state.log_z_head,
    )
