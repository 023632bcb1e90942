# SPDX-License-Identifier: Apache-2.0
"""The train step: train state, and one jitted update of the policy.

State and batch in, state and metrics out. It does not know where batches come from or what happens
between two steps; its argument is donated, so whoever holds the old state must not use it again.
The invariant it owns: how rows are cut into micro-batches, and whether they are padded or packed,
changes neither gradient nor metrics beyond rounding.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float

from tba_jax.devices.sharding import BATCH_AXES, shardings_like
from tba_jax.flow.batch import Batch, PackedBatch
from tba_jax.models import lora
from tba_jax.models.logprobs import packed_token_logprobs, response_mask, token_logprobs
from tba_jax.models.scoring import Scoring
from tba_jax.models.shardings import ComputeSharding, param_shardings
from tba_jax.models.transformer import Remat, TransformerConfig, abstract_params
from tba_jax.train import objectives
from tba_jax.train.heads import LogZHead, init_head, log_z
from tba_jax.train.micro_batches import Rows, gradients, num_micro_batches, score_all
from tba_jax.train.schedules import Schedule


class TrainState(NamedTuple):
    """Everything a train step reads and writes on the device.

    Attributes:
        step: int32, train steps done, skipped ones included.
        params: what is trained: the parameters of the policy, or its adapters alone.
        opt_state: optax state.
        reference_params: like `params`, of the reference where the trainer scores it, else None.
        skipped_steps: int32, steps whose loss or gradient was not finite; they changed nothing.
        skipped_in_a_row: int32, how many of the last steps were skipped.
        log_z_head: the learned log Z, where there is one; trained as part of the policy.
    """

    step: Array
    params: Any
    opt_state: Any
    reference_params: Any
    skipped_steps: Array
    skipped_in_a_row: Array
    log_z_head: LogZHead | None = None


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """The static part of a train step (hashable).

    Attributes:
        objective: its name.
        beta: KL coefficient.
        scoring: how policy and reference are scored.
        scale: as in `objectives.tb_loss`.
        reference_temperature, reward_temperature: as in `objectives.tempered_target`.
        log_z_rate: learning rate of a learned log Z over the policy's.
        reference_reset_period: steps between reference := policy; 0: never.
        micro_batch_rows: rows whose gradients are made at a time; 0: all.
        remat: as in `transformer.apply`.
    """

    objective: str
    beta: Schedule
    scoring: Scoring
    scale: Literal["advantage", "paper"] = "advantage"
    reference_temperature: Schedule = Schedule(1.0)
    reward_temperature: Schedule = Schedule(1.0)
    log_z_rate: float = 1.0
    reference_reset_period: int = 0
    micro_batch_rows: int = 0
    remat: Remat = "none"

    @property
    def is_tempered(self) -> bool:
        """Whether the target is ever another than pi_ref exp(r / beta)."""
        temperatures = (self.reference_temperature, self.reward_temperature)
        return not all(x.is_always(1.0) for x in temperatures)


class StepShardings(NamedTuple):
    """Where everything a train step touches lies on the trainer's mesh.

    Attributes:
        state: a NamedSharding for each array of the train state.
        batch: of every array of a batch.
        replicated: of the metrics.
        compute: how the step uses divided parameters; None on a mesh of one device.
        base: of the frozen parameters beside adapters; None where all are trained.
        log_z_size: as in `init_state`.
    """

    state: TrainState
    batch: NamedSharding
    replicated: NamedSharding
    compute: ComputeSharding | None
    base: Any = None
    log_z_size: int = 0


def step_shardings(
    config: TransformerConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    keep_reference: bool,
    learn_log_z: bool = False,
) -> StepShardings:
    """The shardings of a train step: parameters by the table, what belongs to them likewise.

    Args:
        config: the architecture; with adapters, they alone are the state's parameters.
        optimizer: whose state is placed.
        mesh: the trainer's, with the axes `sharding.MESH_AXES`.
        keep_reference: the state holds a reference.
        learn_log_z: it holds a learned log Z.

    Raises:
        ValueError: the mesh does not divide the model.
    """
    params, shardings, base = abstract_params(config), param_shardings(config, mesh), None
    if config.adapters is not None:
        (_, params), (base, shardings) = lora.split(params), lora.split(shardings)
    shapes = jax.eval_shape(
        functools.partial(
            init_state,
            optimizer=optimizer,
            keep_reference=keep_reference,
            log_z_size=config.hidden_size if learn_log_z else 0,
        ),
        params,
    )
    return StepShardings(
        state=shardings_like(shapes, params, shardings, mesh),
        batch=NamedSharding(mesh, PartitionSpec(BATCH_AXES)),
        replicated=NamedSharding(mesh, PartitionSpec()),
        compute=ComputeSharding(config, mesh) if mesh.size > 1 else None,
        base=base,
        log_z_size=config.hidden_size if learn_log_z else 0,
    )


def make_init_state(
    optimizer: optax.GradientTransformation, shardings: StepShardings
) -> Callable[[Any], TrainState]:
    """Jitted `init_state` for parameters that lie as `shardings.state` says; they are donated.

    Moments are made where they belong, never whole on one device.
    """
    return jax.jit(
        functools.partial(
            init_state,
            optimizer=optimizer,
            keep_reference=shardings.state.reference_params is not None,
            log_z_size=shardings.log_z_size,
        ),
        donate_argnums=0,
        in_shardings=(shardings.state.params,),
        out_shardings=shardings.state,
    )


def init_state(
    params: Any,
    optimizer: optax.GradientTransformation,
    *,
    keep_reference: bool,
    log_z_size: int = 0,
) -> TrainState:
    """Fresh state at step 0; the reference, where kept, is a copy of the policy.

    Args:
        params: what is trained.
        optimizer: of it.
        keep_reference: keep one.
        log_z_size: hidden size of the model where log Z is learned, else 0.
    """
    reference = jax.tree.map(jnp.copy, params) if keep_reference else None
    head = init_head(log_z_size) if log_z_size else None
    opt_state = optimizer.init(_trainable(params, head))
    # Three arrays: one could not be donated three times.
    counts = [jnp.int32(0) for _ in range(3)]
    return TrainState(counts[0], params, opt_state, reference, counts[1], counts[2], head)


def _trainable(params: Any, head: LogZHead | None) -> Any:
    """What the optimiser moves; without a head the tree is that of the policy."""
    return params if head is None else (params, head)


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
        settings: objective, schedules, micro-batches, dtypes.
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
        rows = _rows(batch, state.step, config, settings, compute, base)
        num = num_micro_batches(rows, settings.micro_batch_rows)
        beta = settings.beta.at(state.step)
        if state.reference_params is None:
            reference_logprob = batch.reference_logprob
        else:
            scored = score_all(rows, state.reference_params, num)
            reference_logprob = rows.sums(scored * rows.counted)

        log_z_estimate, pull_log_z = (), None
        if state.log_z_head is not None and not isinstance(batch, PackedBatch):
            estimate, pull_log_z = jax.vjp(
                lambda params, head: _log_z(
                    _whole(base, params), head, batch, settings, config, compute
                ),
                state.params,
                state.log_z_head,
            )
            log_z_estimate = (estimate[:, None],)
        target, temperatures = (reference_logprob, batch.rewards), {}
        if settings.is_tempered:
            temperatures = {
                "reference_temperature": settings.reference_temperature.at(state.step),
                "reward_temperature": settings.reward_temperature.at(state.step),
            }
            target = objectives.tempered_target(*target, **temperatures)
        groups = (*target, *log_z_estimate)

        def objective(
            policy: Array, reference: Array, rewards: Array, *log_z: Array
        ) -> objectives.Loss:
            if settings.objective == "tb":
                return objectives.tb_loss(
                    policy,
                    reference,
                    rewards,
                    beta=beta,
                    scale=settings.scale,
                    log_z=log_z[0][:, 0] if log_z else None,
                )
            baselines = {"rloo": objectives.rloo_loss, "online_dpo": objectives.online_dpo_loss}
            return baselines[settings.objective](policy, reference, rewards, beta=beta)

        policy_token_logprobs, grads = gradients(rows, state.params, objective, groups, num, parts)
        counted = rows.sums(policy_token_logprobs * rows.counted)
        loss = objective(counted, *groups)
        if pull_log_z is not None:
            by_log_z = jax.grad(lambda z: objective(counted, *target, z).loss)(*log_z_estimate)
            through_states, of_head = pull_log_z(by_log_z[:, 0])
            grads = jax.tree.map(jnp.add, grads, through_states), of_head
        grad_norm = optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), grads))
        is_finite = jnp.isfinite(loss.loss) & jnp.isfinite(grad_norm)
        old = _trainable(state.params, state.log_z_head)
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

        off_policy = objectives.off_policy_stats(
            rows.sums(policy_token_logprobs), rows.sums(rows.behavior)
        )
        num_tokens = jnp.sum(batch.response_lengths)
        metrics = {
            "train/loss": loss.loss,
            "train/tb_loss": loss.tb_loss,
            "train/log_z": jnp.mean(loss.log_z),
            "train/residual_std": jnp.sqrt(
                jnp.mean(jnp.square(loss.residual + loss.log_z[:, None]))
            ),
            "train/reward_mean": jnp.mean(batch.rewards),
            "train/reward_std": jnp.mean(jnp.std(batch.rewards, axis=1)),
            "train/grad_norm": grad_norm,
            # A skipped step does not move the optimiser along its schedule.
            "train/lr": schedule(state.step - state.skipped_steps),
            "train/beta": beta,
            **{f"train/{name}": value for name, value in temperatures.items()},
            "train/kl_reference": jnp.mean(counted - reference_logprob),
            "train/nll_per_token": -jnp.sum(policy_token_logprobs) / num_tokens,
            "train/response_length_mean": jnp.mean(batch.response_lengths.astype(jnp.float32)),
            "train/response_tokens": num_tokens,
            "train/ess_fraction": off_policy.ess_fraction,
            "train/log_ratio_p05": off_policy.log_ratio_p05,
            "train/log_ratio_p50": off_policy.log_ratio_p50,
            "train/log_ratio_p95": off_policy.log_ratio_p95,
            "train/skipped_steps": new_state.skipped_steps,
            "train/skipped_in_a_row": new_state.skipped_in_a_row,
            # Largest |trainer - sampler| log-prob per token over rows drawn by this very version;
            # nan when the batch holds none. Anything above rounding means two definitions.
            "train/sampler_gap": _largest_gap(
                policy_token_logprobs, rows.behavior, rows.is_current
            ),
        }
        return new_state, metrics

    if shardings is None:
        return jax.jit(train_step, donate_argnums=0)
    base = () if shardings.base is None else (shardings.base,)
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(shardings.state, shardings.batch, *base),
        out_shardings=(shardings.state, shardings.replicated),
    )


def _log_z(
    params: Any,
    head: LogZHead,
    batch: Batch,
    settings: StepSettings,
    config: TransformerConfig,
    sharding: ComputeSharding | None,
) -> Float[Array, " p"]:
    return log_z(
        head,
        params,
        batch.tokens,
        batch.prompt_lengths,
        response_bucket=batch.behavior_token_logprobs.shape[-1],
        config=config,
        compute_dtype=jnp.dtype(settings.scoring.compute_dtype),
        remat=settings.remat,
        sharding=sharding,
    )


def _whole(base: Any, params: Any) -> Any:
    return params if base is None else lora.combine(base, params)


def _rows(
    batch: Batch | PackedBatch,
    step: Array,
    config: TransformerConfig,
    settings: StepSettings,
    sharding: ComputeSharding | None,
    base: Any,
) -> Rows:
    scoring: Any = {
        "config": config,
        "scoring": settings.scoring,
        "remat": settings.remat,
        "sharding": sharding,
    }
    if isinstance(batch, PackedBatch):
        rows = _packed_rows(batch, step, scoring, settings)
    else:
        rows = _padded_rows(batch, step, scoring, settings)
    # What is trained is all of the parameters, or the adapters that complete them.
    return rows._replace(score=lambda trained, x: rows.score(_whole(base, trained), x))


def _padded_rows(batch: Batch, step: Array, scoring: Any, settings: StepSettings) -> Rows:
    p, k, t = batch.behavior_token_logprobs.shape
    mask = response_mask(batch.tokens[..., -t:], batch.response_lengths, settings.scoring)

    def flat(x: Array) -> Array:
        return x.reshape(p * k, *x.shape[2:])

    def score(params: Any, inputs: tuple[Array, Array, Array]) -> Float[Array, "m t"]:
        # To the log-probs every row is a prompt of its own.
        one_each = (x[:, None] for x in inputs)
        return token_logprobs(params, *one_each, response_bucket=t, **scoring)[:, 0]

    return Rows(
        inputs=(flat(batch.tokens), flat(batch.prompt_lengths), flat(batch.response_lengths)),
        score=score,
        counted=flat(mask),
        behavior=flat(batch.behavior_token_logprobs),
        is_current=flat(batch.versions == step)[:, None],
        sums=lambda values: jnp.sum(values, axis=-1).reshape(-1, k),
        rows_per_prompt=k,
    )


def _packed_rows(batch: PackedBatch, step: Array, scoring: Any, settings: StepSettings) -> Rows:
    shape = batch.rewards.shape
    sequence = jnp.maximum(batch.segments - 1, 0)
    prompt_lengths = batch.prompt_lengths.reshape(-1)[sequence]
    is_response = (batch.segments > 0) & (batch.positions >= prompt_lengths)
    counted = is_response
    if settings.scoring.mask_eos:
        counted = counted & ~jnp.isin(batch.tokens, jnp.array(settings.scoring.eos_ids, jnp.int32))

    def score(params: Any, inputs: tuple[Array, ...]) -> Float[Array, "m s"]:
        *rows, is_response = inputs
        return jnp.where(is_response, packed_token_logprobs(params, *rows, **scoring), 0.0)

    def sums(values: Array) -> Float[Array, "p k"]:
        of_sequences = jax.ops.segment_sum(
            values.reshape(-1), batch.segments.reshape(-1), num_segments=batch.rewards.size + 1
        )
        return of_sequences[1:].reshape(shape)

    return Rows(
        inputs=(batch.tokens, batch.segments, batch.positions, is_response),
        score=score,
        counted=counted,
        behavior=batch.behavior_token_logprobs,
        is_current=is_response & (batch.versions == step).reshape(-1)[sequence],
        sums=sums,
        rows_per_prompt=0,
    )


def _largest_gap(
    policy: Float[Array, "n t"], behavior: Float[Array, "n t"], is_current: Bool[Array, "n t"]
) -> Float[Array, ""]:
    gap = jnp.max(jnp.where(is_current, jnp.abs(policy - behavior), -jnp.inf))
    return jnp.where(gap >= 0, gap, jnp.nan)
