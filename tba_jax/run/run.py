# SPDX-License-Identifier: Apache-2.0
"""Run: the connected parts of one run with their logs, and operations of all drivers.

The process that has the replay buffer also has the owner of the tickets. Searchers of this process
call the owner; searchers of other processes send messages to it.

Invariant: `restore` restores everything that `host_state` saves.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.config.advice import Advice
from tba_jax.config.schema import Config
from tba_jax.devices.cluster import Cluster
from tba_jax.devices.platform import return_free_memory
from tba_jax.devices.precompilation import Precompiler
from tba_jax.evaluation.evaluator import Evaluation, Evaluator
from tba_jax.flow.state import PartState
from tba_jax.flow.trajectory import Prompt
from tba_jax.models.tokenizer import Tokenizer, TokenTexts
from tba_jax.remote.client import Client
from tba_jax.remote.evaluation_queue import Finished
from tba_jax.remote.owner import Owner
from tba_jax.replay.buffer import ReplayBuffer
from tba_jax.report.jsonl import JsonlWriter
from tba_jax.report.writers import MultiWriter, ProgressDisplay
from tba_jax.run.host_state import HostState, RunClock
from tba_jax.run.lock import Hold
from tba_jax.run.peers import OwnerServer
from tba_jax.run.search_parts import Search
from tba_jax.run.shared import Shared
from tba_jax.search.searcher import Searcher
from tba_jax.train.trainer import Shown, Trainer
from tba_jax.weights.folder import WeightFolder
from tba_jax.weights.memory import Weights

# Seconds for a background compilation to end: the interpreter must not exit while a thread runs
# native code.
COMPILED_S = 30.0
Wanted = Callable[[dict[str, Any]], bool]

MOST_STEPS = 200  # training steps of which responses are written, and as many evaluations
MOST_RESPONSES = 8
_HEAD, _TAIL = 768, 256  # tokens of a long response that are kept


class Logs:
    """The log files of a process and its display.

    Args:
        metrics: all writers of metrics, including `own` and the display.
        own: writer of metrics.jsonl; None in processes other than 0.
        samples: writer of samples.jsonl; None in processes other than 0.
    """

    def __init__(
        self,
        metrics: MultiWriter,
        progress: ProgressDisplay,
        own: JsonlWriter | None,
        samples: JsonlWriter | None,
    ) -> None:
        self.metrics = metrics
        self.progress = progress
        self.samples = samples
        self._own = own

    def cut_back(self, is_kept: Wanted) -> None:
        """Drop lines of work that will be repeated.

        Args:
            is_kept: whether a line of metrics.jsonl or samples.jsonl stays.
        """
        for file in (self._own, self.samples):
            if file is not None:
                file.keep(is_kept)

    def close(self) -> None:
        """Close all files."""
        self.progress.close()
        self.metrics.close()
        if self.samples is not None:
            self.samples.close()


def open_logs(
    workdir: Path,
    cluster: Cluster,
    progress: ProgressDisplay,
    extra: list[Any],
) -> Logs:
    """Open the logs of a process for appending.

    Args:
        cluster: processes of the run; only process 0 writes metrics.jsonl and samples.jsonl.
    """
    own = JsonlWriter(workdir / "metrics.jsonl") if cluster.is_primary else None
    samples = JsonlWriter(workdir / "samples.jsonl") if cluster.is_primary else None
    sinks = [*([own] if own else []), progress, *extra]
    return Logs(MultiWriter(sinks), progress, own, samples)


class Samples:
    """Writer of responses of evenly spaced steps of the run.

    Args:
        log: writer of samples.jsonl; None if another process writes it.
        track: function of (step, "train" or "eval", responses) that sends responses to trackers.
    """

    def __init__(
        self,
        log: JsonlWriter | None,
        tokenizer: Tokenizer,
        config: Config,
        track: Callable[[int, str, list[dict[str, Any]]], None] = lambda step, of, samples: None,
    ) -> None:
        self._track = track
        self._log, self._texts = log, TokenTexts(tokenizer)
        self._step_period = -(-config.num_steps // MOST_STEPS)
        self._num_steps, self._newest_eval = config.num_steps, -1

    def add_step(self, step: int, shown: Shown | None) -> None:
        """Write the responses to one prompt of a batch, if this step is due.

        Args:
            step: number of the update, from 1.
            shown: one prompt of the batch; None in a process that did not draw the batch.
        """
        if self._log is None or shown is None or (step - 1) % self._step_period:
            return
        draw, records = shown.draw, []
        for k, y in enumerate(draw.trajectories[:MOST_RESPONSES]):
            n = len(y.response_tokens)
            kept = np.arange(n) if n <= _HEAD + _TAIL else np.r_[0:_HEAD, n - _TAIL : n]
            tokens = self._texts(y.response_tokens[kept].tolist())
            if len(kept) < n:
                tokens[_HEAD] = f"\n[… {n - len(kept):,} tokens …]\n{tokens[_HEAD]}"
            policy = shown.policy[k, :n]
            record = {
                "reward": y.reward,
                "parts": y.reward_parts,
                "version": y.version_min,
                "staleness": step - 1 - y.version_min if y.version_min >= 0 else None,
                "searcher": y.searcher,
                "finish": y.finish_reason,
                "is_fresh": draw.is_fresh,
                "length": n,
                "tokens": tokens,
                "behavior": _hundredths(policy - y.behavior_token_logprobs, kept),
            }
            record["reference"] = _hundredths(policy - shown.reference[k, :n], kept)
            record["reference_sum"] = float(policy.sum() - shown.reference[k, :n].sum())
            if y.is_sampled is not None:
                record["is_sampled"] = y.is_sampled[kept].astype(int).tolist()
            if y.path_lengths:
                record["path_lengths"] = list(y.path_lengths)
            records.append((draw.prompt, record))
        self._write(step, "train", records)

    def add_evaluation(self, step: int, evaluation: Evaluation, prompts: list[Prompt]) -> None:
        """Write responses to the first held-out prompts, once per logging period."""
        period, newest = self._step_period, self._newest_eval
        is_due = step // period != newest // period or step == self._num_steps
        if self._log is None or not is_due:
            return
        self._newest_eval = step
        if len(prompts) == 1:  # several of its responses are shown
            prompts = prompts * len(evaluation.texts)
        shown = zip(prompts, evaluation.texts, evaluation.rewards, strict=False)
        first = itertools.islice(shown, MOST_RESPONSES)
        records = [(p, {"reward": r, "version": step, "tokens": [text]}) for p, text, r in first]
        self._write(step, "eval", records)

    def _write(
        self, step: int, of: str, records: Sequence[tuple[Prompt, Mapping[str, Any]]]
    ) -> None:
        assert self._log is not None
        lines = []
        for prompt, record in records:
            facts = {"step": step, "of": of, "prompt_id": prompt.prompt_id}
            text = prompt.text if len(prompt.text) < 4000 else f"[…] {prompt.text[-4000:]}"
            answer = str(prompt.columns.get("answer", ""))[-500:]
            lines.append({**facts, "prompt": text, "answer": answer, **record})
            self._log.append(lines[-1])
        if lines:
            self._track(step, of, lines)


def _hundredths(values: np.ndarray, kept: np.ndarray) -> list[int]:
    """Return log ratios in whole hundredths, to make samples.jsonl smaller."""
    return np.rint(100 * np.clip(np.nan_to_num(values[kept]), -99, 99)).astype(int).tolist()


@dataclasses.dataclass
class Evaluated:
    """First and newest evaluation of a run, for the report.

    Attributes:
        before: first evaluation, with sample texts; None before it.
        after: newest evaluation.
        last_eval_step: step of the newest evaluation; -1 before the first.
    """

    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None
    last_eval_step: int = -1

    def add(self, record: dict[str, Any]) -> None:
        """Record the result of an evaluation, a dictionary with `step`."""
        if self.before is None:
            self.before = record
        self.after = record
        self.last_eval_step = max(self.last_eval_step, record["step"])

    def state(self) -> PartState:
        """Return `before`, `after` and `last_eval_step`."""
        return PartState({}, dict(vars(self)))

    def restore(self, state: PartState) -> None:
        """Restore a saved `state`."""
        vars(self).update(state.meta)


@dataclasses.dataclass
class Run:
    """The connected parts of one run.

    Attributes:
        shared: parts that all other parts use.
        search: parts of the searchers of this process.
        weights: the weights that this process publishes.
        owner: tickets and evaluations of the run; None in a process that does not own the buffer.
        searchers: searchers of this process that take tickets from `owner`.
        ahead: background compiler.
        last_saved_step: step of the newest checkpoint; -1 before the first.
        hold: lock of the work directory; None if another process holds it.
        sections: further sections of the report, by key.
        callbacks: functions of the user, called with (step, values), that return additional values.
        server: channel server of the owner's process; None without other processes.
        client: connection to the owner in another process; None in the owner's process.
        advice: finds causes of a slow run and of a run that does not learn.
    """

    shared: Shared
    search: Search
    buffer: ReplayBuffer
    trainer: Trainer
    evaluator: Evaluator
    weights: Weights | WeightFolder
    owner: Owner | None
    searchers: tuple[Searcher, ...]
    logs: Logs
    ahead: Precompiler
    evaluated: Evaluated = dataclasses.field(default_factory=Evaluated)
    last_saved_step: int = -1
    hold: Hold | None = None
    sections: dict[str, Callable[[], Any]] = dataclasses.field(default_factory=dict)
    callbacks: Callable[[int, Mapping[str, Any]], dict[str, float]] = lambda step, values: {}
    server: OwnerServer | None = None
    client: Client | None = None
    advice: Advice = dataclasses.field(default_factory=Advice)

    @property
    def config(self) -> Config:
        """Config of the run."""
        return self.shared.config

    @functools.cached_property
    def samples(self) -> Samples:
        """Writer of samples.jsonl."""
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

    def parts(self) -> dict[str, Any]:
        """Return all parts with host state, by name, in the order of restoring."""
        return {
            "buffer": self.buffer,
            **({} if self.owner is None else {"owner": self.owner}),
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

    def save(self) -> None:
        """Start an asynchronous checkpoint of the trainer's step, unless the step has one.

        All processes of the run call this method.
        """
        step = self.trainer.step_index
        if step == self.last_saved_step:
            return
        # The save copies the state before it returns; the next step donates it.
        self.shared.checkpoints.save(step, self.trainer.state, self.host_state())
        self.last_saved_step = step
        return_free_memory()

    def record_evaluations(self) -> bool:
        """Record finished evaluations; return whether there were any."""
        if self.owner is None:
            return False
        finished = self.owner.evaluations.poll()
        for each in finished:
            self._record(each)
        if finished:
            self.weights.keep_only(self.owner.evaluations.versions)
        return bool(finished)

    def _record(self, finished: Finished) -> None:
        """Log an evaluation and keep it for the report."""
        step, evaluation, start_s = finished
        end = self.clock()
        values = evaluation.metrics()
        self.logs.metrics.write(
            step,
            {"time_s": end, **{f"eval/{k}": v for k, v in values.items()}, "eval/version": step},
        )
        shown = MOST_RESPONSES
        self.samples.add_evaluation(step, evaluation, self.evaluator.prompts)
        texts, rewards = evaluation.texts[:shown], evaluation.rewards[:shown]
        self.evaluated.add({**values, "step": step, "texts": texts, "rewards": rewards})

    def is_evaluation_due(self, step: int, newest: int) -> bool:
        """Return whether the version published at `step` must be evaluated.

        Args:
            step: step of the publication.
            newest: version of the last requested evaluation; -1 before the first request.
        """
        if newest < 0:
            return True
        period = self.config.eval.period
        return bool(period) and step // period > newest // period and step < self.config.num_steps

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
        self.weights.close()
        self.shared.checkpoints.close()
        self.logs.close()


def forget_after(run: Run, step: int) -> None:
    """Drop log lines of work after the restored checkpoint, which will be repeated.

    A line of step n was written after update n.
    """
    last_eval_step = run.evaluated.last_eval_step

    def is_kept(record: Mapping[str, Any]) -> bool:
        is_evaluation = "eval/n" in record or record.get("of") == "eval"
        return record["step"] <= (last_eval_step if is_evaluation else step)

    run.logs.cut_back(is_kept)
