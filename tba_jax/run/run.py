# SPDX-License-Identifier: Apache-2.0
"""Run: the connected parts of one run with their logs, and what all drivers do with them.

Invariant: what `host_state` saves, `restore` puts back.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from tba_jax.config.advice import Advice
from tba_jax.config.schema import Config
from tba_jax.devices.cluster import Cluster
from tba_jax.devices.precompilation import Precompiler
from tba_jax.evaluation.evaluator import Evaluator
from tba_jax.evaluation.service import EvaluationService, Finished
from tba_jax.flow.state import PartState, Saveable
from tba_jax.replay.buffer import ReplayBuffer
from tba_jax.run.host_state import HostState, RunClock
from tba_jax.run.lock import Hold
from tba_jax.run.logs import MOST_RESPONSES, Logs, Samples
from tba_jax.run.peers import Owner, Peer
from tba_jax.run.search_parts import Search
from tba_jax.run.shared import Shared
from tba_jax.train.trainer import Trainer

# Time for a background compilation to end: the interpreter must not exit while a thread runs native
# code.
COMPILED_S = 30.0


@dataclasses.dataclass
class Evaluated:
    """First and newest evaluation of a run, for the report.

    Attributes:
        before: first evaluation with sample texts, None before it.
        after: newest evaluation.
        last_eval_step: step of the newest evaluation, -1 before the first.
    """

    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None
    last_eval_step: int = -1

    def add(self, record: dict[str, Any]) -> None:
        """Add an evaluation."""
        if self.before is None:
            self.before = record
        self.after = record
        self.last_eval_step = max(self.last_eval_step, record["step"])

    def state(self) -> PartState:
        """Return both evaluations and the step."""
        return PartState({}, dict(vars(self)))

    def restore(self, state: PartState) -> None:
        """Restore what `state` returned."""
        vars(self).update(state.meta)


@dataclasses.dataclass
class Run:
    """The connected parts of one run.

    Attributes:
        shared: parts that all others use.
        search: searchers, prompt streams, outboxes and the weight transport of this process.
        ahead: background compiler.
        evaluations: queue of evaluations.
        evaluated: results of evaluations.
        last_saved_step: step of the newest checkpoint, -1 before the first.
        hold: lease of the work directory; None where another process holds it.
        sections: further sections of the report, by key.
        callbacks: functions of the user, called with (step, values), that return more values.
        link: connection to the other processes of the run; None: there are none.
        advice: finds what slows the run or keeps it from learning.
    """

    shared: Shared
    search: Search
    buffer: ReplayBuffer
    trainer: Trainer
    evaluator: Evaluator
    evaluations: EvaluationService
    logs: Logs
    ahead: Precompiler
    evaluated: Evaluated = dataclasses.field(default_factory=Evaluated)
    last_saved_step: int = -1
    hold: Hold | None = None
    sections: dict[str, Callable[[], Any]] = dataclasses.field(default_factory=dict)
    callbacks: Callable[[int, Mapping[str, Any]], dict[str, float]] = lambda step, values: {}
    link: Peer | None = None
    advice: Advice = dataclasses.field(default_factory=Advice)

    @property
    def config(self) -> Config:
        """The config."""
        return self.shared.config

    @functools.cached_property
    def samples(self) -> Samples:
        """Writes some of the responses."""
        track = self.logs.metrics.write_samples
        return Samples(self.logs.samples, self.shared.tokenizer, self.config, track)

    @property
    def cluster(self) -> Cluster:
        """The processes of the run."""
        return self.shared.cluster

    @property
    def clock(self) -> RunClock:
        """Seconds of running time."""
        return self.shared.clock

    def parts(self) -> dict[str, Saveable]:
        """Return all parts with host state, by name, in the order of restoring."""
        return {
            # First: saved logs must not miss an event that another part contains.
            "logs": self.logs,
            "buffer": self.buffer,
            **self.search.parts(),
            "trainer": self.trainer.counters,
            "clock": self.clock,
            "evaluations": self.evaluated,
        }

    def host_state(self) -> HostState:
        """Return a copy of all host state, for one atomic checkpoint."""
        states = {name: part.state() for name, part in self.parts().items()}
        step = self.trainer.step_index
        return HostState(dataclasses.replace(self.shared.facts, step=step), states)

    def restore(self, state: HostState) -> None:
        """Restore a saved host state; the trainer was built with the train state."""
        for name, part in self.parts().items():
            part.restore(state.parts[name])
        self.last_saved_step = self.trainer.step_index

    def is_interrupted(self, interrupted: Callable[[], bool]) -> bool:
        """Return whether this process, or another one that reports to it, has a request to stop."""
        return interrupted() or (isinstance(self.link, Owner) and self.link.wants_stop)

    def save(self) -> None:
        """Start an asynchronous checkpoint at the trainer's step, unless it has one.

        All processes of the run call this method.
        """
        step = self.trainer.step_index
        if step == self.last_saved_step:
            return
        self.confirm_hold()
        # The save copies the state before it returns; the next step donates it.
        self.shared.checkpoints.save(step, self.trainer.state, self.host_state())
        self.last_saved_step = step

    def confirm_hold(self) -> None:
        """Check that this process still holds the work directory.

        Raises:
            WorkdirLost: the directory is gone, or another process has taken it over.
        """
        if self.hold is not None:
            self.hold.confirm()

    def evaluate(self, version: int, params: Any) -> None:
        """Evaluate on this thread, and record the result."""
        self.evaluations.request(version, [params])
        while not self.evaluations.is_idle:
            self.evaluations.step()
        self.record_evaluations()

    def record_evaluations(self) -> bool:
        """Record finished evaluations; return whether there were any."""
        finished = self.evaluations.poll()
        for each in finished:
            self._record(each)
        return bool(finished)

    def _record(self, finished: Finished) -> None:
        """Log an evaluation and keep it for the report."""
        step, evaluation, start_s = finished
        end = self.clock()
        values = evaluation.metrics()
        self.logs.schedule.append(
            {"event": "eval", "step": step, "version": step, "start_s": start_s, "end_s": end}
        )
        self.logs.metrics.write(
            step,
            {"time_s": end, **{f"eval/{k}": v for k, v in values.items()}, "eval/version": step},
        )
        shown = MOST_RESPONSES
        self.samples.add_evaluation(step, evaluation, self.evaluator.prompts)
        texts, rewards = evaluation.texts[:shown], evaluation.rewards[:shown]
        self.evaluated.add({**values, "step": step, "texts": texts, "rewards": rewards})

    def abort(self) -> None:
        """Release processes and threads after a failure, with a short wait for storage."""
        self.shared.rewards.close()
        self.ahead.close(timeout_s=COMPILED_S)
        self.shared.checkpoints.abandon(timeout_s=30.0)
        self.logs.close()

    def close(self) -> None:
        """Complete pending writes, then release processes, threads and files."""
        self.shared.rewards.close()
        self.ahead.close(timeout_s=COMPILED_S)
        self.search.transport.close()
        self.shared.checkpoints.close()
        self.logs.close()


def forget_after(run: Run, step: int) -> None:
    """Drop log lines of work after the restored checkpoint, which will be repeated.

    A metrics line of step n was written after update n; schedule events carry the number of
    updates done when they began.
    """
    last_eval_step = run.evaluated.last_eval_step

    def is_kept_metric(record: Mapping[str, Any]) -> bool:
        is_evaluation = "eval/n" in record or record.get("of") == "eval"
        return record["step"] <= (last_eval_step if is_evaluation else step)

    # Keep rounds of searchers that are now on other hosts: they are logged only here.
    searchers = {searcher.index: searcher for searcher in run.search.searchers}

    def is_kept_event(record: Mapping[str, Any]) -> bool:
        if record["event"] == "eval":
            return record["step"] <= last_eval_step
        searcher = searchers.get(record.get("searcher", -1))
        # An interruption may save rounds that were merged at this step.
        if record["event"] == "round":
            return searcher is None or searcher.outbox.is_merged(record["round"])
        # Saved after the outbox, so that no committed ticket loses its event.
        if record["event"] == "chunk":
            return searcher is None or record["chunk"] < searcher.num_chunks
        # Weights are published again at the restored step, which changes nothing.
        return record["step"] < step or (record["event"] == "sync" and record["step"] == step)

    run.logs.cut_back(step, is_kept_metric, is_kept_event)
