# SPDX-License-Identifier: Apache-2.0
"""Log files of a run: metrics.jsonl, and responses of evenly spaced steps in samples.jsonl."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.config.schema import Config
from tba_jax.evaluation.evaluator import Evaluation
from tba_jax.flow.trajectory import Prompt
from tba_jax.models.tokenizer import Tokenizer, TokenTexts
from tba_jax.report.jsonl import JsonlWriter
from tba_jax.report.progress import ProgressDisplay
from tba_jax.report.writers import MultiWriter
from tba_jax.train.trainer import Shown

MOST_STEPS = 200
"""Number of training steps of which responses are written, and as many evaluations."""
MOST_RESPONSES = 8
_HEAD, _TAIL = 768, 256  # tokens of a long response that are kept
_MOST_PROMPT, _MOST_ANSWER = 4000, 500  # characters that are kept


class Logs:
    """The log files of a process and its display.

    Args:
        is_primary: whether this process writes the files of the run.

    Attributes:
        metrics: all writers of metrics, including metrics.jsonl and the display.
        samples: writer of samples.jsonl; None in processes other than 0.
    """

    def __init__(
        self, workdir: Path, is_primary: bool, progress: ProgressDisplay, writers: Sequence[Any]
    ) -> None:
        names = ("metrics.jsonl", "samples.jsonl") if is_primary else ()
        self._files = [JsonlWriter(workdir / name) for name in names]
        self.samples = self._files[1] if is_primary else None
        self.progress = progress
        self.metrics = MultiWriter([*self._files[:1], progress, *writers])

    def cut_back(self, is_kept: Callable[[dict[str, Any]], bool]) -> None:
        """Drop lines of work that will be repeated.

        Args:
            is_kept: whether a line of metrics.jsonl or samples.jsonl stays.
        """
        for file in self._files:
            file.keep(is_kept)

    def close(self) -> None:
        """Close all files."""
        self.progress.close()
        self.metrics.close()
        if self.samples is not None:
            self.samples.close()


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
        self._log, self._track, self._texts = log, track, TokenTexts(tokenizer)
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
        records = []
        for k, y in enumerate(shown.draw.trajectories[:MOST_RESPONSES]):
            n = len(y.response_tokens)
            kept = np.arange(n) if n <= _HEAD + _TAIL else np.r_[0:_HEAD, n - _TAIL : n]
            tokens = self._texts(y.response_tokens[kept].tolist())
            if len(kept) < n:
                tokens[_HEAD] = f"\n[… {n - len(kept):,} tokens …]\n{tokens[_HEAD]}"
            policy, reference = shown.policy[k, :n], shown.reference[k, :n]
            record = {
                "reward": y.reward,
                "parts": y.reward_parts,
                "version": y.version_min,
                "staleness": step - 1 - y.version_min if y.version_min >= 0 else None,
                "searcher": y.searcher,
                "finish": y.finish_reason,
                "is_fresh": shown.draw.is_fresh,
                "length": n,
                "tokens": tokens,
                "behavior": _hundredths((policy - y.behavior_token_logprobs)[kept]),
                "reference": _hundredths((policy - reference)[kept]),
                "reference_sum": float(policy.sum() - reference.sum()),
            }
            if y.is_sampled is not None:
                record["is_sampled"] = y.is_sampled[kept].astype(int).tolist()
            if y.path_lengths:
                record["path_lengths"] = list(y.path_lengths)
            records.append((shown.draw.prompt, record))
        self._write(self._log, step, "train", records)

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
        records = [(x, {"reward": r, "version": step, "tokens": [text]}) for x, text, r in shown]
        self._write(self._log, step, "eval", records[:MOST_RESPONSES])

    def _write(
        self,
        log: JsonlWriter,
        step: int,
        of: str,
        records: Iterable[tuple[Prompt, Mapping[str, Any]]],
    ) -> None:
        lines = []
        for prompt, record in records:
            text = prompt.text
            if len(text) >= _MOST_PROMPT:
                text = f"[…] {text[-_MOST_PROMPT:]}"
            answer = str(prompt.columns.get("answer", ""))[-_MOST_ANSWER:]
            facts = {"step": step, "of": of, "prompt_id": prompt.prompt_id}
            lines.append({**facts, "prompt": text, "answer": answer, **record})
            log.append(lines[-1])
        if lines:
            self._track(step, of, lines)


def _hundredths(values: np.ndarray) -> list[int]:
    """Return log ratios in whole hundredths, to make samples.jsonl smaller."""
    return np.rint(100 * np.clip(np.nan_to_num(values), -99, 99)).astype(int).tolist()
