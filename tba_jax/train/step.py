# SPDX-License-Identifier: Apache-2.0
"""The train step: one jitted update of the policy.

State and batch in, state and metrics out. It does not know which objective it minimises, where
batches come from or what happens between two steps; its argument is donated, so whoever holds the
old state must not use it again. The invariant it owns: how rows are cut into micro-batches, and
whether they are padded or packed, changes neither gradient nor metrics beyond rounding.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from tba_jax.flow.batch import Batch, PackedBatch
from tba_jax.flow.placing import rows_at_once
from tba_jax.models.scoring import Scoring
from tba_jax.models.shardings import ComputeSharding
from tba_jax.models.transformer import Remat, TransformerConfig
from tba_jax.train.heads import log_z
from tba_jax.train.micro_batches import Cut, Score, cut_rows, gradients, score_all
from tba_jax.train.objectives.base import Loss, Objective
from tba_jax.train.off_policy import (
    STRATA_KEY,
    Measured,
    largest_gap,
    off_policy_stats,
    stratified,
)
from tba_jax.train.optimizers import begun_anew
from tba_jax.train.rounding import rounded_like, rounding_key, widened
from tba_jax.train.rows import Rows, Tokens, make_rows, num_valid_tokens, whole
from tba_jax.train.state import StepShardings, TrainState, trainable
from tba_jax.train.target import Target, tempered_target

_SKIPPED = ("skipped_steps", "skipped_in_a_row")


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """The static part of a train step (hashable).

    Attributes:
        objective: what is minimised.
        target: what is trained towards.
        scoring: how policy and reference are scored.
        log_z_rate: learning rate of a learned log Z over the policy's.
        reference_reset_period: steps between reference := policy; 0: never.
        reference_ema_decay: per step, of a reference that is an average of the policy; 0: none is.
        optimizer_reset_period: steps after which moments begin anew; 0: never.
        micro_batch_rows: responses whose gradients are made at a time; 0: all.
        row_multiple: rows of a micro-batch are a multiple (devices that divide them).
        is_whole: all rows of a group are in one micro-batch.
        remat: as in `transformer.apply`.
        rounding_seed: of the stochastic rounding of what is stored in bfloat16; None: what is
            stored there is computed there, to the nearest.
    """

    objective: Objective
    target: Target
    scoring: Scoring
    log_z_rate: float = 1.0
    reference_reset_period: int = 0
    reference_ema_decay: float = 0.0
    optimizer_reset_period: int = 0
    micro_batch_rows: int = 0
    row_multiple: int = 1
    is_whole: bool = False
    remat: Remat = "none"
    rounding_seed: int | None = None


def make_train_step(
    config: TransformerConfig,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    settings: StepSettings,
    shardings: StepShardings | None = None,
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    """The jitted train step; its state argument is donated.

    With `settings.micro_batch_rows` gradients are accumulated in float32 over micro-batches of as
    many responses; those that hold nothing but padding are not worked on. Where these hold whole
    groups (`Packing` puts rows so), each row is scored once. Where a group is spread over several,
    all rows are scored without gradient first: the gradient by each token's log-prob (for TB its
    centred residual) needs the whole group, and once it is known the rows are independent. A row
    is then scored twice; the gradient is the same. A micro-batch takes rows from all over the
    batch, evenly spaced, so that rows divided over devices stay where they are if the rows of a
    micro-batch divide over them too.

    A step whose loss or gradient is not finite changes nothing but its counters.

    Args:
        config: the architecture; with adapters, the gradient is by them alone.
        optimizer, schedule: of the parameters.
        settings: objective, target, micro-batches, dtypes.
        shardings: from `step_shardings`; None: everything on one device.

    Returns:
        (state, batch) -> (state, metrics), with adapters (state, batch, base): metrics are float32
        scalars, but for the strata under `STRATA_KEY`; the base is neither changed nor donated. It
        raises ValueError for a batch whose rows the micro-batches do not divide.
    """
    compute = None if shardings is None else shardings.compute

    def train_step(
        state: TrainState, batch: Batch | PackedBatch, base: Any = None
    ) -> tuple[TrainState, dict[str, Array]]:
        rows = make_rows(batch, state.step, config, settings.scoring, settings.remat, compute, base)
        c = 1 if isinstance(batch, PackedBatch) else batch.slots.shape[1]
        size = rows_at_once(settings.micro_batch_rows, c, settings.row_multiple)
        cut = cut_rows(rows, size, is_whole=settings.is_whole)
        beta = settings.target.beta.at(state.step)
        temperatures = settings.target.temperatures(state.step)
        rows = _with_reference(rows, state, cut)
        reference_logprob = rows.responses.reference_logprob
        rows = _towards(rows, temperatures)
        trained, score, apart = _scored_how(rows, state, settings.objective)
        log_z, pull_log_z = None, None
        if state.log_z_head is not None and score is rows.score:
            log_z, pull_log_z = _log_z(state, batch, settings, config, compute, base)
        totals = rows.totals()

        def loss_of(scored: Array, tokens: Tokens, log_z: Array | None = log_z) -> Loss:
            data = rows.group_data(*apart(scored), tokens, totals)
            return settings.objective(data._replace(log_z=log_z), beta)

        scored, grads = gradients(rows, trained, lambda *xs: loss_of(*xs).loss, cut, score)
        (policy, _), loss = apart(scored), loss_of(scored, rows.tokens)
        if pull_log_z is not None:
            by_log_z = jax.grad(lambda z: loss_of(scored, rows.tokens, z).loss)(log_z)
            through_states, of_head = pull_log_z(by_log_z)
            grads = jax.tree.map(jnp.add, grads, through_states), of_head
        if shardings is not None:
            state = state._replace(opt_state=shardings.fetched(state.opt_state))
        new_state, grad_norm = _updated(state, loss.loss, grads, optimizer, settings)
        metrics = {
            "loss": loss.loss,
            **loss.metrics,
            "grad_norm": grad_norm,
            # A skipped step does not move the optimiser along its schedule.
            "lr": schedule(state.step - state.skipped_steps),
            "beta": beta,
            **temperatures,
            **_batch_metrics(batch, rows, policy, reference_logprob),
            "padding_share": _padding_share(batch, cut),
            **{name: getattr(new_state, name) for name in _SKIPPED},
        }
        named = {f"train/{name}": value for name, value in metrics.items()}
        return new_state, {**named, STRATA_KEY: stratified(_measured(rows, policy, beta))}

    return _jitted(train_step, shardings)


def _scored_how(
    rows: Rows, state: TrainState, objective: Objective
) -> tuple[Any, Score, Callable[[Array], tuple[Array, Array | None]]]:
    """(what rows are scored with, how, what divides that into log-probs and values)."""
    if "value" in objective.heads:
        trained = (state.params, state.log_z_head)
        return trained, rows.score_values, lambda scored: (scored[..., 0], scored[..., 1])
    return state.params, rows.score, lambda scored: (scored, None)


def _jitted(
    train_step: Callable[..., tuple[TrainState, dict[str, Array]]], shardings: StepShardings | None
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    if shardings is None:
        return jax.jit(train_step, donate_argnums=0)
    base = () if shardings.base is None else (shardings.base,)
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(shardings.state, shardings.batch, *base),
        out_shardings=(shardings.state, shardings.replicated),
        compiler_options=dict(shardings.compiler_options) or None,
    )


def _with_reference(rows: Rows, state: TrainState, cut: Cut) -> Rows:
    """With log pi_ref(y|x) scored here where the state has a reference, else as stored."""
    if state.reference_params is None:
        return rows
    scored = score_all(rows, state.reference_params, cut, rows.score)
    return rows._replace(
        tokens=rows.tokens._replace(reference=scored),
        responses=rows.responses._replace(
            reference_logprob=rows.sums(scored * rows.tokens.counted)
        ),
    )


def _towards(rows: Rows, temperatures: dict[str, Float[Array, ""]]) -> Rows:
    """As the objective is shown them: with the tempered target."""
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
    """(learned log Z of every prompt, its pull-back to parameters and head)."""
    prompts = batch.prompts
    assert prompts is not None, "a batch without prompts has no learned log Z"
    return jax.vjp(
        lambda params, head: log_z(
            head,
            whole(base, params),
            prompts,
            batch.prompt_lengths[:, 0],
            config=config,
            compute_dtype=jnp.dtype(settings.scoring.compute_dtype),
            remat=settings.remat,
            sharding=sharding,
        ),
        state.params,
        state.log_z_head,
    )


def _updated(
    state: TrainState,
    loss: Float[Array, ""],
    grads: Any,
    optimizer: optax.GradientTransformation,
    settings: StepSettings,
) -> tuple[TrainState, Float[Array, ""]]:
    """(state after the optimiser's step, norm of the gradient)."""
    grad_norm = optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), grads))
    is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    stored = trainable(state.params, state.log_z_head), state.opt_state
    seed = settings.rounding_seed
    old, old_opt_state, grads = (*stored, grads) if seed is None else widened((*stored, grads))
    updates: Any
    updates, opt_state = optimizer.update(grads, old_opt_state, old)
    if state.log_z_head is not None:
        # The update of every optimiser here is proportional to the learning rate.
        updates = updates[0], jax.tree.map(lambda u: settings.log_z_rate * u, updates[1])
    trained: Any = optax.apply_updates(old, updates)
    if seed is not None:
        key = rounding_key(seed, state.step)
        trained, opt_state = rounded_like((trained, opt_state), stored, key)
    # Chosen leaf by leaf: a branch would keep the old state from being updated in place.
    trained, opt_state = jax.tree.map(
        lambda new, old: jnp.where(is_finite, new, old),
        (trained, opt_state),
        stored,
    )
    params, head = (trained, None) if state.log_z_head is None else trained
    step = state.step + 1
    if settings.optimizer_reset_period:
        begins = step % settings.optimizer_reset_period == 0
        opt_state = begun_anew(opt_state, optimizer.init(trained), begins)
    reference = _moved_reference(state.reference_params, params, step, settings)
    skipped = (~is_finite).astype(jnp.int32)
    new_state = TrainState(
        step,
        params,
        opt_state,
        reference,
        state.skipped_steps + skipped,
        (state.skipped_in_a_row + 1) * skipped,
        head,
    )
    return new_state, grad_norm


def _moved_reference(reference: Any, params: Any, step: Array, settings: StepSettings) -> Any:
    """The reference after a step that made these parameters."""
    if reference is None:
        return None
    if settings.reference_ema_decay:
        return optax.incremental_update(params, reference, 1 - settings.reference_ema_decay)
    if settings.reference_reset_period:
        reset = step % settings.reference_reset_period == 0
        return jax.tree.map(lambda r, p: jnp.where(reset, p, r), reference, params)
    return reference


def _batch_metrics(
    batch: Batch | PackedBatch,
    rows: Rows,
    policy: Float[Array, "n *r t"],
    reference_logprob: Float[Array, "p k"],
) -> dict[str, Array]:
    """What a batch and the policy's log-probs of it say, whatever is minimised.

    A response counts as often as it was drawn, but for the number of rows.
    """
    behavior, weight = rows.tokens.behavior, batch.weights
    drawn = jnp.sum(weight)

    def mean(x: Float[Array, "p k"]) -> Float[Array, ""]:
        return jnp.sum(x * weight) / drawn

    num_tokens = jnp.sum(batch.response_lengths * weight)
    group_mean = jnp.sum(batch.rewards * weight, 1) / jnp.sum(weight, 1)
    centred = batch.rewards - group_mean[:, None]
    group_variance = jnp.sum(jnp.square(centred) * weight, 1) / jnp.sum(weight, 1)
    off_policy = off_policy_stats(rows.sums(policy), rows.sums(behavior), weight)
    num_rows = jnp.sum(weight > 0).astype(jnp.float32)
    return {
        "reward_mean": mean(batch.rewards),
        "reward_std": jnp.mean(jnp.sqrt(group_variance)),
        "kl_reference": mean(rows.sums(policy * rows.tokens.counted) - reference_logprob),
        "nll_per_token": -jnp.sum(rows.sums(policy) * weight) / num_tokens,
        "response_length_mean": num_tokens / drawn,
        "response_tokens": num_tokens,
        "rows": num_rows,
        "rows_share": num_rows / weight.size,
        **off_policy._asdict(),
        "sampler_gap": largest_gap(policy, behavior, rows.is_current),
    }


def _measured(rows: Rows, policy: Float[Array, "n *r t"], beta: Float[Array, ""]) -> Measured:
    """What is known of every response, towards the target that the objective is shown."""
    tokens, responses = rows.tokens, rows.responses
    counted, weight = tokens.counted, responses.weight
    log_ratio = jnp.where(counted, policy - tokens.behavior, 0)
    is_far = (log_ratio < jnp.log(0.8)) | (log_ratio > jnp.log(1.2))
    of_policy = rows.sums(policy * counted)
    residual = of_policy - responses.reference_logprob - responses.reward / beta
    mean = jnp.sum(residual * weight, 1, keepdims=True) / jnp.sum(weight, 1, keepdims=True)
    return Measured(
        of_policy,
        rows.sums(tokens.behavior * counted),
        responses.reference_logprob,
        rows.sums(counted.astype(jnp.float32)),
        rows.sums(is_far.astype(jnp.float32)),
        residual - mean,
        responses.staleness,
        weight,
    )


def _padding_share(batch: Batch | PackedBatch, cut: Cut) -> Float[Array, ""]:
    """Of the tokens that are worked on, the part that is padding."""
    worked = cut.used * (batch.tokens.size // cut.num) if cut.num > 1 else batch.tokens.size
    return 1 - num_valid_tokens(batch) / worked
