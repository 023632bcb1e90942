# SPDX-License-Identifier: Apache-2.0
"""Run: the connected parts of one run, and what all drivers do with them.

Invariant: `restore` restores everything that `save` saves (tests/integration/test_sync_loop.py).
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tba_jax.config.advice import Advice
from tba_jax.config.schema import Config
from tba_jax.devices.platform import return_free_memory
from tba_jax.devices.worker import StopFlag
from tba_jax.evaluation.evaluator import Evaluator
from tba_jax.flow.state import PartState
from tba_jax.remote.channel import ChannelServer
from tba_jax.remote.client import Client
from tba_jax.remote.owner import Owner
from tba_jax.replay.buffer import ReplayBuffer
from tba_jax.run.checkpoint import Checkpoints
from tba_jax.run.errors import CheckpointError
from tba_jax.run.records import MOST_RESPONSES, Logs
from tba_jax.run.shared import RunClock, Shared
from tba_jax.search.searcher import Searcher, SearchParts
from tba_jax.train.trainer import Trainer
from tba_jax.weights.folder import WeightFolder
from tba_jax.weights.memory import Weights


@dataclasses.dataclass
class Evaluated:
    """First and newest evaluation of a run, with sample texts, for the report.

    `last_eval_step` is the step of the newest evaluation; -1 before the first.
    """

    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None
    last_eval_step: int = -1

    def state(self) -> PartState:
        return PartState({}, dict(vars(self)))

    def restore(self, state: PartState) -> None:
        vars(self).update(state.meta)


@dataclasses.dataclass
class Run:
    """The connected parts of one run in a trainer process.

    Attributes:
        shared: parts that searchers without a trainer use, too.
        parts: parts of the searchers of this process.
        weights: the weights that this process publishes.
        owner: tickets and evaluations of the run; None in a process that does not own the buffer.
        searchers: searchers of this process that take tickets from `owner`.
        server: channel server of the owner's process; None without other processes.
        client: connection to the owner in another process; None in the owner's process.
        last_saved_step: step of the newest checkpoint; -1 before the first.
        hold: flag of the work directory's lock; None if another process holds it.
        callbacks: functions of the user, called with (step, values), that return additional values.
        advice: finds causes of a slow run and of a run that does not learn.
    """

    shared: Shared
    checkpoints: Checkpoints
    parts: tuple[SearchParts, ...]
    buffer: ReplayBuffer
    trainer: Trainer
    evaluator: Evaluator
    weights: Weights | WeightFolder
    owner: Owner | None
    searchers: tuple[Searcher, ...]
    logs: Logs
    server: ChannelServer | None = None
    client: Client | None = None
    evaluated: Evaluated = dataclasses.field(default_factory=Evaluated)
    last_saved_step: int = -1
    hold: StopFlag | None = None
    callbacks: Callable[[int, Mapping[str, Any]], dict[str, float]] = lambda step, values: {}
    advice: Advice = dataclasses.field(default_factory=Advice)

    @property
    def config(self) -> Config:
        return self.shared.config

    @property
    def clock(self) -> RunClock:
        return self.shared.clock

    def _saveables(self) -> dict[str, Any]:
        """Return all parts with host state, by name."""
        return {
            "buffer": self.buffer,
            **({} if self.owner is None else {"owner": self.owner}),
            "trainer": self.trainer.counters,
            "clock": self.clock,
            "evaluations": self.evaluated,
        }

    def save(self) -> None:
        """Start an asynchronous checkpoint of the trainer's step, unless the step has one.

        All processes of the run call this method.
        """
        step = self.trainer.step_index
        if step != self.last_saved_step:
            states = {name: part.state() for name, part in self._saveables().items()}
            # The save copies the train state before it returns; the next step donates it.
            self.checkpoints.save(step, self.trainer.state, states)
            self.last_saved_step = step
            return_free_memory()

    def restore(self, step: int | None) -> None:
        """Restore the host state of a checkpoint, and drop log lines of work after it.

        All processes of the run call this method.

        Args:
            step: step of the checkpoint, whose train state is restored already; None: a new run.
        """
        if step is not None:
            self.last_saved_step = step
            if self.owner is not None:
                saved = self.checkpoints.host_state(step)
                for name, part in self._saveables().items():
                    part.restore(saved[name])
        # Every process keeps the weights of the versions that the owner evaluates.
        last = self.shared.cluster.broadcast_json(self.evaluated.last_eval_step)
        self.evaluated.last_eval_step = last
        newest = self.trainer.step_index

        def is_kept(record: Mapping[str, Any]) -> bool:
            is_evaluation = "eval/n" in record or record.get("of") == "eval"
            return record["step"] <= (last if is_evaluation else newest)

        self.logs.cut_back(is_kept)

    def record_evaluations(self) -> bool:
        """Record finished evaluations; return whether there were any."""
        if self.owner is None:
            return False
        finished, known = self.owner.evaluations.poll(), self.evaluated
        for step, evaluation in finished:
            values = evaluation.metrics()
            line = {f"eval/{name}": value for name, value in values.items()}
            self.logs.metrics.write(step, {"time_s": self.clock(), **line, "eval/version": step})
            self.logs.add_evaluation(step, evaluation, self.evaluator.prompts)
            texts, rewards = evaluation.texts[:MOST_RESPONSES], evaluation.rewards[:MOST_RESPONSES]
            record = {**values, "step": step, "texts": texts, "rewards": rewards}
            known.before, known.after = known.before or record, record
            known.last_eval_step = max(known.last_eval_step, step)
        if finished:
            self.weights.keep_only(self.owner.evaluations.versions)
        return bool(finished)

    def is_evaluation_due(self, step: int, newest: int) -> bool:
        """Return whether the version published at `step` must be evaluated.

        Args:
            newest: version of the last requested evaluation; -1 before the first request.
        """
        if newest < 0:
            return True
        period = self.config.eval.period
        return bool(period) and step // period > newest // period and step < self.config.num_steps

    def fleet_metrics(self) -> dict[str, float]:
        """Return metrics of the searchers of other processes by name; {} without them."""
        return self.owner.metrics() if self.owner and self.owner.remote_searchers else {}

    def abort(self) -> None:
        """Release processes and threads after a failure, with a short wait for storage.

        An incomplete save stays invisible, and the next start removes it.
        """
        self.shared.rewards.close()
        with contextlib.suppress(CheckpointError):
            self.checkpoints.wait(timeout_s=30.0)
        self.logs.close()

    def close(self) -> None:
        """Complete pending writes, then release processes, threads and files."""
        self.shared.rewards.close()
        if isinstance(self.weights, WeightFolder):
            self.weights.close()
        self.checkpoints.close()
        self.logs.close()
