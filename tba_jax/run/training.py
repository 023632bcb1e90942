# SPDX-License-Identifier: Apache-2.0
"""What a run trains with as its config asks for it: optimizer, step settings, train state."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tba_jax.config.schema import Config
from tba_jax.flow.packing import Packing, row_buckets
from tba_jax.models import lora
from tba_jax.models.transformer import TransformerConfig, abstract_params
from tba_jax.run.modeling import make_padding, make_scoring, policy_config
from tba_jax.settings import need
from tba_jax.train.objectives.registry import make_objective
from tba_jax.train.optimizers import learning_rate_schedule, make_optimizer
from tba_jax.train.schedules import Schedule
from tba_jax.train.state import StepShardings, TrainState, init_state, step_shardings
from tba_jax.train.step import StepSettings
from tba_jax.train.target import Target


def make_step_settings(config: Config, eos_ids: tuple[int, ...]) -> StepSettings:
    """The settings of the training step.

    Raises:
        ConfigError: the objective reads more of the reference than its placement gives.
    """
    o = config.objective

    def line(start: float, final: float, steps: int) -> Schedule:
        return Schedule(start, final, steps, "linear" if steps else "constant")

    objective = make_objective(o)
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
            Schedule(o.beta, o.beta_final, o.beta_steps, o.beta_schedule, o.beta_jump_step),
            line(
                o.reference_temperature,
                o.reference_temperature_final,
                o.reference_temperature_steps,
            ),
            line(o.reward_temperature, o.reward_temperature_final, o.reward_temperature_steps),
        ),
        scoring=make_scoring(config, eos_ids),
        log_z_rate=o.log_z_rate,
        reference_reset_period=config.reference.reset_period,
        micro_batch_rows=config.batch.micro_batch_rows,
        remat=config.model.remat,
    )


def make_optimizer_from(config: Config) -> tuple[Any, Any]:
    """(optax transformation, learning-rate schedule) of a config."""
    o = config.optimizer
    schedule = learning_rate_schedule(
        schedule=o.schedule,
        learning_rate=o.learning_rate,
        warmup_steps=o.warmup_steps,
        stable_steps=o.stable_steps,
        decay_steps=o.decay_steps,
        num_steps=config.num_steps,
    )
    optimizer = make_optimizer(
        o.name,
        schedule,
        b1=o.b1,
        b2=o.b2,
        eps=o.eps,
        weight_decay=o.weight_decay,
        clip_norm=o.clip_norm,
    )
    return optimizer, schedule


def make_packing(config: Config, pad_id: int) -> Packing:
    """How the trainer's draws become a batch."""
    return Packing(
        make_padding(config, pad_id),
        config.search.sampling_temperature,
        config.batch.packed_length,
        packed_row_buckets(config),
    )


def packed_row_buckets(config: Config) -> tuple[int, ...]:
    """Numbers of packed rows that the train step is compiled for, ascending."""
    return row_buckets(
        config.batch.num_prompts * config.objective.group_size,
        config.batch.micro_batch_rows or config.mesh.data * config.mesh.fsdp,
    )


def make_step_shardings(
    config: Config, model_config: TransformerConfig, mesh: Mesh
) -> StepShardings:
    """Where train state and batches lie on the trainer's mesh.

    Raises:
        ValueError: the mesh does not divide the model.
    """
    optimizer, _ = make_optimizer_from(config)
    return step_shardings(
        policy_config(config, model_config),
        optimizer,
        mesh,
        keep_reference=config.reference.placement == "trainer",
        learn_log_z="log_z" in make_objective(config.objective).heads,
    )


def abstract_state(config: Config, model_config: TransformerConfig, mesh: Mesh) -> TrainState:
    """The train state as shapes, dtypes and shardings: what a checkpoint is restored into.

    Args:
        config: of the run.
        model_config: the architecture.
        mesh: any with the axes `sharding.MESH_AXES`; not necessarily that of the run.
    """
    optimizer, _ = make_optimizer_from(config)
    keep_reference = config.reference.placement == "trainer"
    learns_log_z = "log_z" in make_objective(config.objective).heads
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
            log_z_size=model_config.hidden_size if learns_log_z else 0,
        ),
        params,
    )
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        make_step_shardings(config, model_config, mesh).state,
    )
