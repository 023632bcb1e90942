# SPDX-License-Identifier: Apache-2.0
"""The train step: one jitted update of the policy.

State and batch in, state and metrics out. It does not know which objective it minimises, where
batches come from or what happens between two steps; its argument is donated, so whoever holds the
old state must not use it again. The invariant it owns: how rows are cut into micro-batches, and
whether they are padded or packed, changes neither gradient nor metrics beyond rounding.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from tba_jax.devices.sharding import BATCH_AXES
from tba_jax.flow.batch import Batch, PackedBatch
from tba_jax.models.scoring import Scoring
from tba_jax.models.shardings import ComputeSharding
from tba_jax.models.transformer import Remat, TransformerConfig
from tba_jax.train.heads import log_z
from tba_jax.train.micro_batches import gradients, num_micro_batches, score_all
from tba_jax.train.objectives.base import Loss, Objective
from tba_jax.train.off_policy import largest_gap, off_policy_stats
from tba_jax.train.rows import Responses, Rows, Tokens, make_rows, whole
from tba_jax.train.state import StepShardings, TrainState, trainable
from tba_jax.train.target import Target, tempered_target


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """The static part of a train step (hashable).

    Attributes:
        objective: what is minimised.
        target: what is trained towards.
        scoring: how policy and reference are scored.
        log_z_rate: learning rate of a learned log Z over the policy's.
        reference_reset_period: steps between reference := policy; 0: never.
        micro_batch_rows: rows whose gradients are made at a time; 0: all.
        remat: as in `transformer.apply`.
    """

    objective: Objective
    target: Target
    scoring: Scoring
    log_z_rate: float = 1.0
    reference_reset_period: int = 0
    micro_batch_rows: int = 0
    remat: Remat = "none"


def make_train_step(
    config: TransformerConfig,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    settings: StepSettings,
    shardings: StepShardings | None = None,
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    """The jitted train step; its state argument is donated.

    With `settings.micro_batch_rows` gradients are accumulated in float32 over micro-batches of as
    many rows. Where these hold whole groups, as many for each device, each row is scored once.
    Where a group is spread over several, all rows are scored without gradient first: the gradient
    by each token's log-prob (for TB its centred residual) needs the whole group, and once it is
    known the rows are independent. A row is then scored twice; the gradient is the same. A
    micro-batch takes rows from all over the batch, evenly spaced, so that rows divided over
    devices stay where they are if the rows of a micro-batch divide over them too.

    A step whose loss or gradient is not finite changes nothing but its counters.

    Args:
        config: the architecture; with adapters, the gradient is by them alone.
        optimizer, schedule: of the parameters.
        settings: objective, target, micro-batches, dtypes.
        shardings: from `step_shardings`; None: everything on one device.

    Returns:
        (state, batch) -> (state, metrics), with adapters (state, batch, base): metrics are float32
        scalars, and the base is neither changed nor donated. It raises ValueError for a batch whose
        rows the micro-batches do not divide.
    """
    compute = None if shardings is None else shardings.compute
    parts = 1 if shardings is None else math.prod(shardings.batch.mesh.shape[a] for a in BATCH_AXES)

    def train_step(
        state: TrainState, batch: Batch | PackedBatch, base: Any = None
    ) -> tuple[TrainState, dict[str, Array]]:
        rows = make_rows(batch, state.step, config, settings.scoring, settings.remat, compute, base)
        num = num_micro_batches(rows, settings.micro_batch_rows)
        beta = settings.target.beta.at(state.step)
        temperatures = settings.target.temperatures(state.step)
        rows, reference_logprob = _with_reference(rows, state, batch, num)
        rows, responses = _towards(rows, batch, reference_logprob, temperatures)
        pull_log_z = None
        if state.log_z_head is not None and not isinstance(batch, PackedBatch):
            estimate, pull_log_z = _log_z(state, batch, settings, config, compute, base)
            responses = responses._replace(log_z=estimate[:, None])
        totals = rows.totals(responses)

        def loss_of(policy: Array, tokens: Tokens, responses: Responses) -> Loss:
            return settings.objective(rows.group_data(policy, tokens, responses, totals), beta)

        policy, grads = gradients(
            rows, state.params, lambda *xs: loss_of(*xs).loss, responses, num, parts
        )
        loss = loss_of(policy, rows.tokens, responses)
        if pull_log_z is not None:
            by_log_z = jax.grad(
                lambda z: loss_of(policy, rows.tokens, responses._replace(log_z=z)).loss
            )(responses.log_z)
            through_states, of_head = pull_log_z(by_log_z[:, 0])
            grads = jax.tree.map(jnp.add, grads, through_states), of_head
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
            "skipped_steps": new_state.skipped_steps,
            "skipped_in_a_row": new_state.skipped_in_a_row,
        }
        return new_state, {f"train/{name}": value for name, value in metrics.items()}

    return _jitted(train_step, shardings)


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
    )


def _with_reference(
    rows: Rows, state: TrainState, batch: Batch | PackedBatch, num: int
) -> tuple[Rows, Float[Array, "p k"]]:
    """(rows, log pi_ref(y|x)): scored here where the state has a reference, else as stored."""
    if state.reference_params is None:
        return rows, batch.reference_logprob
    scored = score_all(rows, state.reference_params, num)
    rows = rows._replace(tokens=rows.tokens._replace(reference=scored))
    return rows, rows.sums(scored * rows.tokens.counted)


def _towards(
    rows: Rows,
    batch: Batch | PackedBatch,
    reference_logprob: Float[Array, "p k"],
    temperatures: dict[str, Float[Array, ""]],
) -> tuple[Rows, Responses]:
    """Rows and responses as the objective is shown them: with the tempered target."""
    reward, reference = batch.rewards, rows.tokens.reference
    if temperatures:
        if reference is not None:
            reference, _ = tempered_target(reference, reward, **temperatures)
        reference_logprob, reward = tempered_target(reference_logprob, reward, **temperatures)
    responses = Responses(
        reference_logprob, reward, jnp.ones_like(batch.rewards), batch.response_lengths
    )
    return rows._replace(tokens=rows.tokens._replace(reference=reference)), responses


def _log_z(
    state: TrainState,
    batch: Batch,
    settings: StepSettings,
    config: TransformerConfig,
    sharding: ComputeSharding | None,
    base: Any,
) -> tuple[Float[Array, " p"], Callable[[Array], tuple[Any, Any]]]:
    """(learned log Z of every prompt, its pull-back to parameters and head)."""
    return jax.vjp(
        lambda params, head: log_z(
            head,
            whole(base, params),
            batch.tokens,
            batch.prompt_lengths,
            response_bucket=batch.behavior_token_logprobs.shape[-1],
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
    old = trainable(state.params, state.log_z_head)
    updates: Any
    updates, opt_state = optimizer.update(grads, state.opt_state, old)
    if state.log_z_head is not None:
        # The update of every optimiser here is proportional to the learning rate.
        updates = updates[0], jax.tree.map(lambda u: settings.log_z_rate * u, updates[1])
    trained: Any = optax.apply_updates(old, updates)
    # Chosen leaf by leaf: a branch would keep the old state from being updated in place.
    trained, opt_state = jax.tree.map(
        lambda new, old: jnp.where(is_finite, new, old),
        (trained, opt_state),
        (old, state.opt_state),
    )
    params, head = (trained, None) if state.log_z_head is None else trained
    step = state.step + 1
    reference = state.reference_params
    if reference is not None and settings.reference_reset_period:
        reset = step % settings.reference_reset_period == 0
        reference = jax.tree.map(lambda r, p: jnp.where(reset, p, r), reference, params)
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


def _batch_metrics(
    batch: Batch | PackedBatch,
    rows: Rows,
    policy: Float[Array, "n t"],
    reference_logprob: Float[Array, "p k"],
) -> dict[str, Array]:
    """What a batch and the policy's log-probs of it say, whatever is minimised."""
    behavior = rows.tokens.behavior
    off_policy = off_policy_stats(rows.sums(policy), rows.sums(behavior))
    num_tokens = jnp.sum(batch.response_lengths)
    return {
        "reward_mean": jnp.mean(batch.rewards),
        "reward_std": jnp.mean(jnp.std(batch.rewards, axis=1)),
        "kl_reference": jnp.mean(rows.sums(policy * rows.tokens.counted) - reference_logprob),
        "nll_per_token": -jnp.sum(policy) / num_tokens,
        "response_length_mean": jnp.mean(batch.response_lengths.astype(jnp.float32)),
        "response_tokens": num_tokens,
        **off_policy._asdict(),
        "sampler_gap": largest_gap(policy, behavior, rows.is_current),
    }
