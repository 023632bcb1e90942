# SPDX-License-Identifier: Apache-2.0
"""Single parts of a run as its config asks for them, for whoever needs one without the others.

Commands that look at a finished run, and `wiring`, which connects all parts, build them alike.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from tba_jax.config.devices import trainer_mesh
from tba_jax.config.schema import Config
from tba_jax.decoding import lowering
from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.devices.device_turns import InTurn, no_turns
from tba_jax.devices.sharding import (
    MESH_AXES,
    MeshShape,
    Placement,
    PlacementError,
    hand_over,
    place,
)
from tba_jax.evaluation.attacks import SentenceEmbedder, attack_metrics
from tba_jax.evaluation.evaluator import Evaluator, MetricFunction
from tba_jax.evaluation.metrics import ReferenceDistance, WinRate
from tba_jax.flow.trajectory import length_buckets, row_buckets
from tba_jax.models import lora
from tba_jax.models.hf import hf_weights
from tba_jax.models.hf.families import transformer_config
from tba_jax.models.shardings import on_mesh, param_shardings
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import TransformerConfig, abstract_params, unstack_layers
from tba_jax.rewards.source import RewardSource
from tba_jax.search.prompts import eval_prompts
from tba_jax.search.reference import make_reference_program
from tba_jax.tasks.registry import Task, get_task
from tba_jax.train.optimizers import learning_rate_schedule, make_optimizer
from tba_jax.train.step import StepSettings, StepShardings, TrainState, init_state, step_shardings
from tba_jax.weights.transport import Layout, make_publish_program

START_MODEL = Path(__file__).parents[1] / "assets" / "start_model"


def model_path(config: Config) -> str:
    """The configured model, or the embedded start model."""
    return config.model.path or str(START_MODEL)


def step_settings(config: Config, eos_ids: tuple[int, ...]) -> StepSettings:
    """The settings of the training step."""
    return StepSettings(
        objective=config.objective.name,
        scale=config.objective.scale,
        beta=config.objective.beta,
        beta_schedule=config.objective.beta_schedule,
        beta_final=config.objective.beta_final,
        beta_steps=config.objective.beta_steps,
        beta_jump_step=config.objective.beta_jump_step,
        mask_eos=config.objective.mask_eos,
        eos_ids=eos_ids,
        temperature=config.search.sampling_temperature,
        reference_reset_period=config.reference.reset_period,
        compute_dtype=config.model.compute_dtype,
        logprob_chunk_tokens=config.batch.logprob_chunk_tokens,
        micro_batch_rows=config.batch.micro_batch_rows,
        remat=config.model.remat,
        min_new_tokens=config.search.min_new_tokens,
        log_z=config.objective.log_z,
        log_z_rate=config.objective.log_z_rate,
        reference_temperature=config.objective.reference_temperature,
        reference_temperature_final=config.objective.reference_temperature_final,
        reference_temperature_steps=config.objective.reference_temperature_steps,
        reward_temperature=config.objective.reward_temperature,
        reward_temperature_final=config.objective.reward_temperature_final,
        reward_temperature_steps=config.objective.reward_temperature_steps,
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


def policy_config(config: Config, model_config: TransformerConfig) -> TransformerConfig:
    """The architecture as it is trained: with adapters where the config asks for them.

    Raises:
        ValueError: lora.modules names a matrix that this model lacks.
    """
    rank, alpha, modules = config.lora.rank, config.lora.alpha, tuple(config.lora.modules)
    return lora.with_adapters(model_config, rank, alpha, modules) if rank else model_config


def packed_row_buckets(config: Config) -> tuple[int, ...]:
    """Numbers of packed rows that the train step is compiled for, ascending."""
    return row_buckets(
        config.batch.num_prompts * config.objective.group_size,
        config.batch.micro_batch_rows or config.mesh.data * config.mesh.fsdp,
    )


def mesh_shape(config: Config, num_hosts: int = 1) -> MeshShape:
    """Shape of the trainer's mesh; in a pod `mesh.data = 1` means one share for each host."""
    return MeshShape(*trainer_mesh(config, num_hosts))


def place_run(config: Config, devices: Sequence[Any], process_index: int = 0) -> Placement:
    """Meshes of the trainer and of each searcher.

    Args:
        config: validated.
        devices: as in `sharding.arrange`.
        process_index: whose searchers.

    Raises:
        PlacementError: the devices cannot be divided so, or hosts of a pod would not train.
    """
    hosts = {d.process_index for d in devices} if config.placement == "pod" else {0}
    placement = place(
        config.placement,
        devices,
        mesh=mesh_shape(config, len(hosts)),
        num_searchers=max(1, config.num_searchers // len(hosts)),
        searcher_devices=config.search.num_devices,
        process_index=process_index,
    )
    trains = {d.process_index for d in placement.trainer_mesh.devices.flat}
    if config.placement == "pod" and len(trains) < len(hosts):
        raise PlacementError(
            f"config.mesh: a trainer of {placement.trainer_mesh.size} devices gets {len(trains)} "
            f"whole hosts of {len(hosts)} on these chips, and hosts that only search would have to "
            "send their responses away. Let the mesh have all devices; searchers then take turns "
            "with the trainer."
        )
    return placement


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
        learn_log_z=config.objective.log_z == "learned",
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
            log_z_size=model_config.hidden_size if config.objective.log_z == "learned" else 0,
        ),
        params,
    )
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        make_step_shardings(config, model_config, mesh).state,
    )


def reading_mesh(model_config: TransformerConfig, devices: Sequence[Any]) -> Mesh:
    """As many of these devices as divide the model evenly: to look at it without training it."""
    num = max(n for n in range(1, len(devices) + 1) if model_config.hidden_size % n == 0)
    return Mesh(np.array(devices[:num]).reshape(1, num, 1), MESH_AXES)


def searcher_shardings(model_config: TransformerConfig, mesh: Mesh) -> Any:
    """Where a searcher wants its weights, in the decoder's layout: divided over its mesh.

    Raises:
        ValueError: the mesh does not divide the model.
    """
    return on_mesh(mesh, lowering.weight_shardings(model_config, mesh))


def adapter_shardings(policy: TransformerConfig, mesh: Mesh) -> Any:
    """Where a searcher wants adapters: divided as the matrices that they belong to."""
    return on_mesh(mesh, lora.split(param_shardings(policy, mesh))[1])


def reference_shardings(model_config: TransformerConfig, mesh: Mesh) -> Any:
    """Where a searcher wants the reference, in the trainer's layout: divided over its mesh."""
    return on_mesh(mesh, param_shardings(model_config, mesh))


def make_publication(
    config: Config, model_config: TransformerConfig, mesh: Mesh
) -> tuple[Layout, Any]:
    """(layout that searchers want, shardings in which the publish program leaves its copy).

    Args:
        config: of the run.
        model_config: the architecture.
        mesh: `Placement.publication_mesh`.
    """
    layout = functools.partial(unstack_layers, config=model_config)
    return layout, lowering.weight_shardings(model_config, mesh)


def decoder_weights(
    config: Config, model_config: TransformerConfig, params: Any, source: Mesh, mesh: Mesh
) -> Any:
    """Parameters in the rollout dtype and the decoder's layout, on a searcher's mesh.

    Args:
        config: of the run.
        model_config: the architecture.
        params: parameters, layers stacked.
        source: the mesh they lie on, with the axes `sharding.MESH_AXES`.
        mesh: the searcher's.
    """
    layout, published = make_publication(config, model_config, source)
    program = make_publish_program(jnp.dtype(config.model.rollout_dtype), layout, published)
    return hand_over(program(params), searcher_shardings(model_config, mesh))


def start_weights(config: Config, model_config: TransformerConfig, source: Mesh, mesh: Mesh) -> Any:
    """The start model's weights, as `decoder_weights` gives them.

    Args:
        config: of the run.
        model_config: the architecture that is wanted.
        source: a mesh to read on.
        mesh: the searcher's.

    Raises:
        ValueError: config.model.path is a model of another architecture.
    """
    dtype = jnp.dtype(config.model.rollout_dtype)
    shardings = param_shardings(model_config, source)
    folder = hf_weights.resolve(model_path(config))
    if transformer_config(hf_weights.load_config(folder)) != model_config:
        raise ValueError(
            "config.eval.reference_metrics compares with the model at config.model.path = "
            f"{model_path(config)!r}, which has another architecture; name the right one, or set "
            "--config.eval.reference_metrics=False"
        )
    _, params, _ = hf_weights.load(folder, param_dtype=dtype, shardings=shardings)
    return decoder_weights(config, model_config, params, source, mesh)


def make_reference_program_from(
    config: Config, model_config: TransformerConfig, eos_ids: tuple[int, ...], mesh: Mesh
) -> Callable[..., Array]:
    """The reference scorer's program on a searcher's mesh."""
    return make_reference_program(
        model_config,
        temperature=config.search.sampling_temperature,
        compute_dtype=config.model.compute_dtype,
        chunk_tokens=config.batch.logprob_chunk_tokens,
        eos_ids=eos_ids,
        mask_eos=config.objective.mask_eos,
        min_new_tokens=config.search.min_new_tokens,
        mesh=mesh,
    )


class SpecialIds(Protocol):
    """What a decoder needs of a tokenizer."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a response."""
        ...

    @property
    def pad_id(self) -> int:
        """Token written after the end."""
        ...


def make_decoder(
    config: Config,
    model_config: TransformerConfig,
    tokenizer: SpecialIds,
    mesh: Mesh | None = None,
    in_turn: InTurn = no_turns,
) -> Decoder:
    """The decoder of a run, for training and for evaluation.

    Args:
        config: of the run.
        model_config: the architecture.
        tokenizer: the model's.
        mesh: the searcher's; None or of one device: for weights on any one device.
        in_turn: as in `Decoder`.

    Raises:
        ValueError: the model has fewer positions than prompt and response may take.
    """
    longest = config.task.max_prompt_tokens + max(
        config.search.max_new_tokens, config.eval.max_new_tokens
    )
    if longest > model_config.max_positions:
        raise ValueError(
            f"prompt and response may take {longest} tokens, the model at {model_path(config)} "
            f"was made for {model_config.max_positions}; lower config.task.max_prompt_tokens or "
            "config.search.max_new_tokens and config.eval.max_new_tokens"
        )
    return Decoder(
        model_config,
        compute_dtype=jnp.dtype(config.model.rollout_dtype),
        eos_ids=tokenizer.eos_ids,
        pad_id=tokenizer.pad_id,
        prompt_buckets=length_buckets(
            config.task.max_prompt_tokens, config.batch.num_length_buckets
        ),
        max_length=longest,
        cache_dtype=config.search.cache_dtype or None,
        cache_sharding=lowering.cache_sharding(model_config, mesh)
        if mesh is not None and mesh.size > 1
        else None,
        in_turn=in_turn,
    )


def sampling_settings(config: Config) -> SamplingSettings:
    """How searchers draw responses."""
    search = config.search
    return SamplingSettings(
        search.max_new_tokens,
        temperature=search.sampling_temperature,
        top_p=search.top_p,
        min_new_tokens=search.min_new_tokens,
    )


def make_task(config: Config) -> Task:
    """The task of a config; its data is read when first used.

    Raises:
        ValueError: no such task, or not with this data.
    """
    task = config.task
    return get_task(task.name, task.data_path, num_held_out=task.num_eval_prompts, chat=task.chat)


def make_metrics(
    config: Config,
    tokenizer: Tokenizer,
    model_config: TransformerConfig,
    gold: RewardSource | None,
    reference_params: Callable[[], Any],
    in_turn: InTurn = no_turns,
) -> list[MetricFunction]:
    """The metric functions that the config asks for.

    Args:
        config: the config.
        tokenizer: of the policy.
        model_config: architecture of policy and reference.
        gold: judge of the win rate, if any.
        reference_params: gives the start model's weights on the device that evaluates.
        in_turn: of the searcher that evaluates, as in `Decoder`.
    """
    metrics: list[MetricFunction] = []
    if gold is not None:
        metrics.append(WinRate(gold, tokenizer))
    if config.eval.reference_metrics:
        buckets = config.batch.num_length_buckets
        metrics.append(
            ReferenceDistance(
                model_config,
                reference_params,
                temperature=config.search.sampling_temperature,
                compute_dtype=config.model.rollout_dtype,
                prompt_buckets=length_buckets(config.task.max_prompt_tokens, buckets),
                response_buckets=length_buckets(config.eval.max_new_tokens, buckets),
                pad_id=tokenizer.pad_id,
                in_turn=in_turn,
            )
        )
    return metrics


def task_metrics(config: Config) -> tuple[MetricFunction, ...]:
    """Metric functions that a task's evaluation needs beyond those of every task.

    Raises:
        ValueError: the sentence embedding model is not usable.
    """
    if config.task.name != "redteam":
        return ()
    path = config.eval.embedding_path
    embedder = SentenceEmbedder(path, device=jax.local_devices()[0]) if path else None
    return (attack_metrics(embedder),)


def make_evaluator(
    config: Config,
    task: Task,
    tokenizer: Tokenizer,
    decoder: Decoder,
    rewards: RewardSource,
    metrics: Sequence[MetricFunction] = (),
) -> Evaluator:
    """Held-out evaluation as the config says; `metrics` beyond those of the task."""
    prompts, num_skipped = eval_prompts(
        task,
        tokenizer,
        config.task.num_eval_prompts,
        config.task.max_prompt_tokens,
        config.task.long_prompts,
    )
    return Evaluator(
        prompts=prompts,
        num_skipped=num_skipped,
        decoder=decoder,
        rewards=rewards,
        decode_text=tokenizer.batch_decode,
        response_kind=task.response_kind,
        first_kind=task.response_kinds[0] if task.response_kinds else "",
        max_new_tokens=config.eval.max_new_tokens,
        num_slots=config.eval.num_slots,
        metric=task.metric,
        num_samples=config.eval.num_samples,
        temperature=config.eval.temperature,
        min_new_tokens=config.search.min_new_tokens,
        metrics=(*task_metrics(config), *metrics),
    )
