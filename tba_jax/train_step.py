# SPDX-License-Identifier: Apache-2.0
"""The train step: train state, optimiser, schedules, and one jitted update of the policy.

State and batch in, state and metrics out. It does not know where batches come from or what happens
between two steps; its argument is donated, so whoever holds the old state must not use it again.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from tba_jax import objectives
from tba_jax.logprobs import response_mask, token_logprobs
from tba_jax.models.shardings import ComputeSharding, param_shardings
from tba_jax.models.transformer import TransformerConfig, abstract_params
from tba_jax.sharding import BATCH_AXES, shardings_like
from tba_jax.trajectory import Batch


class TrainState(NamedTuple):
    """Everything a train step reads and writes on the device.

    Attributes:
        step: int32, optimiser updates done.
        params: policy parameters.
        opt_state: optax state.
        reference_params: reference parameters where the trainer scores them, else None.
    """

    step: Array
    params: Any
    opt_state: Any
    reference_params: Any


class StepSettings(NamedTuple):
    """The static part of a train step (hashable): objective, schedules, masks, dtypes."""

    objective: str
    scale: str
    beta: float
    beta_schedule: str
    beta_final: float
    beta_steps: int
    beta_jump_step: int
    mask_eos: bool
    eos_ids: tuple[int, ...]
    temperature: float
    reference_reset_period: int
    compute_dtype: str
    logprob_chunk_tokens: int
    remat: bool


def learning_rate_schedule(
    *,
    schedule: str,
    learning_rate: float,
    warmup_steps: int,
    stable_steps: int,
    decay_steps: int,
    num_steps: int,
) -> optax.Schedule:
    """Learning rate as a function of the step.

    constant; linear and cosine: to 0; wsd: stable, then, cosine decay to 0 over `decay_steps`
    (a horizon beyond the last step leaves the rate above 0, as in the paper's Figure 1 run).

    References:
        TBA, arXiv:2503.18929, appendix B.1.
    """

    def warmup(step: Any) -> Any:
        # From one part in warmup_steps, not from 0, which would waste the first batch.
        return learning_rate * (step + 1) / max(1, warmup_steps)

    left = max(1, num_steps - warmup_steps)
    if schedule == "constant":
        after: optax.Schedule = optax.constant_schedule(learning_rate)
    elif schedule == "linear":
        after = optax.linear_schedule(learning_rate, 0.0, decay_steps or left)
    elif schedule == "cosine":
        after = optax.cosine_decay_schedule(learning_rate, decay_steps or left)
    else:
        after = optax.join_schedules(
            [
                optax.constant_schedule(learning_rate),
                optax.cosine_decay_schedule(learning_rate, decay_steps),
            ],
            [stable_steps],
        )
    return optax.join_schedules([warmup, after], [warmup_steps]) if warmup_steps else after


def make_optimizer(
    schedule: optax.Schedule,
    *,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    clip_norm: float,
) -> optax.GradientTransformation:
    """AdamW, after clipping by global norm where `clip_norm` > 0; decay on matrices only."""

    def is_matrix(params: Any) -> Any:
        # Stacked layers add a leading axis, so norm scales and biases have two axes and their names
        # tell them apart.
        def decide(path: Any, x: Array) -> bool:
            name = jax.tree_util.keystr(path)
            return x.ndim >= 2 and not any(word in name for word in ("norm", "bias"))

        return jax.tree_util.tree_map_with_path(decide, params)

    adamw = optax.adamw(schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=is_matrix)
    return optax.chain(optax.clip_by_global_norm(clip_norm), adamw) if clip_norm else adamw


class StepShardings(NamedTuple):
    """Where everything a train step touches lies on the trainer's mesh.

    Attributes:
        state: a NamedSharding for each array of the train state.
        batch: of every array of a batch.
        replicated: of the metrics.
        compute: how the step uses divided parameters; None on a mesh of one device.
    """

    state: TrainState
    batch: NamedSharding
    replicated: NamedSharding
    compute: ComputeSharding | None


def step_shardings(
    config: TransformerConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    keep_reference: bool,
) -> StepShardings:
    """The shardings of a train step: parameters by the table, what belongs to them likewise.

    Args:
        config: the architecture.
        optimizer: whose state is placed.
        mesh: the trainer's, with the axes `sharding.MESH_AXES`.
        keep_reference: the state holds a reference.

    Raises:
        ValueError: the mesh does not divide the model.
    """
    params = abstract_params(config)
    shapes = jax.eval_shape(
        functools.partial(init_state, optimizer=optimizer, keep_reference=keep_reference), params
    )
    return StepShardings(
        state=shardings_like(shapes, params, param_shardings(config, mesh), mesh),
        batch=NamedSharding(mesh, PartitionSpec(BATCH_AXES)),
        replicated=NamedSharding(mesh, PartitionSpec()),
        compute=ComputeSharding(config, mesh) if mesh.size > 1 else None,
    )


def make_init_state(
    optimizer: optax.GradientTransformation, shardings: StepShardings
) -> Callable[[Any], TrainState]:
    """Jitted `init_state` for parameters that lie as `shardings.state` says; they are donated.

    Moments are made where they belong, never whole on one device.
    """
    keep_reference = shardings.state.reference_params is not None
    return jax.jit(
        functools.partial(init_state, optimizer=optimizer, keep_reference=keep_reference),
        donate_argnums=0,
        in_shardings=(shardings.state.params,),
        out_shardings=shardings.state,
    )


def init_state(
    params: Any, optimizer: optax.GradientTransformation, *, keep_reference: bool
) -> TrainState:
    """Fresh state at step 0; the reference, where kept, is a copy of the policy."""
    reference = jax.tree.map(jnp.copy, params) if keep_reference else None
    return TrainState(jnp.int32(0), params, optimizer.init(params), reference)


def make_train_step(
    config: TransformerConfig,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    settings: StepSettings,
    shardings: StepShardings | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]:
    """The jitted train step; its state argument is donated.

    Args:
        config: the architecture.
        optimizer, schedule: from `make_optimizer`.
        settings: objective, schedules, dtypes.
        shardings: from `step_shardings`; None: everything on one device.

    Returns:
        (state, batch) -> (state, metrics): metrics are float32 scalars.
    """
    compute_dtype = jnp.dtype(settings.compute_dtype)
    compute = None if shardings is None else shardings.compute

    def logprobs(params: Any, batch: Batch) -> Float[Array, "p k t"]:
        return token_logprobs(
            params,
            batch.tokens,
            batch.prompt_lengths,
            batch.response_lengths,
            response_bucket=batch.behavior_token_logprobs.shape[-1],
            config=config,
            temperature=settings.temperature,
            compute_dtype=compute_dtype,
            chunk_tokens=settings.logprob_chunk_tokens,
            remat=settings.remat,
            sharding=compute,
        )

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        t = batch.behavior_token_logprobs.shape[-1]
        mask = response_mask(
            batch.tokens[..., -t:],
            batch.response_lengths,
            eos_ids=settings.eos_ids,
            mask_eos=settings.mask_eos,
        )
        beta = objectives.beta_at(
            state.step,
            schedule=settings.beta_schedule,
            beta=settings.beta,
            beta_final=settings.beta_final,
            beta_steps=settings.beta_steps,
            beta_jump_step=settings.beta_jump_step,
        )
        if state.reference_params is None:
            reference_logprob = batch.reference_logprob
        else:
            reference_logprob = jnp.sum(logprobs(state.reference_params, batch) * mask, axis=-1)

        def loss_fn(params: Any) -> tuple[Array, tuple[objectives.Loss, Array]]:
            policy_token_logprobs = logprobs(params, batch)
            policy_logprob = jnp.sum(policy_token_logprobs * mask, axis=-1)
            if settings.objective == "tb":
                loss = objectives.tb_loss(
                    policy_logprob,
                    reference_logprob,
                    batch.rewards,
                    beta=beta,
                    scale="paper" if settings.scale == "paper" else "advantage",
                )
            else:
                loss = objectives.rloo_loss(
                    policy_logprob, reference_logprob, batch.rewards, beta=beta
                )
            return loss.loss, (loss, policy_token_logprobs)

        (_, (loss, policy_token_logprobs)), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            state.params
        )
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        step = state.step + 1
        reference = state.reference_params
        if reference is not None and settings.reference_reset_period:
            reset = step % settings.reference_reset_period == 0
            reference = jax.tree.map(lambda r, p: jnp.where(reset, p, r), reference, params)

        policy_logprob = jnp.sum(policy_token_logprobs, axis=-1)
        behavior_logprob = jnp.sum(batch.behavior_token_logprobs, axis=-1)
        off_policy = objectives.off_policy_stats(policy_logprob, behavior_logprob)
        counted = jnp.sum(policy_token_logprobs * mask, axis=-1)
        num_tokens = jnp.sum(batch.response_lengths)
        grad_norm = optax.tree.norm(grads)
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
            "train/lr": schedule(state.step),
            "train/beta": beta,
            "train/kl_reference": jnp.mean(counted - reference_logprob),
            "train/nll_per_token": -jnp.sum(policy_token_logprobs) / num_tokens,
            "train/response_length_mean": jnp.mean(batch.response_lengths.astype(jnp.float32)),
            "train/response_tokens": num_tokens,
            "train/ess_fraction": off_policy.ess_fraction,
            "train/log_ratio_p05": off_policy.log_ratio_p05,
            "train/log_ratio_p50": off_policy.log_ratio_p50,
            "train/log_ratio_p95": off_policy.log_ratio_p95,
            "train/nonfinite": (~(jnp.isfinite(loss.loss) & jnp.isfinite(grad_norm))).astype(
                jnp.int32
            ),
            # Largest |trainer - sampler| log-prob per token over rows drawn by this very version;
            # nan when the batch holds none. Anything above rounding means two definitions.
            "train/sampler_gap": _gap_at_staleness_0(
                policy_token_logprobs, batch.behavior_token_logprobs, batch.versions, state.step
            ),
        }
        return TrainState(step, params, opt_state, reference), metrics

    if shardings is None:
        return jax.jit(train_step, donate_argnums=0)
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(shardings.state, shardings.batch),
        out_shardings=(shardings.state, shardings.replicated),
    )


def _gap_at_staleness_0(
    policy: Float[Array, "p k t"], behavior: Float[Array, "p k t"], versions: Array, step: Array
) -> Float[Array, ""]:
    current = (versions == step)[..., None]
    gap = jnp.max(jnp.where(current, jnp.abs(policy - behavior), -jnp.inf))
    return jnp.where(gap >= 0, gap, jnp.nan)
