# SPDX-License-Identifier: Apache-2.0
"""Build: a validated config becomes the parts of a run, connected and not yet moving.

The only module that knows every part and the whole config; sections of the config end here, as
keyword arguments. It starts no thread except the reward processes' own.
"""

import dataclasses
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from tba_jax.config.devices import validate_devices
from tba_jax.config.schema import Config
from tba_jax.devices.cluster import Cluster
from tba_jax.devices.step_plan import Planner
from tba_jax.evaluation.service import EvaluationService
from tba_jax.flow.batch import Batch, PackedBatch
from tba_jax.models import lora
from tba_jax.models import model as models
from tba_jax.models.hf import hf_weights
from tba_jax.replay.buffer import ReplayBuffer
from tba_jax.replay.outbox import Outbox
from tba_jax.report.writers import JsonlWriter, MultiWriter, ProgressDisplay
from tba_jax.run.checkpoint import Checkpoints
from tba_jax.run.evaluating import make_evaluator, make_metrics
from tba_jax.run.modeling import (
    make_padding,
    model_path,
    policy_config,
    sampling_settings,
    start_weights,
)
from tba_jax.run.placing import open_sites, place_run
from tba_jax.run.repartition import repartition
from tba_jax.run.rewarding import make_gold, make_rewards, make_task
from tba_jax.run.run import Run, RunClock, forget_after, schedule_name
from tba_jax.run.searching import make_decoders, make_references, make_start_data, make_transport
from tba_jax.run.training import (
    abstract_state,
    make_optimizer_from,
    make_packing,
    make_step_settings,
    make_step_shardings,
)
from tba_jax.search.prompts import PromptStream
from tba_jax.search.reference import Reference
from tba_jax.search.searcher import Searcher
from tba_jax.train.state import TrainState, make_init_state
from tba_jax.train.step import make_train_step
from tba_jax.train.trainer import Trainer


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
        ConfigError, PlacementError: the devices do not fit the placement.
        ValueError: model folder, data or reward function are not usable, or the model is not the
            one that the adapters of a checkpoint were trained on; says which and why.
        CheckpointError: the newest checkpoint is not readable.
    """
    folder = Path(workdir).absolute()
    num_hosts = cluster.num_processes
    validate_devices(config, len(jax.local_devices()), num_hosts)
    # Only a pod spans processes; with one process these are the same devices.
    placement = place_run(config, jax.devices(), cluster.process_id)
    mine = len(placement.searcher_meshes)
    num_searchers = mine * num_hosts
    first_searcher = mine * cluster.process_id
    sites = open_sites(config, placement)
    task = make_task(config)
    # Before the model, which may take minutes to load: data that cannot be read ends the run.
    progress.note(f"{task.name}: {task.train_size():,} prompts, {task.eval_size():,} held out")
    model = models.describe(model_path(config))
    tokenizer = model.load_tokenizer()
    rewards = make_rewards(config, task, tokenizer, sites.searchers)
    gold = make_gold(config, task, tokenizer, sites.evaluation)
    model_config = model.config
    policy = policy_config(config, model_config)
    has_adapters = policy.adapters is not None
    shardings = make_step_shardings(config, model_config, placement.trainer_mesh)
    optimizer, schedule = make_optimizer_from(config)
    checkpoints = Checkpoints(
        str(folder / "checkpoints"),
        keep=config.checkpoint.keep,
        timeout_s=config.checkpoint.timeout_s,
    )
    # Read once: a host that looked a moment later might see another one.
    newest = cluster.broadcast_json(checkpoints.latest_step())
    is_new = newest is None
    references: dict[Any, Reference] = {}
    params, base, host_states = None, None, None
    if is_new or has_adapters or config.reference.placement == "searcher":
        progress.phase("loading the model")
        params = model.load_params(
            param_dtype=jnp.dtype(config.model.param_dtype),
            shardings=shardings.base if has_adapters else shardings.state.params,
        )
    if config.reference.placement == "searcher":
        references = make_references(config, policy, tokenizer.eos_ids, sites, params)
    if has_adapters:
        base = params
        params = lora.init_adapters(policy, config.seed, shardings.state.params)
    if is_new:
        state = make_init_state(optimizer, shardings)(params)
    else:
        del params
        progress.phase("restoring the newest checkpoint")
        target = abstract_state(config, model_config, placement.trainer_mesh)
        _, state, host_states = checkpoints.restore(target, newest)
        state = TrainState(*state) if not isinstance(state, TrainState) else state
        if has_adapters:
            lora.check_base(model.folder, host_states[0]["run"][1]["base_fingerprint"])

    transport = make_transport(config, policy, sites, folder, base)
    # The synchronous driver itself decides how far searchers run ahead.
    outbox_bytes = config.search.outbox_bytes if config.driver == "async" else sys.maxsize
    outboxes = [Outbox(outbox_bytes) for _ in range(mine)]

    # One thread cannot wait for itself: what is missing becomes replay.
    pace = config.replay.pace if config.driver == "async" else "off"

    def make_buffer() -> ReplayBuffer:
        # Hosts draw apart from one another; one host draws what a single process would.
        seed = config.seed if num_hosts == 1 else (config.seed, num_hosts, cluster.process_id)
        share = dataclasses.replace(
            config.replay, max_bytes=config.replay.max_bytes // num_hosts, pace=pace
        )
        return ReplayBuffer(**dataclasses.asdict(share), seed=seed)

    buffer = make_buffer()
    schedule_log = JsonlWriter(folder / schedule_name(cluster.process_id))
    metrics_log = JsonlWriter(folder / "metrics.jsonl") if cluster.is_primary else None
    decoders = make_decoders(config, model_config, tokenizer, sites)
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
    given = None
    if not newest:  # all are taken before the first step, whatever became of the file since
        given = make_start_data(config, task, tokenizer, model_config, sites)
    if given is not None:
        progress.note(
            f"{given.num_responses:,} given responses come first, in {given.num_rounds:,} rounds"
        )
    first_kind = task.response_kinds[0] if task.response_kinds else ""
    root_key = jax.random.key(config.seed)
    searchers = [
        Searcher(
            index=first_searcher + i,
            reader=i,
            stream=streams[i],
            decoder=decoders[sites.searchers[i]],
            transport=transport,
            outbox=outboxes[i],
            rewards=rewards.on(sites.searchers[i]),
            reference=references.get(sites.searchers[i]),
            decode_text=tokenizer.batch_decode,
            response_kind=task.response_kind,
            first_kind=first_kind,
            key=root_key,
            prompts_per_round=config.search.prompts_per_round,
            samples_per_prompt=config.search.samples_per_prompt,
            settings=sampling_settings(config),
            explore_share=config.search.explore_share,
            explore_temperatures=(
                config.search.explore_min_temperature,
                config.search.explore_max_temperature,
            ),
            num_slots=config.search.num_slots or None,
            in_flight=config.search.swap == "in_flight",
            padding=make_padding(config, tokenizer.pad_id),
            clock=clock,
            given=given if first_searcher + i == 0 else None,
        )
        for i in range(mine)
    ]

    @functools.cache
    def start_params() -> Any:
        if sites.evaluation in references:
            return references[sites.evaluation].params
        # From devices of this process: only one evaluates.
        source = sites.reading(model_config)
        load = source.in_turn(start_weights)
        return load(config, model_config, source.mesh, sites.evaluation.mesh)

    metrics = make_metrics(config, tokenizer, model_config, gold, start_params, sites.evaluation)
    evaluator = make_evaluator(
        config, task, tokenizer, decoders[sites.evaluation], rewards, metrics
    )
    if evaluator.num_skipped:
        skipped = evaluator.num_skipped
        progress.note(f"{skipped} held-out prompts exceed task.max_prompt_tokens: skipped")

    def place_batch(batch: Batch | PackedBatch) -> Batch | PackedBatch:
        if num_hosts == 1:
            return jax.device_put(batch, shardings.batch)
        # This host's rows; the others bring theirs.
        make = functools.partial(jax.make_array_from_process_local_data, shardings.batch)
        return jax.tree.map(make, batch)

    train_step = sites.trainer.in_turn(
        make_train_step(
            policy, optimizer, schedule, make_step_settings(config, tokenizer.eos_ids), shardings
        )
    )
    frozen = (base,) if has_adapters else ()
    trainer = Trainer(
        state=state,
        train_step=lambda state, batch: train_step(state, place_batch(batch), *frozen),
        buffer=buffer,
        outboxes=outboxes,
        transport=transport,
        planner=Planner(
            cluster,
            num_prompts=config.batch.num_prompts,
            recency_prob=config.replay.recency_prob,
            pace=pace,
            seed=config.seed,
            num_steps=config.num_steps,
            sync_period=config.sync_period,
            checkpoint_period=config.checkpoint.period,
        ),
        group_size=config.objective.group_size,
        packing=make_packing(config, tokenizer.pad_id),
        max_nonfinite_steps=config.optimizer.max_nonfinite_steps,
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
        gold=gold,
        evaluator=evaluator,
        evaluations=EvaluationService(evaluator.run, clock),
        decoder=decoders[sites.evaluation],
        sites=sites,
        model_config=model_config,
        checkpoints=checkpoints,
        metrics=MultiWriter([*([metrics_log] if metrics_log else []), progress, *extra_writers]),
        progress=progress,
        schedule_log=schedule_log,
        metrics_log=metrics_log,
        clock=clock,
        base_fingerprint=hf_weights.fingerprint(model.folder) if has_adapters else "",
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
