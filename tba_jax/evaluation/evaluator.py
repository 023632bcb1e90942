# SPDX-License-Identifier: Apache-2.0
"""Held-out evaluation of a policy: responses to the task's evaluation split, graded and measured.

It uses the decoder and the reward source that training uses, at one pinned policy version. It does
not know whether a trainer is running, nor what a task counts as good: it reports the mean reward,
pass@k where that is the task's headline, and whatever the metric functions it is given return.
Invariant: the same weights give the same figures, because every call draws from the same key.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tba_jax.decoding.engine import Decoded, Decoder
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.evaluation.config import EvalSettings
from tba_jax.flow.trajectory import Prompt
from tba_jax.rewards.grader import Grader, Grades
from tba_jax.rewards.source import part_means


class Responses(NamedTuple):
    """What a metric function gets: the responses of one evaluation, and what was made of them.

    Attributes:
        params: the weights that were evaluated, in the decoder's layout, on its device.
        prompts: p prompts.
        decoded: tokens [p n t], lengths [p n] and so on; n = samples per prompt.
        texts: n response texts per prompt.
        rewards: n rewards per prompt, None where one could not be computed.
        parts: name -> n values per prompt, what the reward source reports beside the rewards.
    """

    params: Any
    prompts: Sequence[Prompt]
    decoded: Decoded
    texts: list[list[str]]
    rewards: list[list[float | None]]
    parts: Mapping[str, list[list[float]]]


# Named floats made of one evaluation, e.g. {"win_rate": 0.61}.
MetricFunction = Callable[[Responses], Mapping[str, float]]


class Evaluation(NamedTuple):
    """Result of one evaluation.

    Attributes:
        metric: name of the headline, a key of `values`.
        values: metric name -> value. `reward_mean` is the mean of the rewards that could be
            computed, `reward_part_NAME` that of one of several rewards. Where the headline is
            `pass_at_1`: that, the mean reward with what could not be graded counted as 0 (share
            right where rewards are 0 or 1), and pass_at_2, 4, ... up to the samples per prompt.
        n: prompts graded.
        num_skipped: prompts left out as too long.
        num_failed: responses whose reward could not be computed.
        response_length_mean: tokens, end-of-sequence included.
        kind_share: share of the task's first response kind, 0 where it names none.
        num_trials: independent trials behind a share: prompts, or the responses to the only one.
        texts: the first response to every prompt; of the only prompt, all.
        rewards: their rewards, None where one failed.
    """

    metric: str
    values: dict[str, float]
    n: int
    num_skipped: int
    num_failed: int
    response_length_mean: float
    kind_share: float
    num_trials: int
    texts: list[str]
    rewards: list[float | None]

    def metrics(self) -> dict[str, Any]:
        """All but the texts and their rewards, JSON-compatible; `metric` names the headline."""
        return {
            "metric": self.metric,
            **self.values,
            "n": self.n,
            "num_skipped": self.num_skipped,
            "num_failed": self.num_failed,
            "response_length_mean": self.response_length_mean,
            "kind_share": self.kind_share,
            "num_trials": self.num_trials,
        }


def pass_at_k(rewards: Sequence[Sequence[float | None]]) -> dict[str, float]:
    """pass_at_1, and unbiased pass_at_k for k = 2, 4, ... up to n samples per prompt.

    pass_at_1 is the mean reward, a missing one counted as 0. For larger k, with c of n responses
    right (reward at least 1): 1 - C(n - c, k) / C(n, k), averaged over prompts.

    References:
        Chen et al., arXiv:2107.03374, eq. 1.
    """
    known = np.array([[0.0 if r is None else float(r) for r in row] for row in rewards])
    out = {"pass_at_1": float(known.mean())}
    n, k = known.shape[1], 2
    right = (known >= 1).sum(axis=1).tolist()
    while k <= n:
        out[f"pass_at_{k}"] = float(
            np.mean([1 - math.comb(n - c, k) / math.comb(n, k) for c in right])
        )
        k *= 2
    return out


class Evaluator:
    """Evaluation over a fixed list of prompts.

    Args:
        prompts: the evaluation prompts, the same for every call.
        num_skipped: how many prompts were left out as too long; only reported.
        decoder: the decoding engine.
        grader: texts and rewards.
        settings: how many responses are drawn, and how.
        metric: the headline; `reward_mean`, `pass_at_1`, or what one of `metrics` returns.
        min_new_tokens: no response ends before as many tokens.
        metrics: further metric functions, in the order they are asked.
    """

    def __init__(
        self,
        *,
        prompts: Sequence[Prompt],
        num_skipped: int,
        decoder: Decoder,
        grader: Grader,
        settings: EvalSettings,
        metric: str,
        min_new_tokens: int = 0,
        metrics: Sequence[MetricFunction] = (),
    ) -> None:
        self.prompts = list(prompts)
        self.num_skipped = num_skipped
        self._decoder = decoder
        self._grader = grader
        self._sampling = SamplingSettings(
            settings.max_new_tokens,
            temperature=settings.temperature,
            min_new_tokens=min_new_tokens,
        )
        self._num_slots = settings.num_slots
        self._metric = metric
        self._num_samples = settings.num_samples
        self._metrics = tuple(metrics)

    def run(self, params: Any) -> Evaluation:
        """Decode, grade and measure.

        Raises:
            ValueError: nothing reports the headline metric.
        """
        params = self._decoder.weights(params)
        decoded = self._decoder.decode(
            params,
            [p.tokens for p in self.prompts],
            num_samples=self._num_samples,
            key=jax.random.key(0),
            settings=self._sampling,
            num_slots=self._num_slots,
        )
        grades = self._grade(decoded)
        known = [r for r in grades.rewards if r is not None]

        def by_prompt(flat: Sequence[Any]) -> list[list[Any]]:
            n = self._num_samples
            return [list(flat[i : i + n]) for i in range(0, len(flat), n)]

        texts, rewards = by_prompt(grades.texts), by_prompt(grades.rewards)
        parts = {name: by_prompt(values) for name, values in grades.parts.items()}
        values = pass_at_k(rewards) if self._metric == "pass_at_1" else {}
        values["reward_mean"] = float(np.mean(known)) if known else float("nan")
        values.update(part_means(grades.parts))
        responses = Responses(params, self.prompts, decoded, texts, rewards, parts)
        for measure in self._metrics:
            values.update({name: float(value) for name, value in measure(responses).items()})
        if self._metric not in values:
            raise ValueError(
                f"the task's headline metric {self._metric!r} is not among those that evaluation "
                f"reports: {', '.join(values)}. Give evaluation the function that measures it, or "
                "name another as the task's `metric`"
            )
        is_only = len(self.prompts) == 1
        return Evaluation(
            metric=self._metric,
            values=values,
            n=len(self.prompts),
            num_skipped=self.num_skipped,
            num_failed=len(grades.rewards) - len(known),
            response_length_mean=float(np.mean(decoded.lengths)),
            kind_share=grades.kind_share,
            num_trials=self._num_samples if is_only else len(self.prompts),
            texts=texts[0] if is_only else [row[0] for row in texts],
            rewards=rewards[0] if is_only else [row[0] for row in rewards],
        )

    def _grade(self, decoded: Decoded) -> Grades:
        at = list(np.ndindex(len(self.prompts), self._num_samples))
        return self._grader.grade(
            [self.prompts[i] for i, _ in at],
            [decoded.tokens[i, j, : decoded.lengths[i, j]] for i, j in at],
            decoded.has_eos.reshape(-1).tolist(),
        )
