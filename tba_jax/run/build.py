# SPDX-License-Identifier: Apache-2.0
"""A run: its connected parts, and their assembly from the config, new or from a checkpoint.

Invariants: a new `Run` restores everything that `save` saves (tests/integration/test_runs.py).
The reference model never shares buffers with the trained parameters, because a train step donates
its inputs.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tba_jax.config.advice import Advice
from tba_jax.config.resolved import writes_versions
from tba_jax.config.schema import Config
from tba_jax.devices.cluster import Cluster
from tba_jax.devices.platform import return_free_memory
from tba_jax.devices.worker import StopFlag
from tba_jax.flow.layout import Batch
from tba_jax.models import lora
from tba_jax.remote.channel import ChannelServer
from tba_jax.remote.client import Client
from tba_jax.remote.evaluation_queue import EvaluationQueue
from tba_jax.remote.owner import Owner, OwnerSettings
from tba_jax.replay.buffer import ReplayBuffer
from tba_jax.report.progress import ProgressDisplay
from tba_jax.rewards.functions import try_functions
from tba_jax.run import model_parts
from tba_jax.run.checkpoint import Checkpoints
from tba_jax.run.errors import CheckpointError
from tba_jax.run.records import Logs
from tba_jax.run.shared import RunClock, Shared, make_arrival, make_evaluator, make_searchers
from tba_jax.run.workdir import run_id_of, storage_of, upload
from tba_jax.search.prompts import PromptReader, Prompts
from tba_jax.search.start_data import load_start_tickets
from tba_jax.storage.steps import delete_own
from tba_jax.train.optimizers import make_optimizer
from tba_jax.train.state import StepShardings, TrainState, make_init_state
from tba_jax.train.trainer import Trainer, TrainStep
from tba_jax.weights.folder import FOLDER, WeightFolder
from tba_jax.weights.memory import Weights


class Run:
    """The connected parts of one run in a trainer process, new or from the newest checkpoint.

    Args:
        cluster: the trainer processes of the run; all of them make this object.
        writers: further writers of metrics.
        link: connection to the other processes; None if there is only one process.
        hold: flag of the work directory's lock; None if another process holds it.
        callbacks: function of (step, values) that returns further metrics (`records.combined`).

    Attributes:
        parts: parts of the searchers of this process.
        owner: tickets and evaluations of the run; None in a process that does not own the buffer.
        server: channel server of the owner's process; None without other processes.
        client: connection to the owner in another process; None in the owner's process.
        last_saved_step: step of the newest checkpoint; -1 before the first.
        last_eval_step: version of the newest evaluation in metrics.jsonl; -1 before the first.
        advice: finds causes of a slow run and of a run that does not learn.

    Raises:
        ConfigError, PlacementError, ValueError, RewardFailure: as `Shared`.
        CheckpointError: the newest checkpoint is damaged, or belongs to another run.
    """

    def __init__(
        self,
        config: Config,
        workdir: Path,
        cluster: Cluster,
        clock: RunClock,
        progress: ProgressDisplay,
        *,
        writers: Sequence[Any],
        link: ChannelServer | Client | None,
        hold: StopFlag | None,
        callbacks: Callable[[int, Mapping[str, Any]], dict[str, float]],
    ) -> None:
        self.config, self.clock, self.hold, self.callbacks = config, clock, hold, callbacks
        self.server = link if isinstance(link, ChannelServer) else None
        self.client = link if isinstance(link, Client) else None
        self.last_saved_step = self.last_eval_step = -1
        self.advice = Advice()
        self.shared = shared = Shared(config, workdir, cluster, note=progress.note)
        task, tokenizer, run_id = shared.task, shared.tokenizer, run_id_of(shared.workdir)
        prompts = Prompts(PromptReader(task, tokenizer, config.task.max_prompt_tokens), config.seed)
        shared.check()  # they are tried while `Prompts` imports Grain
        if cluster.is_primary and not shared.sites.searchers:  # other processes grade
            try_functions(config, task)
        self.checkpoints = Checkpoints(
            storage_of(shared.workdir),
            before_commit=functools.partial(upload, shared.workdir),
            run_id=run_id,
            members=cluster.members,
        )
        step = self.checkpoints.newest_intact(cluster)
        if step is None and cluster.is_primary and not task.makes_problems:
            progress.phase(f"checking {task.size('train'):,} prompts")
            for line in prompts.reader.check_all():
                progress.note(line)
        mesh = shared.sites.trainer.mesh
        shardings = model_parts.make_step_shardings(config, shared.model.config, mesh)
        state, base = self._start_state(shardings, step, progress.phase)
        self.evaluator = make_evaluator(config, prompts.reader)
        if number := self.evaluator.num_skipped:
            why = "exceed task.max_prompt_tokens and are skipped"
            progress.note(f"{number} held-out prompts {why}")
        evaluations = EvaluationQueue(self.evaluator)
        self.weights = _make_weights(shared, base, evaluations)
        self.parts = make_searchers(shared, self.weights)
        # With driver=sync a wait for fresh responses would never end: the same thread makes them.
        pace = config.replay.pace if config.driver == "async" else "off"
        self.buffer = ReplayBuffer(dataclasses.replace(config.replay, pace=pace), config.seed)
        self.owner: Owner | None = None
        if cluster.is_primary:
            # A checkpoint of a later step has the results of all given responses.
            given = "" if step else config.task.start_path
            self.owner = self._make_owner(evaluations, prompts, given, progress.note)
        # Parts with host state, in the process that saves them.
        parts = {"buffer": self.buffer, "owner": self.owner, "clock": clock}
        self._saved: dict[str, Any] = parts if self.owner else {}
        self.trainer = Trainer(
            state=state,
            train_step=_make_train_step(shared, shardings, base),
            weights=self.weights,
            # After a reset, log-probs that were stored would be those of another reference.
            keep_references=None if config.reference.reset_period else self.buffer.keep_references,
            clock=clock,
        )
        options = cluster.is_primary, progress, tokenizer, config.num_steps, writers
        self.logs = Logs(shared.workdir, *options)
        self._restore(step)

    def _start_state(
        self, shardings: StepShardings, step: int | None, phase: Callable[[str], None]
    ) -> tuple[TrainState, Any]:
        """Return the train state, and the frozen parameters under adapters or None.

        `step` is that of a checkpoint; None: start from the model.
        """
        config, shared = self.config, self.shared
        has_adapters = shared.policy.adapters is not None
        trained, params = shardings.state.params, None
        if step is None or has_adapters:
            phase("loading the model")
            params = shared.model.load_params(
                param_dtype=jnp.dtype(config.model.param_dtype),
                shardings=shardings.base if has_adapters else trained,
            )
        base = params if has_adapters else None
        if step is None:
            if has_adapters:
                params = lora.init_adapters(shared.policy, config.seed, trained)
            return make_init_state(make_optimizer(config.optimizer), shardings)(params), base
        phase("restoring the newest checkpoint")
        return TrainState(*self.checkpoints.read(step, shardings.abstract)), base

    def _make_owner(
        self,
        evaluations: EvaluationQueue,
        prompts: Prompts,
        given_path: str,
        note: Callable[[str], None],
    ) -> Owner:
        """Return the owner of the run's tickets; given responses, if there are any, come first."""
        config, sites, weights = self.config, self.shared.sites, self.weights
        given, tokenizer = [], self.shared.tokenizer
        if given_path:
            given = load_start_tickets(given_path, prompts.reader, tokenizer, config.search)
            num_given = sum(len(ticket.responses) for ticket in given)
            note(f"{num_given:,} given responses come first, in {len(given):,} groups")
        settings = OwnerSettings(
            identity=self.shared.identity,
            num_searchers=sites.num_searchers,
            num_local=len(sites.searchers),
            share=config.replay.recency_prob,
            max_staleness=config.replay.max_staleness,
            initial_fill=config.search.initial_fill,
            samples_per_prompt=config.search.samples_per_prompt,
        )
        return Owner(
            settings,
            self.buffer,
            prompts.from_number,
            evaluations,
            model_parts.make_layout(config, tokenizer, sites.trainer.mesh),
            given=given,
            # Without newer weights a bound would admit no tickets, and no step would follow.
            is_publishing=None if config.replay.max_staleness else lambda: weights.is_publishing,
            log=note,
        )

    def save(self) -> None:
        """Start a checkpoint of the trainer's step, unless it has one; all processes call this."""
        step = self.trainer.step_index
        if step != self.last_saved_step:
            states = {name: part.state() for name, part in self._saved.items()}
            # The save copies the train state before it returns; the next step donates it.
            self.checkpoints.save(step, self.trainer.state, states)
            self.last_saved_step = step
            return_free_memory()

    def _restore(self, step: int | None) -> None:
        """Restore the host state of a checkpoint, and drop log lines of work after it.

        All processes call this method. The train state is restored already; step None: a new run.
        """
        if step is not None:
            self.last_saved_step = step
            if self.owner is not None:
                saved = self.checkpoints.host_state(step)
                for name, part in self._saved.items():
                    part.restore(saved[name])
        newest = self.trainer.step_index

        def is_kept(record: Mapping[str, Any]) -> bool:
            if "eval/n" in record and record["step"] <= newest:
                self.last_eval_step = record["step"]
            # metrics.jsonl comes first: responses without its line are of an incomplete evaluation.
            is_evaluation = "eval/n" in record or record.get("of") == "eval"
            return record["step"] <= (self.last_eval_step if is_evaluation else newest)

        self.logs.cut_back(is_kept)
        # Every process keeps the weights of the versions that the owner evaluates.
        self.last_eval_step = self.shared.cluster.broadcast_json(self.last_eval_step)

    def record_evaluations(self) -> bool:
        """Record finished evaluations; return whether there were any."""
        if self.owner is None:
            return False
        finished = self.owner.evaluations.poll()
        for step, evaluation in finished:
            self.logs.add_evaluation(step, evaluation, self.evaluator.prompts)
            line = {f"eval/{name}": value for name, value in evaluation.metrics().items()}
            self.logs.metrics.write(step, {"time_s": self.clock(), **line, "eval/version": step})
            self.last_eval_step = step
        if finished:
            self.weights.keep_only(self.owner.evaluations.versions)
        return bool(finished)

    def close(self, *, has_failed: bool = False) -> None:
        """Complete pending writes, and release processes, threads and files.

        After a failure, the wait for storage is short; an incomplete save stays invisible.
        """
        self.shared.close()
        if has_failed:
            with contextlib.suppress(CheckpointError):
                self.checkpoints.wait(timeout_s=30.0)
        else:
            if isinstance(self.weights, WeightFolder):
                self.weights.close()
            self.checkpoints.close()
        self.logs.close()


def _make_weights(
    shared: Shared, base: Any, evaluations: EvaluationQueue
) -> Weights | WeightFolder:
    """Make the destination of published weights: memory, or a folder of versions."""
    sites, cluster = shared.sites, shared.cluster
    publish = model_parts.make_publication_program(
        shared.config, shared.model.config, sites.publication.mesh
    )
    if not writes_versions(shared.config):
        return Weights(sites.trainer.locked(publish), *make_arrival(shared, base))
    storage = storage_of(shared.workdir)
    if cluster.is_primary:  # steps are made again, and their versions with them
        delete_own(storage / FOLDER, run_id_of(shared.workdir))
    cluster.broadcast_json(None)  # the others list the folder after that
    options = {"run_id": run_id_of(shared.workdir), "members": cluster.members}
    return WeightFolder(storage, publish, wanted=lambda: evaluations.versions, **options)


def _make_train_step(shared: Shared, shardings: StepShardings, base: Any) -> TrainStep:
    """Return the train step of a process, which donates the state; `base` is frozen."""
    programs = model_parts.make_step_programs(
        shared.config, shared.policy, shared.tokenizer, shardings
    )
    update, score = map(shared.sites.trainer.locked, programs)
    frozen = () if base is None else (base,)

    def place(array: np.ndarray, where: jax.sharding.Sharding) -> Array:
        # Every process has all rows, and each device copies its own rows.
        return jax.make_array_from_callback(array.shape, where, lambda index: array[index])

    def train_step(
        state: TrainState, batch: Batch
    ) -> tuple[TrainState, dict[str, Any], Array | None]:
        placed, reference = jax.tree.map(place, batch, shardings.of_batch(batch)), None
        if batch.missing is not None:
            reference = score(state.reference_params, placed, *frozen)
            placed = placed._replace(reference=reference, missing=None)
        return *update(state, placed, *frozen), reference

    return train_step
