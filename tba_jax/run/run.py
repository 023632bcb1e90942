# SPDX-License-Identifier: Apache-2.0
"""Run: the parts of one run as they are connected, and the state that belongs to none of them.

Drivers, the main command and replays work on a Run; `build` makes one. Its invariant: what
`host_state` saves, `restore` puts back.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.config.schema import Config
from tba_jax.decoding.engine import Decoder
from tba_jax.devices.cluster import Cluster
from tba_jax.evaluation.evaluator import Evaluator
from tba_jax.evaluation.service import EvaluationService, Finished
from tba_jax.models.transformer import TransformerConfig
from tba_jax.replay.buffer import ReplayBuffer
from tba_jax.replay.outbox import Outbox
from tba_jax.report.writers import JsonlWriter, MultiWriter, ProgressDisplay
from tba_jax.rewards.source import RewardSource
from tba_jax.run.checkpoint import Checkpoints
from tba_jax.run.modeling import start_weights
from tba_jax.run.placing import Sites
from tba_jax.search.prompts import PromptStream
from tba_jax.search.searcher import Searcher
from tba_jax.tasks.registry import Task
from tba_jax.train.trainer import Trainer
from tba_jax.weights.transport import Transport


@dataclasses.dataclass
class Run:
    """The parts of one run, and the counters that belong to none of them.

    Attributes:
        cluster: the processes of the run; searchers, streams, outboxes and buffer are this one's.
        num_searchers: of all processes.
        rewards: what training learns from; gold: what judges the win rate, if anything.
        clock: seconds of running time, accumulated over resumes.
        before: the first evaluation with its sample texts, None until it is done.
        after: the newest one.
        last_eval_step: step of the newest finished evaluation, -1 before the first.
        base_fingerprint: of the weights that adapters are trained on; "" where all are trained.
    """

    config: Config
    workdir: Path
    cluster: Cluster
    num_searchers: int
    task: Task
    trainer: Trainer
    searchers: list[Searcher]
    streams: list[PromptStream]
    outboxes: list[Outbox]
    buffer: ReplayBuffer
    transport: Transport
    rewards: RewardSource
    gold: RewardSource | None
    evaluator: Evaluator
    evaluations: EvaluationService
    decoder: Decoder
    sites: Sites
    model_config: TransformerConfig
    checkpoints: Checkpoints
    metrics: MultiWriter
    progress: ProgressDisplay
    schedule_log: JsonlWriter
    metrics_log: JsonlWriter | None
    clock: "RunClock"
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None
    last_eval_step: int = -1
    last_saved_step: int = -1
    time_to_first_step_s: float | None = None
    searcher_idle_s: dict[int, float] = dataclasses.field(default_factory=dict)
    base_fingerprint: str = ""

    def host_state(self) -> dict[str, tuple[Mapping[str, np.ndarray], Any]]:
        """Everything that is not train state, copied, for one atomic checkpoint."""
        state: dict[str, tuple[Mapping[str, np.ndarray], Any]] = {
            "buffer": self.buffer.snapshot(),
            "run": (
                {},
                {
                    "seed": self.config.seed,
                    "num_processes": self.cluster.num_processes,
                    "num_searchers": self.num_searchers,
                    "elapsed_s": self.clock(),
                    "before": self.before,
                    "after": self.after,
                    "last_eval_step": self.last_eval_step,
                    "time_to_first_step_s": self.time_to_first_step_s,
                    "wait_s": self.trainer.wait_s,
                    "sync_s": self.trainer.sync_s,
                    "trained_tokens": self.trainer.trained_tokens,
                    "staleness_counts": sorted(self.trainer.staleness_counts.items()),
                    "decoded_tokens": [[s.index, s.decoded_tokens] for s in self.searchers],
                    "searcher_idle_s": sorted(self.searcher_idle_s.items()),
                    "base_fingerprint": self.base_fingerprint,
                },
            ),
        }
        for searcher, outbox in zip(self.searchers, self.outboxes, strict=True):
            state[f"outbox_{searcher.index}"] = outbox.snapshot()
        return state

    def restore(self, state: Mapping[str, tuple[Mapping[str, np.ndarray], Any]]) -> None:
        """Put back what `host_state` saved; the train state is the trainer's constructor's."""
        self.buffer.restore(*state["buffer"])
        for searcher, outbox, stream in zip(
            self.searchers, self.outboxes, self.streams, strict=True
        ):
            outbox.restore(*state[f"outbox_{searcher.index}"])
            _, prompt_state = outbox.committed
            if prompt_state is not None:
                stream.set_state(prompt_state)
        _, run = state["run"]
        self.clock.add(run["elapsed_s"])
        self.before, self.after = run["before"], run["after"]
        self.last_eval_step = run["last_eval_step"]
        self.last_saved_step = self.trainer.step_index
        self.time_to_first_step_s = run["time_to_first_step_s"]
        self.trainer.wait_s = run["wait_s"]
        self.trainer.sync_s = list(run["sync_s"])
        self.trainer.trained_tokens = run["trained_tokens"]
        self.trainer.staleness_counts = {int(k): int(v) for k, v in run["staleness_counts"]}
        self.searcher_idle_s = {int(k): float(v) for k, v in run["searcher_idle_s"]}
        for searcher, (_, count) in zip(self.searchers, run["decoded_tokens"], strict=True):
            searcher.decoded_tokens = count

    def is_interrupted(self, interrupted: Callable[[], bool]) -> bool:
        """Whether this host wants to stop: by a signal, or because a peer was told to end.

        With several hosts they must all call this equally often.
        """
        is_preempted = self.cluster.is_preempted()
        return interrupted() or is_preempted

    def save(self) -> None:
        """Start an asynchronous checkpoint at the trainer's step, unless it has one.

        With several hosts a call of all of them.
        """
        step = self.trainer.step_index
        if step == self.last_saved_step:
            return
        # The next step is donated this state; the save has its own copy by then.
        self.checkpoints.save(step, self.trainer.state, self.host_state())
        self.last_saved_step = step

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
        self.schedule_log.append(
            {"event": "eval", "step": step, "version": step, "start_s": start_s, "end_s": end}
        )
        self.metrics.write(
            step,
            {"time_s": end, **{f"eval/{k}": v for k, v in values.items()}, "eval/version": step},
        )
        shown = self.config.eval.num_report_samples
        record = {
            **values,
            "step": step,
            "texts": evaluation.texts[:shown],
            "rewards": evaluation.rewards[:shown],
        }
        if self.before is None:
            self.before = record
        self.after = record
        self.last_eval_step = max(self.last_eval_step, step)

    def evaluate_start_model(self) -> None:
        """Measure where the run began, for one that was interrupted before it knew."""
        # On devices of this process: the others go on meanwhile.
        source = self.sites.reading(self.model_config)
        load = source.in_turn(start_weights)
        weights = load(self.config, self.model_config, source.mesh, self.sites.evaluation.mesh)
        self.evaluate(0, weights)

    def close_rewards(self) -> None:
        """Stop what computes rewards."""
        self.rewards.close()
        if self.gold is not None:
            self.gold.close()

    def abort(self) -> None:
        """Release what would outlive a failure; waits little for storage, which may have failed."""
        self.close_rewards()
        self.checkpoints.abandon(timeout_s=30.0)
        self.progress.close()
        self.metrics.close()
        self.schedule_log.close()

    def close(self) -> None:
        """Release processes, threads and files; complete what is being written."""
        self.close_rewards()
        self.transport.close()
        self.checkpoints.close()
        self.progress.close()
        self.metrics.close()
        self.schedule_log.close()


class RunClock:
    """Seconds of running time; resumes add what earlier processes spent."""

    def __init__(self, now: Callable[[], float], start: float) -> None:
        self._now = now
        self._start = start

    def __call__(self) -> float:
        """Seconds since the run began, without the pauses between processes."""
        return self._now() - self._start

    def add(self, seconds: float) -> None:
        """Count time an earlier process spent."""
        self._start -= seconds


def schedule_name(process_id: int) -> str:
    """File name of a process's schedule log."""
    return "schedule.jsonl" if process_id == 0 else f"schedule.{process_id}.jsonl"


def forget_after(run: Run, step: int) -> None:
    """Drop log lines of work that was done after the restored checkpoint and is now redone.

    A metrics line of step n was written after update n; schedule events carry the number of
    updates done when they began.
    """

    def is_kept_metric(record: Mapping[str, Any]) -> bool:
        if "eval/n" in record:
            return record["step"] <= run.last_eval_step
        return record["step"] <= step

    # Rounds of searchers that other hosts have now stay: this log is where they were done.
    merged = {
        searcher.index: outbox.committed[0] - outbox.num_rounds
        for searcher, outbox in zip(run.searchers, run.outboxes, strict=True)
    }

    def is_kept_event(record: Mapping[str, Any]) -> bool:
        if record["event"] == "eval":
            return record["step"] <= run.last_eval_step
        if record["event"] == "round":  # an interruption may save rounds merged at this very step
            return record["round"] < merged.get(record["searcher"], record["round"] + 1)
        # Weights are published again at the restored step, which changes nothing.
        return record["step"] < step or (record["event"] == "sync" and record["step"] == step)

    if run.metrics_log is not None:
        run.metrics_log.keep(is_kept_metric)
    run.schedule_log.keep(is_kept_event)
