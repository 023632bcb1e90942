# SPDX-License-Identifier: Apache-2.0
"""Run: the connected parts of one run with their logs, and what all drivers do with them.

Invariants: what `host_state` saves, `restore` puts back. A log that is shorter than its checkpoint
says is named, on the display and in the log itself.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tba_jax.config.schema import Config
from tba_jax.devices.ahead import Ahead
from tba_jax.devices.cluster import Cluster
from tba_jax.devices.placement import MODES
from tba_jax.evaluation.evaluator import Evaluator
from tba_jax.evaluation.service import EvaluationService, Finished
from tba_jax.flow.state import PartState, Saveable
from tba_jax.replay.buffer import ReplayBuffer
from tba_jax.report.jsonl import JsonlWriter
from tba_jax.report.relay import Display
from tba_jax.report.writers import MultiWriter
from tba_jax.run.advice import Advice
from tba_jax.run.host_state import HostState, RunClock
from tba_jax.run.lock import Hold
from tba_jax.run.peers import Link, Owner
from tba_jax.run.samples import Samples
from tba_jax.run.search_parts import Search
from tba_jax.run.shared import Shared
from tba_jax.train.trainer import Trainer

Wanted = Callable[[dict[str, Any]], bool]


# A program that nobody needs any more gets this long to be compiled: a thread in native code must
# not meet the end of the interpreter.
COMPILED_S = 30.0


class Logs:
    """Where a process writes.

    Args:
        metrics: all sinks of metrics, `own` and the display among them.
        progress: the display.
        schedule: the order in which things were done.
        own: metrics.jsonl; None in processes other than 0.
        samples: samples.jsonl; None in processes other than 0.
    """

    def __init__(
        self,
        metrics: MultiWriter,
        progress: Display,
        schedule: JsonlWriter,
        own: JsonlWriter | None,
        samples: JsonlWriter | None,
    ) -> None:
        self.metrics = metrics
        self.progress = progress
        self.schedule = schedule
        self.samples = samples
        self._own = own
        self._saved: dict[str, int] = {}

    def state(self) -> PartState:
        """How long the files are: what was logged before lies below that."""
        return PartState({}, {file.path.name: file.num_bytes() for file in self._files()})

    def restore(self, state: PartState) -> None:
        """Take note of how long they were; `cut_back` compares."""
        self._saved = dict(state.meta)

    def cut_back(self, step: int, is_kept_metric: Wanted, is_kept_event: Wanted) -> None:
        """Drop lines of work that will be done again, and say which lines were lost.

        Args:
            step: of the checkpoint that was restored, 0 without one.
            is_kept_metric: of metrics.jsonl and samples.jsonl.
            is_kept_event: of the schedule log.
        """
        lost = [found for file in self._files() if (found := self._lost(file)) is not None]
        for file in self._files():
            start = self._saved.get(file.path.name, 0)
            if any(one.path == file.path for one in lost):
                start = 0  # what there is may be of any time
            file.keep(is_kept_event if file is self.schedule else is_kept_metric, start)
        for path, then, now in lost:
            self.progress.note(
                f"{path} is not whole: it had {then:,} bytes when checkpoint {step} was written, "
                f"and has {now:,} now. The report lacks what is gone, and --replay_schedule needs "
                "the whole of a schedule log"
            )
            facts = {"log": path.name, "num_bytes": then, "found_bytes": now}
            self.schedule.append({"event": "lost", "step": step, **facts})

    def _lost(self, file: JsonlWriter) -> "_Lost | None":
        then = self._saved.get(file.path.name)
        if then is None or file.has_line_end(then):
            return None
        return _Lost(file.path, then, file.num_bytes())

    def replaced(self) -> list[str]:
        """Names of the logs that another process has replaced by copies."""
        return [file.path.name for file in self._files() if file.is_replaced()]

    def _files(self) -> list[JsonlWriter]:
        return [file for file in (self.schedule, self._own, self.samples) if file is not None]

    def close(self) -> None:
        """Complete the files."""
        self.progress.close()
        self.metrics.close()
        self.schedule.close()
        if self.samples is not None:
            self.samples.close()


class _Lost(NamedTuple):
    """A log that should be longer."""

    path: Path
    then: int
    now: int


def open_logs(
    workdir: Path,
    cluster: Cluster,
    progress: Display,
    extra: list[Any],
    confirm: Callable[[], None] = lambda: None,
) -> Logs:
    """The logs of a process, appended to where they are.

    Args:
        workdir: of the run.
        cluster: its processes; only process 0 writes metrics.jsonl and samples.jsonl.
        progress: the display.
        extra: more metric sinks.
        confirm: raises where this process no longer holds the work directory.
    """
    own = JsonlWriter(workdir / "metrics.jsonl", confirm) if cluster.is_primary else None
    samples = JsonlWriter(workdir / "samples.jsonl", confirm) if cluster.is_primary else None
    sinks = [*([own] if own else []), progress, *extra]
    schedule = JsonlWriter(workdir / schedule_name(cluster.process_id), confirm)
    return Logs(MultiWriter(sinks), progress, schedule, own, samples)


def schedule_name(process_id: int) -> str:
    """File name of a process's schedule log."""
    return "schedule.jsonl" if process_id == 0 else f"schedule.{process_id}.jsonl"


@dataclasses.dataclass
class Evaluated:
    """Evaluations so far, as the report compares them.

    Attributes:
        before: the first one with its sample texts, None until it is done.
        after: the newest one.
        last_eval_step: step of the newest one, -1 before the first.
    """

    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None
    last_eval_step: int = -1

    def add(self, record: dict[str, Any]) -> None:
        """Take in one more, of the version `step`."""
        if self.before is None:
            self.before = record
        self.after = record
        self.last_eval_step = max(self.last_eval_step, record["step"])

    def state(self) -> PartState:
        """Both records and the step."""
        return PartState({}, dict(vars(self)))

    def restore(self, state: PartState) -> None:
        """Go on from there."""
        vars(self).update(state.meta)


@dataclasses.dataclass
class Run:
    """The connected parts of one run.

    Attributes:
        shared: what all of them stand on.
        search: searchers, prompt streams, outboxes and the weight transport of this process.
        ahead: compiles what will be called.
        evaluations: evaluates a version, now or on another thread; evaluated: what came of it.
        last_saved_step: step of the newest checkpoint, -1 before the first.
        hold: of the work directory; None where another process has it, or nobody needs it.
        sections: of the report, by key, beside those that every run has.
        callbacks: of the user, called with (step, values); returns further values.
        link: to the other processes of the run; None: there are none.
        advice: on what slows the run or keeps it from learning.
    """

    shared: Shared
    search: Search
    buffer: ReplayBuffer
    trainer: Trainer
    evaluator: Evaluator
    evaluations: EvaluationService
    logs: Logs
    ahead: Ahead
    evaluated: Evaluated = dataclasses.field(default_factory=Evaluated)
    last_saved_step: int = -1
    hold: Hold | None = None
    sections: dict[str, Callable[[], Any]] = dataclasses.field(default_factory=dict)
    callbacks: Callable[[int, Mapping[str, Any]], dict[str, float]] = lambda step, values: {}
    link: Link | None = None
    advice: Advice = dataclasses.field(default_factory=Advice)

    @property
    def config(self) -> Config:
        """The config."""
        return self.shared.config

    @functools.cached_property
    def samples(self) -> Samples:
        """Writes some of the responses."""
        return Samples(self.logs.samples, self.shared.tokenizer, self.config)

    @property
    def is_fleet(self) -> bool:
        """Whether searchers are processes that come and go."""
        return MODES[self.config.placement].searches_elsewhere

    @property
    def cluster(self) -> Cluster:
        """The processes of the run."""
        return self.shared.cluster

    @property
    def clock(self) -> RunClock:
        """Seconds of running time."""
        return self.shared.clock

    def parts(self) -> dict[str, Saveable]:
        """Everything with state but the train state, by name, in the order of restoring."""
        return {
            "logs": self.logs,  # first: of what it has logged, nothing is missing in the others
            "buffer": self.buffer,
            **self.search.parts(),
            "trainer": self.trainer.counters,
            "clock": self.clock,
            "evaluations": self.evaluated,
        }

    def host_state(self) -> HostState:
        """Everything that is not train state, copied, for one atomic checkpoint."""
        states = {name: part.state() for name, part in self.parts().items()}
        step = self.trainer.step_index
        return HostState(dataclasses.replace(self.shared.facts, step=step), states)

    def restore(self, state: HostState) -> None:
        """Put back what `host_state` saved; the train state is the trainer's constructor's."""
        for name, part in self.parts().items():
            part.restore(state.parts[name])
        self.last_saved_step = self.trainer.step_index

    def is_interrupted(self, interrupted: Callable[[], bool]) -> bool:
        """Whether this process was told to stop, or another one that reports to it."""
        return interrupted() or (isinstance(self.link, Owner) and self.link.wants_stop)

    def save(self) -> None:
        """Start an asynchronous checkpoint at the trainer's step, unless it has one.

        With several hosts a call of all of them.
        """
        step = self.trainer.step_index
        if step == self.last_saved_step:
            return
        self.confirm_hold()
        # The next step is donated this state; the save has its own copy by then.
        self.shared.checkpoints.save(step, self.trainer.state, self.host_state())
        self.last_saved_step = step

    def confirm_hold(self) -> None:
        """Look whether the work directory is there and still this run's.

        Raises:
            WorkdirLost: it is not.
        """
        if self.hold is not None:
            self.hold.confirm()

    def evaluate(self, version: int, params: Any) -> None:
        """Evaluate on this thread, and record it."""
        self._record(self.evaluations.evaluate(version, params))

    def record_evaluations(self) -> bool:
        """Record the evaluations that were requested and are done; whether there are any."""
        finished = self.evaluations.poll()
        for each in finished:
            self._record(each)
        return bool(finished)

    def _record(self, finished: Finished) -> None:
        """Log one evaluation and keep what the report compares."""
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
        shown = self.config.eval.num_report_samples
        self.samples.add_evaluation(step, evaluation, self.evaluator.prompts, shown)
        texts, rewards = evaluation.texts[:shown], evaluation.rewards[:shown]
        self.evaluated.add({**values, "step": step, "texts": texts, "rewards": rewards})

    def abort(self) -> None:
        """Release what would outlive a failure; waits little for storage, which may have failed."""
        self.shared.rewards.close()
        self.ahead.close(timeout_s=COMPILED_S)
        self.shared.checkpoints.abandon(timeout_s=30.0)
        self.logs.close()

    def close(self) -> None:
        """Release processes, threads and files; complete what is being written."""
        self.shared.rewards.close()
        self.ahead.close(timeout_s=COMPILED_S)
        self.search.transport.close()
        self.shared.checkpoints.close()
        self.logs.close()


def forget_after(run: Run, step: int) -> None:
    """Drop log lines of work that was done after the restored checkpoint and is now redone.

    A metrics line of step n was written after update n; schedule events carry the number of
    updates done when they began.
    """
    last_eval_step = run.evaluated.last_eval_step

    def is_kept_metric(record: Mapping[str, Any]) -> bool:
        is_evaluation = "eval/n" in record or record.get("of") == "eval"
        return record["step"] <= (last_eval_step if is_evaluation else step)

    # Rounds of searchers that other hosts have now stay: this log is where they were done.
    searchers = {searcher.index: searcher for searcher in run.search.searchers}

    def is_kept_event(record: Mapping[str, Any]) -> bool:
        if record["event"] == "eval":
            return record["step"] <= last_eval_step
        searcher = searchers.get(record.get("searcher", -1))
        if record["event"] == "round":  # an interruption may save rounds merged at this very step
            return searcher is None or searcher.outbox.is_merged(record["round"])
        if record["event"] == "chunk":  # saved after the outbox: no committed ticket loses one
            return searcher is None or record["chunk"] < searcher.num_chunks
        # Weights are published again at the restored step, which changes nothing.
        return record["step"] < step or (record["event"] == "sync" and record["step"] == step)

    run.logs.cut_back(step, is_kept_metric, is_kept_event)
