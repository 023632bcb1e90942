# SPDX-License-Identifier: Apache-2.0
"""The trainer of a run and what it trains with: optimizer, step settings, train state, buffer."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from tba_jax.config.resolved import allows_forks, remat_of
from tba_jax.config.schema import Config
from tba_jax.devices import xla
from tba_jax.devices.precompilation import Precompiler
from tba_jax.devices.sharding import batch_axes, placed_shapes
from tba_jax.flow.batch import Batch, PackedBatch
from tba_jax.flow.packing import Packing
from tba_jax.models import lora
from tba_jax.models.transformer import TransformerConfig, abstract_params
from tba_jax.replay.buffer import ReplayBuffer
from tba_jax.replay.outbox import Outbox
from tba_jax.replay.soft_values import SoftValues
from tba_jax.run.model_parts import make_padding, make_scoring, policy_config
from tba_jax.run.shared import Shared
from tba_jax.settings import need
from tba_jax.train.optimizers import learning_rate_schedule, make_optimizer
from tba_jax.train.state import StepShardings, TrainState, init_state, step_shardings
from tba_jax.train.step import make_train_step
from tba_jax.train.step_plan import Batches, OwnBatches, Peers
from tba_jax.train.step_settings import StepSettings
from tba_jax.train.target import Target
from tba_jax.train.trainer import Trainer
from tba_jax.weights.transport import Transport


def make_step_settings(
    config: Config, eos_ids: tuple[int, ...], mesh: Mesh | None = None
) -> StepSettings:
    """Return the settings of the train step.

    Args:
        config: config of the run.
        eos_ids: end tokens of the tokenizer.
        mesh: mesh of the trainer; None: as `config.mesh`.

    Raises:
        ConfigError: the objective needs token log-probs of the reference, but searchers store sums.
    """
    o, objective = config.objective, config.objective.built
    need(
        not objective.needs_token_reference or config.reference.placement == "trainer",
        "reference.placement",
        config.reference.placement,
        f"objective.name={o.name} reads the reference token by token, and searchers keep sums",
        "Set --config.reference.placement=trainer.",
    )
    return StepSettings(
        objective=objective,
        target=Target(
            o.beta.over(config.num_steps),
            o.reference_temperature.over(config.num_steps),
            o.reward_temperature.over(config.num_steps),
        ),
        scoring=make_scoring(config, eos_ids),
        log_z_rate=objective.log_z_rate,
        reference_reset_period=config.reference.reset_period,
        reference_ema_decay=config.reference.ema_decay,
        optimizer_reset_period=config.optimizer.reset_period,
        micro_batch_rows=micro_batch_rows(config),
        row_multiple=_row_parts(config, mesh) * objective.minibatches,
        is_whole=groups_stay_whole(config),
        remat=remat_of(config),
        epochs=objective.epochs,
        minibatches=objective.minibatches,
        shows_tokens=True,
        rounding_seed=config.seed if config.optimizer.rounding == "stochastic" else None,
    )


def make_optimizer_from(config: Config) -> tuple[Any, Any]:
    """Return (optax transformation, learning-rate schedule) of a config.

    The schedule counts steps; all updates of a step have the rate of the step.
    """
    schedule = learning_rate_schedule(config.optimizer.learning_rate, config.num_steps)
    num_updates = config.objective.built.num_updates
    of_update = schedule if num_updates == 1 else lambda count: schedule(count // num_updates)
    return make_optimizer(config.optimizer, of_update), schedule


def micro_batch_rows(config: Config) -> int:
    """Return the responses of a micro-batch; 0 (all at once) where a batch is not larger."""
    wanted = config.batch.micro_batch_rows
    return wanted if wanted < config.batch.num_prompts * config.objective.group_size else 0


def groups_stay_whole(config: Config) -> bool:
    """Return whether micro-batches hold whole groups, so that rows are scored once.

    The paths of forked episodes can need more rows than a micro-batch has.
    """
    return micro_batch_rows(config) >= config.objective.group_size and not allows_forks(config)


def make_packing(config: Config, pad_id: int, mesh: Mesh | None = None) -> Packing:
    """Return how draws become the rows of a batch.

    Args:
        config: config of the run.
        pad_id: padding token of the tokenizer.
        mesh: mesh of the trainer; None: as `config.mesh`.
    """
    objective = config.objective.built
    return Packing(
        num_prompts=config.batch.num_prompts,
        group_size=config.objective.group_size,
        padding=make_padding(config, pad_id),
        policy_temperature=config.search.sampling_temperature,
        row_length=config.batch.packed_length,
        shares_prompts=config.batch.share_prompts,
        row_multiple=_row_parts(config, mesh) * objective.minibatches,
        micro_batch_rows=micro_batch_rows(config),
        is_whole=groups_stay_whole(config),
        has_prompts="log_z" in objective.heads,
        has_soft_values=objective.needs_soft_value,
        has_advantages=objective.needs_advantages,
        has_equal_weights=config.objective.weights == "equal" and not objective.needs_behavior,
    )


def _row_parts(config: Config, mesh: Mesh | None) -> int:
    """Return the number of devices that share the rows of a batch."""
    if mesh is None:
        return config.mesh.data * config.mesh.fsdp * config.mesh.expert
    return math.prod(mesh.shape[axis] for axis in batch_axes(mesh))


def make_step_shardings(
    config: Config, model_config: TransformerConfig, mesh: Mesh
) -> StepShardings:
    """Return the shardings of train state and batches, and the compiler options of the step.

    Raises:
        ValueError: the mesh does not divide the model.
        ConfigError: the compiler does not have an option of `config.xla`.
    """
    optimizer, _ = make_optimizer_from(config)
    options = xla.compiler_options(config.xla, list(mesh.devices.flat))
    return step_shardings(
        policy_config(config, model_config),
        optimizer,
        mesh,
        keep_reference=config.reference.placement == "trainer",
        log_z_layers=_log_z_layers(config),
        offload=config.optimizer.offload,
        num_prompts=config.batch.num_prompts,
    )._replace(compiler_options=options)


def _log_z_layers(config: Config) -> int:
    """Return the layers of the head of log Z or of values; 0 without a head."""
    objective = config.objective.built
    return objective.log_z_layers if objective.heads else 0


def abstract_state(config: Config, model_config: TransformerConfig, mesh: Mesh) -> TrainState:
    """Return shapes, dtypes and shardings of the train state, for restoring a checkpoint.

    Args:
        config: config of the run.
        model_config: the architecture.
        mesh: any mesh with the axes `sharding.MESH_AXES`.
    """
    optimizer, _ = make_optimizer_from(config)
    keep_reference = config.reference.placement == "trainer"
    log_z_layers = _log_z_layers(config)
    policy = policy_config(config, model_config)
    if policy.adapters is None:
        params = abstract_params(policy, jnp.dtype(config.model.param_dtype))
    else:
        params = lora.abstract_adapters(policy)
    shapes = jax.eval_shape(
        functools.partial(
            init_state,
            optimizer=optimizer,
            keep_reference=keep_reference,
            log_z_size=model_config.hidden_size if log_z_layers else 0,
            log_z_layers=log_z_layers,
        ),
        params,
    )
    return placed_shapes(shapes, make_step_shardings(config, model_config, mesh).state)


def make_buffer(config: Config) -> ReplayBuffer:
    """Return an empty replay buffer with the settings of a run."""
    settings = dataclasses.replace(config.replay, pace=_pace(config))
    return ReplayBuffer(settings, config.seed, make_soft_values(config))


def make_soft_values(config: Config) -> SoftValues | None:
    """Return the cache of soft values; None for objectives without it."""
    objective = config.objective.built
    if not objective.needs_soft_value:
        return None
    temperature = objective.value_temperature or config.objective.beta.start
    return SoftValues(temperature, config.search.sampling_temperature)


def _pace(config: Config) -> Literal["off", "trainer"]:
    """Return replay.pace, or "off" where waiting for fresh responses could never end.

    With driver=sync the trainer would wait for its own thread. With an exact lag all responses that
    this step may use are already merged.
    """
    waits = config.driver == "async" and not config.search.exact_lag
    return config.replay.pace if waits else "off"


class StepProgram(NamedTuple):
    """The jitted train step of a run with the shardings of its arguments."""

    program: Any
    shardings: StepShardings


def make_step_program(shared: Shared) -> StepProgram:
    """Return the jitted train step; compilation happens later."""
    config = shared.config
    shardings = make_step_shardings(config, shared.model.config, shared.sites.trainer.mesh)
    optimizer, schedule = make_optimizer_from(config)
    settings = make_step_settings(config, shared.tokenizer.eos_ids, shared.sites.trainer.mesh)
    program = make_train_step(shared.policy, optimizer, schedule, settings, shardings)
    return StepProgram(program, shardings)


def build_trainer(
    shared: Shared,
    *,
    step: StepProgram,
    ahead: Precompiler,
    state: TrainState,
    base: Any,
    buffer: ReplayBuffer,
    batches: Batches,
    outboxes: Sequence[Outbox],
    transport: Transport,
    log_event: Callable[[Mapping[str, Any]], None],
) -> Trainer:
    """Build the trainer of a process.

    Args:
        shared: parts of the run.
        step: the train step.
        ahead: background compiler of the train step.
        state: the train state; the trainer donates it.
        base: frozen parameters under adapters; None without adapters.
        buffer, batches, outboxes, transport, log_event: as in `Trainer`.
    """
    program = shared.sites.trainer.locked(step.program)
    is_alone = shared.cluster.num_processes == 1
    frozen = () if base is None else (base,)

    def train_step(
        state: TrainState, batch: Batch | PackedBatch
    ) -> tuple[TrainState, dict[str, Array]]:
        ahead.wait(step_job(batch))
        shardings = step.shardings.of_batch(batch)
        if is_alone:
            placed = jax.device_put(batch, shardings)
        else:  # Every process has all rows; each device copies its own.
            placed = jax.tree.map(_from_whole, batch, shardings)
        return program(state, placed, *frozen)

    return Trainer(
        state=state,
        train_step=train_step,
        buffer=buffer,
        outboxes=outboxes,
        transport=transport,
        batches=batches,
        log_event=log_event,
        clock=shared.clock,
    )


def own_batches(shared: Shared, buffer: ReplayBuffer, peers: Peers) -> OwnBatches:
    """Return the source of batches in the process that owns the buffer.

    Args:
        shared: parts of the run.
        buffer: the replay buffer.
        peers: the other trainer processes.
    """
    config = shared.config
    return OwnBatches(
        buffer,
        make_packing(config, shared.tokenizer.pad_id, shared.sites.trainer.mesh),
        num_steps=config.num_steps,
        sync_period=config.sync_period,
        checkpoint_period=config.checkpoint.period,
        # Without newer weights a strict bound would admit no tickets, and no step would follow.
        needs_versions=config.replay.late == "wait",
        peers=peers,
    )


def step_job(batch: Batch | PackedBatch) -> tuple[str, tuple[int, ...]]:
    """Return the name of the job that compiles the train step for this batch."""
    return "train_step", (*batch.tokens.shape, *batch.slots.shape)


def _from_whole(array: np.ndarray, sharding: jax.sharding.Sharding) -> Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
