# SPDX-License-Identifier: Apache-2.0
"""Assembly of a run: from the config to all its parts, new or restored from a checkpoint.

Invariant: the reference model never shares buffers with the trained parameters, because a train
step donates its inputs.
"""

import dataclasses
import functools
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tba_jax.config.resolved import writes_versions
from tba_jax.config.schema import Config
from tba_jax.devices.cluster import Cluster
from tba_jax.flow.layout import Batch
from tba_jax.flow.tickets import Ticket
from tba_jax.models import lora
from tba_jax.remote.channel import HEARTBEAT_S
from tba_jax.remote.client import Client
from tba_jax.remote.evaluation_queue import EvaluationQueue
from tba_jax.remote.owner import Owner, OwnerSettings
from tba_jax.remote.steps import Steps, StepSettings
from tba_jax.replay.buffer import ReplayBuffer
from tba_jax.report.progress import ProgressDisplay
from tba_jax.run.checkpoint import Checkpoints
from tba_jax.run.model_parts import (
    abstract_state,
    make_layout,
    make_publication_program,
    make_rate,
    make_step_settings,
    make_step_shardings,
)
from tba_jax.run.object_store import storage_of, upload
from tba_jax.run.peers import OwnerServer, Peer
from tba_jax.run.records import Logs
from tba_jax.run.run_state import Run
from tba_jax.run.shared import (
    RunClock,
    Shared,
    build_judging,
    make_arrival,
    make_searchers,
    open_shared,
)
from tba_jax.run.task_parts import (
    make_evaluator,
    make_reader,
    try_rewards,
)
from tba_jax.search.prompts import PromptReader, Prompts
from tba_jax.search.searcher import Searcher
from tba_jax.search.start_data import load_start_tickets
from tba_jax.storage.steps import delete_own
from tba_jax.tasks.registry import task_class
from tba_jax.train.optimizers import make_optimizer
from tba_jax.train.state import TrainState, make_init_state
from tba_jax.train.step import make_reference_pass, make_train_step
from tba_jax.train.trainer import Trainer
from tba_jax.weights.folder import FOLDER, WeightFolder
from tba_jax.weights.memory import Weights


def build(
    config: Config,
    workdir: Path,
    *,
    cluster: Cluster,
    clock: RunClock,
    progress: ProgressDisplay,
    writers: Sequence[Any] = (),
    link: Peer | None = None,
) -> Run:
    """Build every part of a run and restore the newest checkpoint of its work directory.

    Args:
        cluster: the processes of the run; all of them call this function.
        writers: further writers of metrics.
        link: connection to the other processes; None if there is only one process.

    Raises:
        ConfigError, PlacementError: the devices do not fit the placement.
        ValueError: the model folder, the data or a reward function is not usable.
        CheckpointError: the newest checkpoint is damaged, or belongs to another run.
    """
    shared = open_shared(config, workdir, cluster=cluster, clock=clock, note=progress.note)
    _check_rewards(shared)
    checkpoints = Checkpoints(
        storage_of(shared.workdir),
        before_commit=functools.partial(upload, shared.workdir),
        run_id=shared.run_id,
        members=cluster.members,
    )
    step = _newest_intact(checkpoints, cluster)
    if step is None:
        _check_prompts(shared, progress)
    state, base = _start_state(shared, checkpoints, step, progress.phase)
    judging = build_judging(shared)
    evaluator = make_evaluator(config, shared.task, shared.tokenizer, judging.metrics)
    if evaluator.num_skipped:
        progress.note(
            f"{evaluator.num_skipped} held-out prompts exceed task.max_prompt_tokens and are "
            "skipped"
        )
    evaluations = EvaluationQueue(evaluator)
    weights = _make_weights(shared, base, lambda: evaluations.versions)
    parts = make_searchers(shared, weights, judging)
    # With driver=sync, a wait for fresh responses would never end: they come from the same thread.
    pace = config.replay.pace if config.driver == "async" else "off"
    buffer = ReplayBuffer(dataclasses.replace(config.replay, pace=pace), config.seed)
    owner = None
    if cluster.is_primary:
        # A checkpoint of a later step has the results of all given responses.
        given = [] if step else _read_start_tickets(shared, progress.note)
        owner = _make_owner(shared, buffer, evaluations, given, progress.note)
    run = Run(
        shared=shared,
        checkpoints=checkpoints,
        parts=parts,
        buffer=buffer,
        trainer=_make_trainer(shared, state, base, buffer, weights),
        evaluator=evaluator,
        weights=weights,
        owner=owner,
        searchers=tuple(Searcher(each, owner) for each in parts) if owner else (),
        logs=Logs(shared.workdir, cluster, progress, writers),
        server=link if isinstance(link, OwnerServer) else None,
        client=link if isinstance(link, Client) else None,
    )
    run.restore(step)
    return run


def _make_weights(
    shared: Shared, base: Any, versions: Callable[[], Collection[int]]
) -> Weights | WeightFolder:
    """Make the weights that a trainer process publishes: in memory, or as files.

    Args:
        versions: returns the versions under evaluation, which stay on disk.
    """
    sites, cluster = shared.sites, shared.cluster
    publish = make_publication_program(shared.config, shared.model.config, sites.publication.mesh)
    if not writes_versions(shared.config):
        arrival = make_arrival(shared, base)
        return Weights(sites.trainer.locked(publish), arrival.shardings, arrival.merges)
    storage = storage_of(shared.workdir)
    if cluster.is_primary:  # steps are made again, and their versions with them
        delete_own(storage / FOLDER, shared.run_id)
    cluster.broadcast_json(None)  # the others list the folder after that
    return WeightFolder(
        storage, publish, run_id=shared.run_id, members=cluster.members, wanted=versions
    )


def _check_rewards(shared: Shared) -> None:
    """Try the reward functions of a run on one row, also if only other processes call them.

    Raises:
        ValueError, RewardFailure, RuntimeError: a reward cannot be used.
    """
    shared.rewards.check()
    if not shared.cluster.is_primary:
        return
    if shared.rewards.server is not None:
        shared.rewards.server.unload_earlier()
    if not shared.sites.searchers:
        try_rewards(shared.config, shared.task)


def _check_prompts(shared: Shared, progress: ProgressDisplay) -> None:
    """Read the training prompts of a new run, and report prompts that are too long.

    Raises:
        ValueError: prompts are too long, or cannot be read.
    """
    task = shared.task
    if not task_class(shared.config.task.name).makes_problems and shared.cluster.is_primary:
        progress.phase(f"checking {task.size('train'):,} prompts")
        for line in make_reader(shared.config, task, shared.tokenizer).check_all():
            progress.note(line)


def _newest_intact(checkpoints: Checkpoints, cluster: Cluster) -> int | None:
    """Return the step of the newest checkpoint, whose files are intact; None without checkpoints.

    All processes call this function, and each process checks a share of the files.

    Raises:
        CheckpointError: the checkpoint is damaged; raised in all processes.
    """
    # Only one process lists the folder, because another host might see a newer checkpoint.
    step = cluster.broadcast_json(checkpoints.newest())
    if step is not None:
        share = (cluster.process_id, cluster.num_processes)
        checkpoints.check_run(step)
        if found := sum(cluster.gather_json(checkpoints.damage(step, share=share)), []):
            raise checkpoints.damaged(step, found)
    return step


def _start_state(
    shared: Shared, checkpoints: Checkpoints, step: int | None, phase: Callable[[str], None]
) -> tuple[TrainState, Any]:
    """Return the train state, new or restored, and the frozen parameters under adapters or None.

    All processes of the run call this function.

    Args:
        step: step of the checkpoint to restore; None: start from the model.
    """
    config, policy, mesh = shared.config, shared.policy, shared.sites.trainer.mesh
    shardings = make_step_shardings(config, shared.model.config, mesh)
    has_adapters = policy.adapters is not None
    params = base = None
    if step is None or has_adapters:
        phase("loading the model")
        params = shared.model.load_params(
            param_dtype=jnp.dtype(config.model.param_dtype),
            shardings=shardings.base if has_adapters else shardings.state.params,
        )
    if has_adapters:
        base, params = params, None
    if step is None:
        if has_adapters:
            params = lora.init_adapters(policy, config.seed, shardings.state.params)
        return make_init_state(make_optimizer(config.optimizer), shardings)(params), base
    phase("restoring the newest checkpoint")
    state = checkpoints.read(step, abstract_state(config, shared.model.config, mesh))
    return TrainState(*state), base


def _make_trainer(
    shared: Shared,
    state: TrainState,
    base: Any,
    buffer: ReplayBuffer,
    weights: Weights | WeightFolder,
) -> Trainer:
    """Build the trainer of a process.

    Args:
        state: the train state; the trainer donates it.
        base: frozen parameters under adapters; None without adapters.
    """
    config, site = shared.config, shared.sites.trainer
    shardings = make_step_shardings(config, shared.model.config, site.mesh)
    settings = make_step_settings(config, shared.tokenizer.eos_ids, site.mesh)
    optimizer, rate = make_optimizer(config.optimizer), make_rate(config)
    update = site.locked(make_train_step(shared.policy, optimizer, rate, settings, shardings))
    score = site.locked(make_reference_pass(shared.policy, settings, shardings))
    is_alone = shared.cluster.num_processes == 1
    frozen = () if base is None else (base,)

    def train_step(
        state: TrainState, batch: Batch
    ) -> tuple[TrainState, dict[str, Any], Array | None]:
        if is_alone:
            placed = jax.device_put(batch, shardings.of_batch(batch))
        else:  # every process has all rows, and each device copies its own rows
            placed = jax.tree.map(_from_whole, batch, shardings.of_batch(batch))
        reference = None
        if batch.missing is not None:
            reference = score(state.reference_params, placed, *frozen)
            placed = placed._replace(reference=reference, missing=None)
        return *update(state, placed, *frozen), reference

    return Trainer(
        state=state,
        train_step=train_step,
        weights=weights,
        # After a reset, log-probs that were stored would be those of another reference.
        keep_references=None if config.reference.reset_period else buffer.keep_references,
        clock=shared.clock,
    )


def _from_whole(array: np.ndarray, sharding: jax.sharding.Sharding) -> Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _read_start_tickets(shared: Shared, note: Callable[[str], None]) -> list[Ticket]:
    """Return the tickets of the given responses in task.start_path, if it is set."""
    config, path = shared.config, shared.config.task.start_path
    if not path:
        return []
    reader = PromptReader(shared.task, shared.tokenizer, config.task.max_prompt_tokens)
    given = load_start_tickets(path, reader, shared.tokenizer, config.search)
    num_given = sum(len(ticket.responses) for ticket in given)
    note(f"{num_given:,} given responses come first, in {len(given):,} groups")
    return given


def _make_owner(
    shared: Shared,
    buffer: ReplayBuffer,
    evaluations: EvaluationQueue,
    given: Sequence[Ticket],
    note: Callable[[str], None],
) -> Owner:
    """Return the owner of the run's tickets, before it is restored."""
    config = shared.config
    max_staleness = config.replay.max_staleness
    steps = Steps(
        StepSettings(
            num_steps=config.num_steps,
            sync_period=config.sync_period,
            checkpoint_period=config.checkpoint.period,
            # Without newer weights a bound would admit no tickets, and no step would follow.
            needs_versions=max_staleness > 0,
            processes=shared.cluster.members[1:],
            timeout_s=config.log.watchdog_s,
        ),
        buffer,
        make_layout(config, shared.tokenizer, shared.sites.trainer.mesh),
    )
    settings = OwnerSettings(
        epoch=uuid.uuid4().hex,
        identity=shared.identity,
        num_searchers=shared.sites.num_searchers,
        num_local=len(shared.sites.searchers),
        num_prompts=config.batch.num_prompts,
        share=config.replay.recency_prob,
        max_staleness=max_staleness if config.driver == "async" else 0,
        initial_fill=config.search.initial_fill,
        samples_per_prompt=config.search.samples_per_prompt,
        heartbeat_timeout_s=HEARTBEAT_S,
    )
    reader = make_reader(config, shared.task, shared.tokenizer)
    return Owner(
        settings,
        buffer,
        Prompts(reader, config.seed).from_number,
        evaluations,
        steps,
        given=given,
        clock=time.monotonic,
        run_clock=shared.clock,
        log=note,
    )
