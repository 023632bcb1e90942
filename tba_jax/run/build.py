# SPDX-License-Identifier: Apache-2.0
"""Assembly of a run: initial weights or checkpoint, programs compiled ahead of time, all parts.

Invariants: the reference model never shares buffers with the trained parameters, because a train
step donates its inputs. Compiling ahead of time changes no result: a program that does not fit the
first batch is not used.
"""

import contextlib
import dataclasses
import functools
import os
import time
import uuid
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tba_jax.config.resolved import writes_versions
from tba_jax.config.schema import Config
from tba_jax.devices.cluster import Cluster
from tba_jax.devices.precompilation import Precompiler
from tba_jax.flow.layout import Batch, RowLayout
from tba_jax.flow.trajectory import Draw, Prompt, Trajectory
from tba_jax.models import lora
from tba_jax.models.transformer import abstract_params
from tba_jax.remote.channel import HEARTBEAT_S
from tba_jax.remote.client import Client
from tba_jax.remote.evaluation_queue import EvaluationQueue
from tba_jax.remote.owner import Owner, OwnerSettings
from tba_jax.remote.steps import Steps, StepSettings
from tba_jax.replay.buffer import ReplayBuffer
from tba_jax.report.writers import ProgressDisplay
from tba_jax.run.host_state import HostState, RunClock, check_facts
from tba_jax.run.model_parts import (
    abstract_state,
    make_buffer,
    make_layout,
    make_publication_program,
    make_rate,
    make_step_settings,
    make_step_shardings,
)
from tba_jax.run.peers import OwnerServer, Peer
from tba_jax.run.run import COMPILED_S, Run, forget_after, open_logs
from tba_jax.run.search_parts import (
    build_judging,
    build_searchers,
    make_evaluator,
    make_prompts,
    make_reader,
    make_weight_folder,
    make_weights,
    read_start_tickets,
)
from tba_jax.run.shared import Shared, all_problems, functions, open_shared, try_reward
from tba_jax.search.prompts import load_grain
from tba_jax.search.searcher import Searcher
from tba_jax.tasks.registry import entry_of
from tba_jax.train.optimizers import make_optimizer
from tba_jax.train.state import StepShardings, TrainState, make_init_state
from tba_jax.train.step import make_reference_pass, make_train_step
from tba_jax.train.trainer import Trainer
from tba_jax.weights.folder import WeightFolder
from tba_jax.weights.memory import Weights

SHORT_TOKENS = 64
"""Length in tokens up to which most responses to a prompt are expected to be equal."""
PUBLICATION = "publication"
"""Job name of the publish program in the `Precompiler`."""


def check_prompts(
    shared: Shared, phase: Callable[[str], None], note: Callable[[str], None]
) -> None:
    """Read the training prompts of a new run, and report prompts that are too long.

    Args:
        shared: parts of the run; only the first process reads the prompts.

    Raises:
        ValueError: prompts are too long, or cannot be read.
    """
    task = shared.config.task
    if entry_of(task.name).makes_problems or not shared.cluster.is_primary:
        return
    phase(f"checking {shared.task.train_size():,} prompts")
    for line in make_reader(shared.config, shared.task, shared.tokenizer).check_all():
        note(line)


def check_rewards(shared: Shared) -> None:
    """Try the reward functions of a run on one row.

    This process tries the functions even if only other processes will call them, so that an error
    appears early.

    Raises:
        ValueError, RewardFailure, RuntimeError: a reward cannot be used.
    """
    shared.rewards.check()
    if shared.cluster.is_primary and shared.rewards.server is not None:
        shared.rewards.server.unload_earlier()
    if shared.cluster.is_primary and not shared.sites.searchers:
        for function in functions(shared.config):
            try_reward(shared.config, function, shared.task)


class StepProgram(NamedTuple):
    """The jitted train step of a run, the pass of its reference, and shardings of the arguments."""

    program: Any
    reference: Any
    shardings: StepShardings


def make_step_program(shared: Shared) -> StepProgram:
    """Return the jitted train step; compilation happens later."""
    config = shared.config
    shardings = make_step_shardings(config, shared.model.config, shared.sites.trainer.mesh)
    settings = make_step_settings(config, shared.tokenizer.eos_ids, shared.sites.trainer.mesh)
    optimizer, rate = make_optimizer(config.optimizer), make_rate(config)
    program = make_train_step(shared.policy, optimizer, rate, settings, shardings)
    reference = make_reference_pass(shared.policy, settings, shardings)
    return StepProgram(program, reference, shardings)


def compile_ahead(shared: Shared, step: StepProgram, publish: Any) -> Precompiler:
    """Compile the publish program and the train step of the likely first batches in the background.

    Nothing is compiled ahead of time in three cases: with driver=sync, whose only thread would
    wait; with several hosts, which must compile in the same order; and with several padded lengths.
    """
    config = shared.config
    is_alone = shared.cluster.num_processes == 1
    mesh = shared.sites.trainer.mesh
    layout = make_layout(config, shared.tokenizer, mesh)
    has_one_length = layout.padding.num_shapes == 1 or layout.row_length
    if config.driver != "async" or not is_alone or not has_one_length:
        return Precompiler({}).start()
    load_grain()
    batch = first_batch(config, layout)
    jobs: dict[Hashable, Any] = {
        PUBLICATION: functools.partial(_lower_publication, shared, publish),
        step_job(batch): functools.partial(_lower_step, shared, step, batch),
    }
    return Precompiler(jobs).start()


def _lower_step(shared: Shared, step: StepProgram, batch: Batch) -> jax.stages.Lowered:
    config, model = shared.config, shared.model.config
    state = abstract_state(config, model, shared.sites.trainer.mesh)

    def abstract(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    batch = batch._replace(missing=None)
    rows = jax.tree.map(abstract, batch, step.shardings.of_batch(batch))
    frozen = ()
    if step.shardings.base is not None:
        params = abstract_params(model, jnp.dtype(config.model.param_dtype))
        frozen = (jax.tree.map(abstract, params, step.shardings.base),)
    return step.program.lower(state, rows, *frozen)


def _lower_publication(shared: Shared, publish: Any) -> jax.stages.Lowered:
    config, model = shared.config, shared.model.config
    return publish.lower(abstract_state(config, model, shared.sites.trainer.mesh).params)


def first_batch(config: Config, layout: RowLayout) -> Batch:
    """Return an artificial batch with the likely shape of the first batch.

    Each distinct response takes one row. A quarter of short responses, and all long responses, are
    assumed to be distinct.
    """
    prompts, size = layout.num_prompts, layout.group_size
    is_short = config.search.max_new_tokens <= SHORT_TOKENS
    distinct = max(1, size // 4) if is_short else size
    tokens = np.zeros(config.task.max_prompt_tokens, np.int32)
    length = config.search.max_new_tokens
    response = Trajectory(
        prompt_id=0,
        response_tokens=np.zeros(length, np.int32),
        reward=0.0,
        reward_parts={},
        behavior_token_logprobs=np.zeros(length, np.float32),
        version_min=0,
        version_max=0,
        searcher=0,
        ticket=0,
        sampling_temperature=layout.policy_temperature,
        finish_reason="length",
        is_sampled=np.ones(length, bool) if config.task.environment else None,
        token_advantages=np.zeros(length, np.float32) if layout.has_advantages else None,
    )

    def response_of(j: int) -> Trajectory:
        """Return a response that equals another one from `distinct` on."""
        tokens = np.zeros(length, np.int32)
        tokens[0] = j % distinct
        return dataclasses.replace(response, response_tokens=tokens)

    responses = tuple(response_of(j) for j in range(size))
    draw = Draw(
        prompt=Prompt(0, "", tokens, {}), trajectories=responses, is_fresh=True, ids=(0,) * size
    )
    return layout.batch([draw] * prompts, 0)


@dataclasses.dataclass(frozen=True)
class Start:
    """Weights and saved state with which a process of the run starts.

    Attributes:
        state: the train state, initial or restored.
        base: frozen parameters below the adapters; None if all parameters are trained.
        step: step of the restored checkpoint; 0 for a new run.
        host_state: host state of that checkpoint (`Checkpoints.restore`); None for a new run.
    """

    state: TrainState
    base: Any
    step: int = 0
    host_state: HostState | None = None


def open_start(
    shared: Shared,
    phase: Callable[[str], None],
    note: Callable[[str], None],
) -> Start:
    """Load the model, and restore the newest checkpoint of the work directory if there is one.

    Args:
        shared: parts of the run; all processes of the run call this function.
        note: function that displays one line for each loss of data.

    Raises:
        ValueError: weights or prompts are not usable.
        CheckpointError: the newest checkpoint is damaged, or belongs to another run.
    """
    config, sites, model = shared.config, shared.sites, shared.model
    policy, mesh = shared.policy, sites.trainer.mesh
    has_adapters = policy.adapters is not None
    shardings = make_step_shardings(config, model.config, mesh)
    newest = _newest_intact(shared)
    if newest is None:
        check_prompts(shared, phase, note)
    params, base = None, None
    if newest is None or has_adapters:
        phase("loading the model")
        params = model.load_params(
            param_dtype=jnp.dtype(config.model.param_dtype),
            shardings=shardings.base if has_adapters else shardings.state.params,
        )
    if has_adapters:
        base = params
        params = lora.init_adapters(policy, config.seed, shardings.state.params)
    if newest is None:
        optimizer = make_optimizer(config.optimizer)
        return Start(make_init_state(optimizer, shardings)(params), base)
    del params
    phase("restoring the newest checkpoint")
    target = abstract_state(config, model.config, mesh)
    _, state, host_state = shared.checkpoints.restore(target, newest)
    check_facts(newest, host_state.facts, shared.facts)
    state = state if isinstance(state, TrainState) else TrainState(*state)
    return Start(state, base, newest, host_state)


def _newest_intact(shared: Shared) -> int | None:
    """Return the step of the newest checkpoint, whose files are intact; None without checkpoints.

    All processes call this function, and each process checks a share of the files.

    Raises:
        CheckpointError: the checkpoint is damaged; raised in all processes.
    """
    checkpoints, cluster = shared.checkpoints, shared.cluster
    # Only one process lists the folder, because another host might see a newer checkpoint.
    step = cluster.broadcast_json(checkpoints.newest())
    if step is None:
        return None
    share = (cluster.process_id, cluster.num_processes)
    found = sum(cluster.gather_json(checkpoints.damage(step, share=share)), [])
    if found:
        raise checkpoints.damaged(step, found)
    return step


def build_trainer(
    shared: Shared,
    *,
    step: StepProgram,
    ahead: Precompiler,
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
    site, shardings = shared.sites.trainer, step.shardings
    program, score = site.locked(step.program), site.locked(step.reference)
    is_alone = shared.cluster.num_processes == 1
    frozen = () if base is None else (base,)

    def train_step(
        state: TrainState, batch: Batch
    ) -> tuple[TrainState, dict[str, Any], Array | None]:
        ahead.wait(step_job(batch))
        if is_alone:
            placed = jax.device_put(batch, shardings.of_batch(batch))
        else:  # every process has all rows, and each device copies its own rows
            placed = jax.tree.map(_from_whole, batch, shardings.of_batch(batch))
        reference = None
        if batch.missing is not None:
            reference = score(state.reference_params, placed, *frozen)
            placed = placed._replace(reference=reference, missing=None)
        return *program(state, placed, *frozen), reference

    return Trainer(
        state=state,
        train_step=train_step,
        weights=weights,
        # After a reset, log-probs that were stored would be those of another reference.
        keep_references=None if shared.config.reference.reset_period else buffer.keep_references,
        clock=shared.clock,
    )


def make_steps(shared: Shared, buffer: ReplayBuffer) -> Steps:
    """Return the decisions on the steps of all trainer processes."""
    config = shared.config
    settings = StepSettings(
        num_steps=config.num_steps,
        sync_period=config.sync_period,
        checkpoint_period=config.checkpoint.period,
        # Without newer weights a bound would admit no tickets, and no step would follow.
        needs_versions=config.replay.max_staleness > 0,
        processes=shared.cluster.members[1:],
        timeout_s=config.log.watchdog_s,
    )
    layout = make_layout(config, shared.tokenizer, shared.sites.trainer.mesh)
    return Steps(settings, buffer, layout)


def step_job(batch: Batch) -> tuple[str, tuple[int, ...]]:
    """Return the name of the job that compiles the train step for this batch."""
    per_row = () if batch.response_lengths is None else batch.response_lengths.shape
    return "train_step", (*batch.tokens.shape, *per_row)


def _from_whole(array: np.ndarray, sharding: jax.sharding.Sharding) -> Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def build(
    config: Config,
    workdir: str | os.PathLike[str],
    *,
    cluster: Cluster,
    clock: RunClock,
    progress: ProgressDisplay,
    extra_writers: Sequence[Any] = (),
    link: Peer | None = None,
) -> Run:
    """Build every part of a run and restore the newest checkpoint of its work directory.

    Args:
        cluster: the processes of the run; all of them call this function.

    Raises:
        ConfigError, PlacementError: the devices do not fit the placement.
        ValueError: the model folder, the data or a reward function is not usable.
    """
    with all_problems(config):
        shared = open_shared(config, workdir, cluster=cluster, clock=clock, note=progress.note)
    step = make_step_program(shared)
    publish = make_publication_program(config, shared.model.config, shared.sites.publication.mesh)
    ahead = compile_ahead(shared, step, publish)
    with contextlib.ExitStack() as undo:
        undo.callback(ahead.close, COMPILED_S)
        with all_problems(config):  # runs before weights are read, while programs are compiled
            check_rewards(shared)
        start = open_start(shared, progress.phase, progress.note)
        logs = open_logs(shared.workdir, cluster, progress, list(extra_writers))
        judging = build_judging(shared)
        evaluator = make_evaluator(config, shared.task, shared.tokenizer, judging.metrics)
        if (skipped := evaluator.num_skipped) > 0:
            progress.note(
                f"{skipped} held-out prompts exceed task.max_prompt_tokens and are skipped"
            )
        evaluations = EvaluationQueue(evaluator, clock)
        publishing = ahead.after(PUBLICATION, publish)
        weights = _open_weights(shared, start, publishing, lambda: evaluations.versions)
        search = build_searchers(shared, weights, judging)
        buffer = make_buffer(config)
        trainer = build_trainer(
            shared,
            step=step,
            ahead=ahead,
            state=start.state,
            base=start.base,
            buffer=buffer,
            weights=weights,
        )
        owner, searchers = None, ()
        if not shared.is_follower:
            owner = make_owner(shared, buffer, evaluations, start, progress.note)
            searchers = tuple(Searcher(parts, owner) for parts in search.parts)
        parts = (search, buffer, trainer, evaluator, weights, owner, searchers, logs, ahead)
        server = link if isinstance(link, OwnerServer) else None
        client = link if isinstance(link, Client) else None
        run = Run(shared, *parts, server=server, client=client)
        restore(run, start.host_state)
        undo.pop_all()
        return run


def _open_weights(
    shared: Shared,
    start: Start,
    publish: Callable[[Any], Any],
    kept: Callable[[], Collection[int]],
) -> Weights | WeightFolder:
    """Return the weights that a trainer process publishes: in memory, or as files.

    Args:
        kept: returns the versions under evaluation, which stay on disk.
    """
    if writes_versions(shared.config):
        return make_weight_folder(shared, publish, kept)
    return make_weights(shared, start.base, publish)


def make_owner(
    shared: Shared,
    buffer: ReplayBuffer,
    evaluations: EvaluationQueue,
    start: Start,
    note: Callable[[str], None],
) -> Owner:
    """Return the owner of the run's tickets, before it is restored."""
    config = shared.config
    # A checkpoint of a later step has the results of all given responses.
    given = read_start_tickets(shared) if start.step == 0 else []
    if given:
        num_given = sum(len(ticket.responses) for ticket in given)
        note(f"{num_given:,} given responses come first, in {len(given):,} groups")
    settings = OwnerSettings(
        epoch=uuid.uuid4().hex,
        identity=shared.identity,
        num_searchers=shared.sites.num_searchers,
        num_local=len(shared.sites.searchers),
        num_prompts=config.batch.num_prompts,
        share=config.replay.recency_prob,
        max_staleness=config.replay.max_staleness if config.driver == "async" else 0,
        initial_fill=config.search.initial_fill,
        samples_per_prompt=config.search.samples_per_prompt,
        heartbeat_timeout_s=HEARTBEAT_S,
    )
    return Owner(
        settings,
        buffer,
        make_prompts(shared).from_number,
        evaluations,
        make_steps(shared, buffer),
        given=given,
        clock=time.monotonic,
        run_clock=shared.clock,
        log=note,
    )


def restore(run: Run, saved: HostState | None) -> None:
    """Restore the host state from a checkpoint, and drop log lines of later steps.

    Args:
        run: a run whose train state is already restored.
        saved: host state that `Checkpoints.restore` returned; None for a new run.
    """
    shared = run.shared
    if shared.is_follower:
        run.last_saved_step = run.trainer.step_index if saved is not None else -1
    elif saved is not None:
        run.restore(saved)
    # Every process keeps the weights of the versions that the owner evaluates.
    run.evaluated.last_eval_step = shared.cluster.broadcast_json(run.evaluated.last_eval_step)
    forget_after(run, run.trainer.step_index)
