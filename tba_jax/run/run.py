# SPDX-License-Identifier: Apache-2.0
"""Run: the connected parts of one run with their logs, and what all drivers do with them.

Invariant: what `host_state` saves, `restore` puts back.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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

_NUM_REPORTS = 3  # of rounds, before a share is judged
_MAX_CUT_SHARE = 0.2
_MAX_EQUAL_SHARE = 0.8
_EARLY_STEPS = 50  # a policy that has learned gives equal rewards, too
_WAIT_FROM, _WAIT_TO = 5, 30  # steps between which waiting is measured
_MAX_WAIT_SHARE = 0.3
# Time for a background compilation to end: the interpreter must not exit while a thread runs native
# code.
COMPILED_S = 30.0


class Times(NamedTuple):
    """Seconds since the run began: all, and those in which a side waited; searchers: their mean."""

    elapsed: float
    trainer: float
    searchers: float


class Advice:
    """Sentences about a run that learns little or waits, with the setting that helps; each once.

    It receives the metrics of every step.
    """

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._cut: collections.deque[float] = collections.deque(maxlen=_NUM_REPORTS)
        self._equal: collections.deque[float] = collections.deque(maxlen=_NUM_REPORTS)
        self._begin: Times | None = None

    def lines(
        self, config: Config, step: int, values: Mapping[str, Any], times: Times
    ) -> list[str]:
        """Return new sentences after a step.

        Args:
            config: config of the run.
            step: steps made so far.
            values: metrics of the last step, and of the rounds merged before it.
            times: times at the end of the last step.
        """
        if "search/cut_share" in values:
            self._cut.append(values["search/cut_share"])
            self._equal.append(values["search/equal_rewards_share"])
        found = {"cut": self._about_cut(config), "equal": self._about_equal(config, step)}
        if step == _WAIT_FROM:
            self._begin = times
        if step == _WAIT_TO and self._begin is not None:
            seconds = Times(*(now - then for now, then in zip(times, self._begin, strict=True)))
            found["wait"] = about_waiting(config, seconds)
        new = {name: line for name, line in found.items() if line and name not in self._said}
        self._said |= new.keys()
        return list(new.values())

    def _about_cut(self, config: Config) -> str:
        share, limit = _mean(self._cut), config.search.max_new_tokens
        if share <= _MAX_CUT_SHARE:
            return ""
        return (
            f"{share:.0%} of responses are cut by search.max_new_tokens={limit}. Set --config."
            f"search.max_new_tokens={2 * limit} if the model's context allows it, or ask for "
            "shorter responses"
        )

    def _about_equal(self, config: Config, step: int) -> str:
        share, size = _mean(self._equal), config.search.samples_per_prompt
        if share <= _MAX_EQUAL_SHARE or step > _EARLY_STEPS:
            return ""
        return (
            f"all responses have the same reward in {share:.0%} of the groups, which says nothing "
            "about what is better. Use prompts that are solved sometimes, a reward with more "
            f"values, or more responses: --config.search.samples_per_prompt={2 * size}"
        )


def about_waiting(config: Config, times: Times) -> str:
    """Return which side is the bottleneck and what helps; "" where neither waits much."""
    trainer, searchers = times.trainer / times.elapsed, times.searchers / times.elapsed
    if trainer > max(_MAX_WAIT_SHARE, searchers):
        faster = f"--config.num_searchers={2 * config.num_searchers} where devices are free"
        if config.replay.pace == "trainer":
            faster += ", or --config.replay.pace=off, which trains on replayed responses meanwhile"
        return f"the trainer waits {trainer:.0%} of the time: searching is slower. Set {faster}"
    if searchers > _MAX_WAIT_SHARE:
        fewer = ""
        if config.num_searchers > 1:
            fewer = f", or --config.num_searchers={config.num_searchers // 2}"
        return (
            f"searchers wait {searchers:.0%} of the time: training is slower. Set "
            f"--config.model.remat=dots where memory allows it{fewer}"
        )
    return ""


def _mean(shares: "collections.deque[float]") -> float:
    return sum(shares) / len(shares) if len(shares) == _NUM_REPORTS else 0.0


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
