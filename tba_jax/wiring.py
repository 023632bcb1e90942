# SPDX-License-Identifier: Apache-2.0
"""Wiring: a validated config becomes the parts of a run, connected and not yet moving.

The only module that knows every part and the whole config; sections of the config end here, as
keyword arguments. It starts no thread except the reward processes' own.
"""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tba_jax import sharding
from tba_jax.checkpointing import Checkpoints
from tba_jax.cluster import Cluster
from tba_jax.config import Config, ConfigError, validate_devices
from tba_jax.data import PromptStream
from tba_jax.decoding.engine import SamplingSettings
from tba_jax.logprobs import response_mask, token_logprobs
from tba_jax.metrics import JsonlWriter, MultiWriter, ProgressDisplay
from tba_jax.models import hf_weights, transformer
from tba_jax.models.transformer import TransformerConfig
from tba_jax.outbox import Outbox
from tba_jax.parts import (
    abstract_state,
    make_decoder,
    make_evaluator,
    make_optimizer_from,
    model_path,
    step_settings,
)
from tba_jax.repartition import repartition
from tba_jax.replay_buffer import ReplayBuffer
from tba_jax.rewards.pool import RewardPool
from tba_jax.run import Run, RunClock, forget_after, schedule_name
from tba_jax.searcher import Searcher
from tba_jax.step_plan import Planner
from tba_jax.tasks import get_task
from tba_jax.tokenizer import Tokenizer
from tba_jax.train_step import TrainState, init_state, make_train_step
from tba_jax.trainer import Trainer
from tba_jax.trajectory import Batch, length_buckets
from tba_jax.weight_sync import CheckpointTransport, MemoryTransport, Transport

START_MODEL = Path(__file__).parent / "assets" / "start_model"


def _score_reference(
    params: Any,
    tokens: Array,
    prompt_lengths: Array,
    response_lengths: Array,
    *,
    response_bucket: int,
    config: TransformerConfig,
    temperature: float,
    compute_dtype: str,
    chunk_tokens: int,
    eos_ids: tuple[int, ...],
    mask_eos: bool,
) -> Array:
    token_values = token_logprobs(
        params,
        tokens,
        prompt_lengths,
        response_lengths,
        response_bucket=response_bucket,
        config=config,
        temperature=temperature,
        compute_dtype=jnp.dtype(compute_dtype),
        chunk_tokens=chunk_tokens,
    )
    mask = response_mask(
        tokens[..., -response_bucket:], response_lengths, eos_ids=eos_ids, mask_eos=mask_eos
    )
    return jnp.sum(token_values * mask, axis=-1)


class _Reference:
    """Reference scorer on one searcher device; the jitted program is shared between searchers."""

    def __init__(self, program: Callable[..., Array], params: Any) -> None:
        self._program = program
        self._params = params

    def __call__(
        self,
        tokens: np.ndarray,
        prompt_lengths: np.ndarray,
        response_lengths: np.ndarray,
        response_bucket: int,
    ) -> Array:
        return self._program(
            self._params,
            tokens,
            prompt_lengths,
            response_lengths,
            response_bucket=response_bucket,
        )


def build(
    config: Config,
    workdir: str | os.PathLike[str],
    *,
    cluster: Cluster,
    clock: RunClock,
    progress: ProgressDisplay,
    extra_writers: Sequence[Any] = (),
) -> Run:
    """Make every part and restore the newest checkpoint of the work directory, if there is one.

    Args:
        config: validated.
        workdir: exists.
        cluster: the processes of the run, all of which call this.
        clock: started when the process did.
        progress: the display that phases are announced on.
        extra_writers: more metric sinks.

    Raises:
        ConfigError: the devices do not fit the placement.
        ValueError: model folder, data or reward function are not usable; says which and why.
        CheckpointError: the newest checkpoint is not readable.
    """
    folder = Path(workdir).absolute()
    devices = jax.local_devices()
    num_hosts = cluster.num_processes
    validate_devices(config, len(devices), num_hosts)
    if config.placement == "pod":
        placement = sharding.place_pod(
            jax.devices(),
            process_id=cluster.process_id,
            num_trainer_devices=config.num_trainer_devices,
            num_searchers=config.num_searchers,
        )
    else:
        placement = sharding.place(
            config.placement,
            devices,
            num_trainer_devices=config.num_trainer_devices,
            num_searchers=config.num_searchers,
        )
    mine = len(placement.searcher_devices)
    num_searchers = mine * num_hosts
    first_searcher = mine * cluster.process_id
    task = get_task(config.task.name, config.task.data_path)
    # Before the model, which may take minutes to load: data that cannot be read ends the run.
    progress.note(f"{task.name}: {task.train_size():,} prompts, {task.eval_size():,} held out")
    if (
        config.replay.pace == "trainer"
        and config.replay.recency_prob
        and task.train_size() < config.batch.num_prompts
    ):
        raise ConfigError(
            f"config.batch.num_prompts = {config.batch.num_prompts}: task {task.name} has "
            f"{task.train_size()} training prompts, so a batch of fresh prompts can never be full "
            "and replay.pace=trainer waits for ever. Lower it or set --config.replay.pace=off."
        )
    rewards = RewardPool(
        config.task.reward or task.reward,
        num_workers=config.reward.num_workers,
        timeout_s=config.reward.timeout_s,
        max_failure_rate=config.reward.max_failure_rate,
    )
    progress.phase("loading the model")
    tokenizer = Tokenizer.load(hf_weights.resolve(model_path(config)))
    param_dtype = jnp.dtype(config.model.param_dtype)
    model_config, params, _ = hf_weights.load(model_path(config), param_dtype=param_dtype)
    prompt_buckets = length_buckets(config.task.max_prompt_tokens, config.batch.num_length_buckets)
    response_buckets = length_buckets(config.search.max_new_tokens, config.batch.num_length_buckets)

    reference_program = jax.jit(
        functools.partial(
            _score_reference,
            config=model_config,
            temperature=config.search.sampling_temperature,
            compute_dtype=config.model.compute_dtype,
            chunk_tokens=config.batch.logprob_chunk_tokens,
            eos_ids=tokenizer.eos_ids,
            mask_eos=config.objective.mask_eos,
        ),
        static_argnames=("response_bucket",),
    )
    references: dict[Any, _Reference] = {}
    if config.reference.placement == "searcher":
        for device in placement.searcher_devices:
            if device not in references:
                where = jax.sharding.SingleDeviceSharding(device)
                references[device] = _Reference(reference_program, sharding.copy_to(params, where))

    optimizer, schedule = make_optimizer_from(config)
    checkpoints = Checkpoints(
        str(folder / "checkpoints"),
        keep=config.checkpoint.keep,
        timeout_s=config.checkpoint.timeout_s,
    )
    host_states = None
    # Read once: a host that looked a moment later might see another one.
    newest = cluster.broadcast_json(checkpoints.latest_step())
    keep_reference = config.reference.placement == "trainer"
    where = placement.replicated_sharding
    if newest is None and num_hosts > 1:
        make = functools.partial(init_state, optimizer=optimizer, keep_reference=keep_reference)
        state = jax.jit(make, out_shardings=where)(sharding.to_mesh(params, where))
    elif newest is None:
        state = init_state(
            sharding.copy_to(params, where), optimizer, keep_reference=keep_reference
        )
        state = jax.device_put(state, where)
    else:
        progress.phase("restoring the newest checkpoint")
        target = abstract_state(config, model_config, where)
        _, state, host_states = checkpoints.restore(target, newest)
        state = TrainState(*state) if not isinstance(state, TrainState) else state
    del params

    rollout_dtype = jnp.dtype(config.model.rollout_dtype)
    shardings = placement.publication_shardings()
    layout = functools.partial(transformer.unstack_layers, config=model_config)
    transport: Transport
    if config.sync.transport == "memory":
        to_host = sharding.host_part if num_hosts > 1 else None
        transport = MemoryTransport(rollout_dtype, shardings, layout, to_host)
    else:
        transport = CheckpointTransport(
            str(folder),
            keep=config.sync.keep,
            dtype=rollout_dtype,
            shardings=shardings,
            layout=layout,
        )
    # The synchronous driver itself decides how far searchers run ahead.
    outbox_bytes = config.search.outbox_bytes if config.driver == "async" else sys.maxsize
    outboxes = [Outbox(outbox_bytes) for _ in range(mine)]

    def make_buffer() -> ReplayBuffer:
        # Hosts draw apart from one another; one host draws what a single process would.
        seed = config.seed if num_hosts == 1 else (config.seed, num_hosts, cluster.process_id)
        share = {**config.replay, "max_bytes": config.replay.max_bytes // num_hosts}
        return ReplayBuffer(**share, seed=seed)

    buffer = make_buffer()
    schedule_log = JsonlWriter(folder / schedule_name(cluster.process_id))
    metrics_log = JsonlWriter(folder / "metrics.jsonl") if cluster.is_primary else None
    decoder = make_decoder(config, model_config, tokenizer)
    streams = [
        PromptStream(
            task,
            tokenizer,
            searcher=first_searcher + i,
            num_searchers=num_searchers,
            ownership=config.search.ownership,
            seed=config.seed,
            max_prompt_tokens=config.task.max_prompt_tokens,
            long_prompts=config.task.long_prompts,
        )
        for i in range(mine)
    ]
    first_kind = task.response_kinds[0] if task.response_kinds else ""
    root_key = jax.random.key(config.seed)
    searchers = [
        Searcher(
            index=first_searcher + i,
            reader=i,
            stream=streams[i],
            decoder=decoder,
            transport=transport,
            outbox=outboxes[i],
            rewards=rewards,
            reference=references.get(placement.searcher_devices[i]),
            decode_text=tokenizer.batch_decode,
            response_kind=task.response_kind,
            first_kind=first_kind,
            key=root_key,
            prompts_per_round=config.search.prompts_per_round,
            samples_per_prompt=config.search.samples_per_prompt,
            settings=SamplingSettings(
                config.search.max_new_tokens, temperature=config.search.sampling_temperature
            ),
            num_slots=config.search.num_slots or None,
            in_flight=config.search.swap == "in_flight",
            prompt_buckets=prompt_buckets,
            response_buckets=response_buckets,
            pad_id=tokenizer.pad_id,
            clock=clock,
        )
        for i in range(mine)
    ]
    evaluator = make_evaluator(config, task, tokenizer, decoder, rewards)
    if evaluator.num_skipped:
        skipped = evaluator.num_skipped
        progress.note(f"{skipped} held-out prompts exceed task.max_prompt_tokens: skipped")

    def place_batch(batch: Batch) -> Batch:
        if num_hosts == 1:
            return jax.device_put(batch, placement.batch_sharding)
        # This host's rows; the others bring theirs.
        make = functools.partial(jax.make_array_from_process_local_data, placement.batch_sharding)
        return jax.tree.map(make, batch)

    trainer = Trainer(
        state=state,
        train_step=make_train_step(
            model_config, optimizer, schedule, step_settings(config, tokenizer.eos_ids)
        ),
        buffer=buffer,
        outboxes=outboxes,
        transport=transport,
        planner=Planner(
            cluster,
            num_prompts=config.batch.num_prompts,
            recency_prob=config.replay.recency_prob,
            pace=config.replay.pace,
            seed=config.seed,
            num_steps=config.num_steps,
            sync_period=config.sync_period,
            checkpoint_period=config.checkpoint.period,
        ),
        num_prompts=config.batch.num_prompts,
        group_size=config.objective.group_size,
        prompt_buckets=prompt_buckets,
        response_buckets=response_buckets,
        pad_id=tokenizer.pad_id,
        place_batch=place_batch,
        log_event=schedule_log.append,
        clock=clock,
    )
    run = Run(
        config=config,
        workdir=folder,
        cluster=cluster,
        num_searchers=num_searchers,
        task=task,
        trainer=trainer,
        searchers=searchers,
        streams=streams,
        outboxes=outboxes,
        buffer=buffer,
        transport=transport,
        rewards=rewards,
        evaluator=evaluator,
        decoder=decoder,
        checkpoints=checkpoints,
        metrics=MultiWriter([*([metrics_log] if metrics_log else []), progress, *extra_writers]),
        progress=progress,
        schedule_log=schedule_log,
        metrics_log=metrics_log,
        clock=clock,
    )
    if host_states is not None:
        run.restore(
            host_states[0]
            if host_states[0]["run"][1]["num_processes"] == num_hosts
            else repartition(
                host_states,
                host=cluster.process_id,
                num_hosts=num_hosts,
                num_searchers=num_searchers,
                make_buffer=make_buffer,
            )
        )
    forget_after(run, trainer.step_index)
    return run
