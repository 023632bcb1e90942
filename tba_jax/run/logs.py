# SPDX-License-Identifier: Apache-2.0
"""Logs of a run, and the responses that are written beside them.

Invariant: if a log is shorter than its checkpoint recorded, the display and the schedule log name
it.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tba_jax.config.schema import Config
from tba_jax.devices.cluster import Cluster
from tba_jax.evaluation.evaluator import Evaluation
from tba_jax.flow.state import PartState
from tba_jax.flow.trajectory import Prompt
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.report.jsonl import JsonlWriter
from tba_jax.report.relay import Display
from tba_jax.report.writers import MultiWriter
from tba_jax.train.trainer import Shown

Wanted = Callable[[dict[str, Any]], bool]

MOST_STEPS = 200  # training steps of which responses are written, and as many evaluations
MOST_RESPONSES = 8
_HEAD, _TAIL = 768, 256  # tokens of a long response that are kept


class Logs:
    """The log files of a process and its display.

    Args:
        metrics: all sinks of metrics, including `own` and the display.
        progress: the display.
        schedule: log of the order of events.
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
        """Return the lengths of the files, which contain all earlier events."""
        return PartState({}, {file.path.name: file.num_bytes() for file in self._files()})

    def restore(self, state: PartState) -> None:
        """Remember the saved lengths for `cut_back`."""
        self._saved = dict(state.meta)

    def cut_back(self, step: int, is_kept_metric: Wanted, is_kept_event: Wanted) -> None:
        """Drop lines of work that will be repeated, and report files that lost lines.

        Args:
            step: step of the restored checkpoint, 0 without one.
            is_kept_metric: whether a line of metrics.jsonl or samples.jsonl stays.
            is_kept_event: whether a line of the schedule log stays.
        """
        lost = [found for file in self._files() if (found := self._lost(file)) is not None]
        for file in self._files():
            start = self._saved.get(file.path.name, 0)
            if any(one.path == file.path for one in lost):
                start = 0  # check every line: the file was replaced or cut
            file.keep(is_kept_event if file is self.schedule else is_kept_metric, start)
        for path, then, now in lost:
            self.progress.note(
                f"{path} is not whole: it had {then:,} bytes when checkpoint {step} was written, "
                f"and has {now:,} now. The report lacks the lost lines. --replay_schedule needs "
                "a whole schedule log"
            )
            facts = {"log": path.name, "num_bytes": then, "found_bytes": now}
            self.schedule.append({"event": "lost", "step": step, **facts})

    def _lost(self, file: JsonlWriter) -> "_Lost | None":
        then = self._saved.get(file.path.name)
        if then is None or file.has_line_end(then):
            return None
        return _Lost(file.path, then, file.num_bytes())

    def replaced(self) -> list[str]:
        """Return the names of logs that another process has replaced."""
        return [file.path.name for file in self._files() if file.is_replaced()]

    def _files(self) -> list[JsonlWriter]:
        return [file for file in (self.schedule, self._own, self.samples) if file is not None]

    def close(self) -> None:
        """Close all files."""
        self.progress.close()
        self.metrics.close()
        self.schedule.close()
        if self.samples is not None:
            self.samples.close()


class _Lost(NamedTuple):
    """A log file that is shorter than its checkpoint says."""

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
    """Open the logs of a process for appending.

    Args:
        workdir: work directory of the run.
        cluster: processes of the run; only process 0 writes metrics.jsonl and samples.jsonl.
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
    """Return the file name of a process's schedule log."""
    return "schedule.jsonl" if process_id == 0 else f"schedule.{process_id}.jsonl"


class TokenTexts:
    """Texts of single tokens, kept for the next use.

    Args:
        tokenizer: tokenizer of the tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Some tokenizers drop the space before the first token, so one token goes before.
        self._before = tokenizer.encode("a", add_bos=False)[-1:].tolist()
        self._before_text = tokenizer.decode(self._before, skip_special=False)
        self._known: dict[int, str] = {}

    def __call__(self, ids: list[int]) -> list[str]:
        """Return a text for each token; a character of several tokens belongs to the first."""
        texts = [self._one(i) for i in ids]
        for is_part, run in itertools.groupby(range(len(ids)), lambda i: "\ufffd" in texts[i]):
            places = list(run)
            if is_part:
                whole = [ids[i] for i in places]
                texts[places[0]] = self._decode(whole)
                texts[places[0] + 1 : places[-1] + 1] = [""] * (len(places) - 1)
        return texts

    def _one(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._decode([token])
        return self._known[token]

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode([*self._before, *ids], skip_special=False)
        return text.removeprefix(self._before_text)


class Samples:
    """Writes responses at even distances over the run.

    Args:
        log: samples.jsonl; None where another process writes it.
        tokenizer: tokenizer of the policy.
        config: config of the run.
        track: gives responses to trackers: step, "train" or "eval", and the responses.
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
        """Write the responses to one prompt of a batch, if it is time.

        Args:
            step: number of the update, from 1.
            shown: one prompt of the batch; None where this process has no batch.
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
            total = y.reference_logprob
            if shown.reference is not None:
                total = float(shown.reference[k, :n].sum())
                record["reference"] = _hundredths(policy - shown.reference[k, :n], kept)
            record["reference_sum"] = float(policy.sum()) - total
            if y.is_sampled is not None:
                record["is_sampled"] = y.is_sampled[kept].astype(int).tolist()
            if y.version_spans:
                record["version_spans"] = list(y.version_spans)
            if y.path_lengths:
                record["path_lengths"] = list(y.path_lengths)
            records.append((draw.prompt, record))
        self._write(step, "train", records)

    def add_evaluation(self, step: int, evaluation: Evaluation, prompts: list[Prompt]) -> None:
        """Write the responses to the first held-out prompts, if it is time."""
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
    """Log ratios as whole hundredths, which take little room."""
    return np.rint(100 * np.clip(np.nan_to_num(values[kept]), -99, 99)).astype(int).tolist()
