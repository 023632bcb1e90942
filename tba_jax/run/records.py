# SPDX-License-Identifier: Apache-2.0
"""Logs of a run: metrics.jsonl, responses of evenly spaced steps in samples.jsonl, callbacks."""

import inspect
import itertools
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.evaluation.evaluator import Evaluation
from tba_jax.flow.trajectory import Prompt
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.report.jsonl import JsonlWriter
from tba_jax.report.progress import ProgressDisplay
from tba_jax.report.writers import MultiWriter
from tba_jax.settings import ConfigError
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
        writers: further writers of metrics, such as a tracker.

    Attributes:
        metrics: all writers of metrics, including metrics.jsonl and the display.
    """

    def __init__(
        self,
        workdir: Path,
        is_primary: bool,
        progress: ProgressDisplay,
        tokenizer: Tokenizer,
        num_steps: int,
        writers: Sequence[Any] = (),
    ) -> None:
        names = ("metrics.jsonl", "samples.jsonl") if is_primary else ()
        self._files = [JsonlWriter(workdir / name) for name in names]
        self.progress, self._tokenizer = progress, tokenizer
        self.metrics = MultiWriter([*self._files[:1], progress, *writers])
        self._num_steps, self._period = num_steps, -(-num_steps // MOST_STEPS)
        self._newest_eval = -1

    def cut_back(self, is_kept: Callable[[dict[str, Any]], bool]) -> None:
        """Keep only some lines of metrics.jsonl and samples.jsonl; the others are written again."""
        for file in self._files:
            file.keep(is_kept)

    def close(self) -> None:
        """Close all files."""
        self.progress.close()
        self.metrics.close()
        for file in self._files[1:]:
            file.close()

    def add_step(self, step: int, shown: Shown | None) -> None:
        """Write the responses to one prompt of a batch to samples.jsonl, if this step is due.

        `step` is the number of the update, from 1. A process that drew no batch has none `shown`.
        """
        if not self._files or shown is None or (step - 1) % self._period:
            return
        records = []
        for k, y in enumerate(shown.draw.trajectories[:MOST_RESPONSES]):
            n = len(y.response_tokens)
            kept = np.arange(n) if n <= _HEAD + _TAIL else np.r_[0:_HEAD, n - _TAIL : n]
            tokens = self._tokenizer.token_texts(y.response_tokens[kept].tolist())
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
                "length": n,
                "tokens": tokens,
                "behavior": _hundredths((policy - y.behavior_token_logprobs)[kept]),
                "reference": _hundredths((policy - reference)[kept]),
                "reference_sum": float(policy.sum() - reference.sum()),
            }
            if y.is_sampled is not None:
                record["is_sampled"] = y.is_sampled[kept].astype(int).tolist()
            records.append((shown.draw.prompt, record))
        self._write(step, "train", records)

    def add_evaluation(self, step: int, evaluation: Evaluation, prompts: list[Prompt]) -> None:
        """Write responses to the first held-out prompts, once per logging period."""
        is_due = step // self._period != self._newest_eval // self._period
        if not self._files or not (is_due or step == self._num_steps):
            return
        self._newest_eval = step
        # The only prompt has all responses.
        shown = zip(itertools.cycle(prompts), evaluation.texts, evaluation.rewards, strict=False)
        records = [(x, {"reward": r, "version": step, "tokens": [text]}) for x, text, r in shown]
        self._write(step, "eval", records[:MOST_RESPONSES])

    def _write(
        self, step: int, of: str, records: Iterable[tuple[Prompt, Mapping[str, Any]]]
    ) -> None:
        lines = []
        for prompt, record in records:
            text = prompt.text
            if len(text) >= _MOST_PROMPT:
                text = f"[…] {text[-_MOST_PROMPT:]}"
            answer = str(prompt.columns.get("answer", ""))[-_MOST_ANSWER:]
            facts = {"step": step, "of": of, "prompt_id": prompt.prompt_id}
            lines.append({**facts, "prompt": text, "answer": answer, **record})
            self._files[1].append(lines[-1])
        if lines:
            self.metrics.write_samples(step, of, lines)


def _hundredths(values: np.ndarray) -> list[int]:
    """Return log ratios in whole hundredths, to make samples.jsonl smaller."""
    return np.rint(100 * np.clip(np.nan_to_num(values), -99, 99)).astype(int).tolist()


def combined(
    callbacks: Sequence[Callable[..., Any]], note: Callable[[str], None]
) -> Callable[[int, Mapping[str, Any]], dict[str, float]]:
    """Return a function of (step, values) that returns the numbers of all callbacks by name.

    An error of a callback does not end the run: `note` shows it, and the callback is not called
    again. Raises ConfigError if a callback does not take these arguments.
    """
    for each in (working := list(callbacks)):
        try:
            inspect.signature(each).bind("step", "values")
        except (TypeError, ValueError) as error:
            name = getattr(each, "__name__", each)
            raise ConfigError(f"callback {name}: {error}. Write {name}(step, values)") from error

    def call(step: int, values: Mapping[str, Any]) -> dict[str, float]:
        found: dict[str, float] = {}
        for function in list(working):
            try:
                numbers = dict(function(step, values) or {})
                found |= {str(key): float(value) for key, value in numbers.items()}
            except Exception as error:  # the traceback shows the place in the user's code
                working.remove(function)
                name = getattr(function, "__name__", str(function))
                where = "".join(traceback.format_exception(error)).rstrip()
                note(
                    f"callback {name} raised {type(error).__name__}: {error}. The run continues "
                    f"without it. Return numbers by name, or None\n{where}"
                )
        return found

    return call
