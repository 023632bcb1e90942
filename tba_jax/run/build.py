# SPDX-License-Identifier: Apache-2.0
"""Assembly of a run: from the config to all its parts, new or restored from a checkpoint.

Invariant: the reference model never shares buffers with the trained parameters, because a train
step donates its inputs.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
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
from tba_jax.models import lora
from tba_jax.remote.channel import ChannelServer
from tba_jax.remote.client import Client
from tba_jax.remote.evaluation_queue import EvaluationQueue
from tba_jax.remote.owner import Owner, OwnerSettings
from tba_jax.replay.buffer import ReplayBuffer
from tba_jax.report.progress import ProgressDisplay
from tba_jax.run import model_parts, task_parts
from tba_jax.run.checkpoint import Checkpoints
from tba_jax.run.object_store import storage_of, upload
from tba_jax.run.records import Logs
from tba_jax.run.run_state import Run
from tba_jax.run.shared import RunClock, Shared, make_arrival, make_searchers, open_shared
from tba_jax.search.prompts import PromptReader, Prompts
from tba_jax.search.searcher import Searcher
from tba_jax.search.start_data import load_start_tickets
from tba_jax.storage.steps import delete_own
from tba_jax.train.optimizers import make_optimizer
from tba_jax.train.state import StepShardings, TrainState, make_init_state
from tba_jax.train.trainer import Trainer, TrainStep
from tba_jax.weights.folder import FOLDER, WeightFolder
from tba_jax.weights.memory import Weights


def build(
    config: Config,
    workdir: Path,
    cluster: Cluster,
    clock: RunClock,
    progress: ProgressDisplay,
    *,
    writers: Sequence[Any] = (),
    link: ChannelServer | Client | None = None,
) -> Run:
    """Build every part of a run and restore the newest checkpoint of its work directory.

    Args:
        cluster: the processes of the run; all of them call this function.
        writers: further writers of metrics.
        link: connection to the other processes; None if there is only one process.

    Raises:
        ConfigError, PlacementError: the devices do not fit the placement.
        ValueError, RewardFailure: the model folder, the data or a reward function is not usable.
        CheckpointError: the newest checkpoint is damaged, or belongs to another run.
    """
    shared = open_shared(config, workdir, cluster=cluster, clock=clock, note=progress.note)
    shared.rewards.check()
    task, tokenizer, is_primary = shared.task, shared.tokenizer, cluster.is_primary
    if is_primary and not shared.sites.searchers:  # other processes grade
        task_parts.try_rewards(config, task)
    checkpoints = Checkpoints(
        storage_of(shared.workdir),
        before_commit=functools.partial(upload, shared.workdir),
        run_id=shared.run_id,
        members=cluster.members,
    )
    step = checkpoints.newest_intact(cluster)
    reader = PromptReader(task, tokenizer, config.task.max_prompt_tokens)
    if step is None and is_primary and not task.makes_problems:
        progress.phase(f"checking {task.size('train'):,} prompts")
        for line in reader.check_all():
            progress.note(line)
    mesh = shared.sites.trainer.mesh
    shardings = model_parts.make_step_shardings(config, shared.model.config, mesh)
    state, base = _start_state(shared, shardings, checkpoints, step, progress.phase)
    evaluator = task_parts.make_evaluator(config, reader)
    if number := evaluator.num_skipped:
        progress.note(f"{number} held-out prompts exceed task.max_prompt_tokens and are skipped")
    evaluations = EvaluationQueue(evaluator)
    weights = _make_weights(shared, base, evaluations)
    parts = make_searchers(shared, weights)
    # With driver=sync, a wait for fresh responses would never end: they come from the same thread.
    pace = config.replay.pace if config.driver == "async" else "off"
    buffer = ReplayBuffer(dataclasses.replace(config.replay, pace=pace), config.seed)
    owner = None
    if is_primary:
        # A checkpoint of a later step has the results of all given responses.
        given_path = "" if step else config.task.start_path
        owner = _make_owner(shared, buffer, evaluations, weights, reader, given_path, progress.note)
    trainer = Trainer(
        state=state,
        train_step=_make_train_step(shared, shardings, base),
        weights=weights,
        # After a reset, log-probs that were stored would be those of another reference.
        keep_references=None if config.reference.reset_period else buffer.keep_references,
        clock=clock,
    )
    run = Run(
        shared=shared,
        checkpoints=checkpoints,
        parts=parts,
        buffer=buffer,
        trainer=trainer,
        evaluator=evaluator,
        weights=weights,
        owner=owner,
        searchers=tuple(Searcher(each, owner) for each in parts) if owner else (),
        logs=Logs(shared.workdir, is_primary, progress, tokenizer, config.num_steps, writers),
        server=link if isinstance(link, ChannelServer) else None,
        client=link if isinstance(link, Client) else None,
    )
    run.restore(step)
    return run


def _start_state(
    shared: Shared,
    shardings: StepShardings,
    checkpoints: Checkpoints,
    step: int | None,
    phase: Callable[[str], None],
) -> tuple[TrainState, Any]:
    """Return the train state, new or restored, and the frozen parameters under adapters or None.

    All processes of the run call this function.

    Args:
        step: step of the checkpoint to restore; None: start from the model.
    """
    config, has_adapters = shared.config, shared.policy.adapters is not None
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
            params = lora.init_adapters(shared.policy, config.seed, shardings.state.params)
        return make_init_state(make_optimizer(config.optimizer), shardings)(params), base
    phase("restoring the newest checkpoint")
    mesh = shared.sites.trainer.mesh
    abstract = model_parts.abstract_state(config, shared.model.config, mesh)
    return TrainState(*checkpoints.read(step, abstract)), base


def _make_weights(
    shared: Shared, base: Any, evaluations: EvaluationQueue
) -> Weights | WeightFolder:
    """Make the weights that a trainer process publishes: in memory, or as files."""
    sites, cluster = shared.sites, shared.cluster
    publish = model_parts.make_publication_program(
        shared.config, shared.model.config, sites.publication.mesh
    )
    if not writes_versions(shared.config):
        return Weights(sites.trainer.locked(publish), *make_arrival(shared, base))
    storage = storage_of(shared.workdir)
    if cluster.is_primary:  # steps are made again, and their versions with them
        delete_own(storage / FOLDER, shared.run_id)
    cluster.broadcast_json(None)  # the others list the folder after that
    options = {"run_id": shared.run_id, "members": cluster.members}
    return WeightFolder(storage, publish, wanted=lambda: evaluations.versions, **options)


def _make_train_step(shared: Shared, shardings: StepShardings, base: Any) -> TrainStep:
    """Return the train step of a process, which donates the state; `base` is frozen."""
    programs = model_parts.make_step_programs(
        shared.config, shared.policy, shared.tokenizer, shardings
    )
    update, score = map(shared.sites.trainer.locked, programs)
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

    return train_step


def _from_whole(array: np.ndarray, sharding: jax.sharding.Sharding) -> Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _make_owner(
    shared: Shared,
    buffer: ReplayBuffer,
    evaluations: EvaluationQueue,
    weights: Weights | WeightFolder,
    reader: PromptReader,
    given_path: str,
    note: Callable[[str], None],
) -> Owner:
    """Return the owner of the run's tickets, before it is restored.

    Args:
        given_path: file of given responses, which come first; "": none.
    """
    config, sites, given = shared.config, shared.sites, []
    if given_path:
        given = load_start_tickets(given_path, reader, shared.tokenizer, config.search)
        num_given = sum(len(ticket.responses) for ticket in given)
        note(f"{num_given:,} given responses come first, in {len(given):,} groups")
    settings = OwnerSettings(
        identity=shared.identity,
        num_searchers=sites.num_searchers,
        num_local=len(sites.searchers),
        has_other_trainers=shared.cluster.num_processes > 1,
        num_prompts=config.batch.num_prompts,
        share=config.replay.recency_prob,
        max_staleness=config.replay.max_staleness if config.driver == "async" else 0,
        initial_fill=config.search.initial_fill,
        samples_per_prompt=config.search.samples_per_prompt,
    )
    return Owner(
        settings,
        buffer,
        Prompts(reader, config.seed).from_number,
        evaluations,
        model_parts.make_layout(config, shared.tokenizer, sites.trainer.mesh),
        given=given,
        # Without newer weights a bound would admit no tickets, and no step would follow.
        is_publishing=None if config.replay.max_staleness else lambda: weights.is_publishing,
        log=note,
    )
