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
from tba_jax.flow.trajectory import Prompt
from tba_jax.rewards.source import RewardSource, part_means


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
        rewards: computes rewards.
        decode_text: token ids -> texts.
        response_kind, first_kind: as for the searcher.
        max_new_tokens: response limit.
        num_slots: responses decoded at a time.
        metric: the headline; `reward_mean`, `pass_at_1`, or what one of `metrics` returns.
        num_samples: responses per prompt.
        temperature: of sampling; 0: greedy.
        min_new_tokens: no response ends before as many tokens.
        metrics: further metric functions, in the order they are asked.
    """

    def __init__(
        self,
        *,
        prompts: Sequence[Prompt],
        num_skipped: int,
        decoder: Decoder,
        rewards: RewardSource,
        decode_text: Callable[[Sequence[np.ndarray]], list[str]],
        response_kind: Callable[[str], str | None],
        first_kind: str,
        max_new_tokens: int,
        num_slots: int,
        metric: str = "pass_at_1",
        num_samples: int = 1,
        temperature: float = 0.0,
        min_new_tokens: int = 0,
        metrics: Sequence[MetricFunction] = (),
    ) -> None:
        self.prompts = list(prompts)
        self.num_skipped = num_skipped
        self._decoder = decoder
        self._rewards = rewards
        self._decode_text = decode_text
        self._response_kind = response_kind
        self._first_kind = first_kind
        self._settings = SamplingSettings(
            max_new_tokens, temperature=temperature, min_new_tokens=min_new_tokens
        )
        self._num_slots = num_slots
        self._metric = metric
        self._num_samples = num_samples
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
            settings=self._settings,
            num_slots=self._num_slots,
        )
        texts, rewards, parts = self._grade(decoded)
        flat_rewards = [r for row in rewards for r in row]
        known = [r for r in flat_rewards if r is not None]
        values = pass_at_k(rewards) if self._metric == "pass_at_1" else {}
        values["reward_mean"] = float(np.mean(known)) if known else float("nan")
        flat_parts = {name: [v for row in rows for v in row] for name, rows in parts.items()}
        values.update(part_means(flat_parts))
        responses = Responses(params, self.prompts, decoded, texts, rewards, parts)
        for measure in self._metrics:
            values.update({name: float(value) for name, value in measure(responses).items()})
        if self._metric not in values:
            raise ValueError(
                f"the task's headline metric {self._metric!r} is not among those that evaluation "
                f"reports: {', '.join(values)}. Give evaluation the function that measures it, or "
                "name another as the task's `metric`"
            )
        kinds = [self._response_kind(text) for row in texts for text in row]
        is_only = len(self.prompts) == 1
        return Evaluation(
            metric=self._metric,
            values=values,
            n=len(self.prompts),
            num_skipped=self.num_skipped,
            num_failed=len(flat_rewards) - len(known),
            response_length_mean=float(np.mean(decoded.lengths)),
            kind_share=sum(kind == self._first_kind for kind in kinds) / len(kinds)
            if self._first_kind
            else 0.0,
            num_trials=self._num_samples if is_only else len(self.prompts),
            texts=texts[0] if is_only else [row[0] for row in texts],
            rewards=rewards[0] if is_only else [row[0] for row in rewards],
        )

    def _grade(
        self, decoded: Decoded
    ) -> tuple[list[list[str]], list[list[float | None]], dict[str, list[list[float]]]]:
        """Texts, rewards and parts of rewards, by prompt and sample."""
        n = self._num_samples
        at = list(np.ndindex(len(self.prompts), n))
        responses = [decoded.tokens[i, j, : decoded.lengths[i, j]] for i, j in at]
        texts = self._decode_text(responses)
        scores = self._rewards.score(
            [self.prompts[i].text for i, _ in at],
            texts,
            {
                name: [self.prompts[i].columns[name] for i, _ in at]
                for name in self.prompts[0].columns
            },
            completion_ids=responses,
            has_eos=decoded.has_eos.reshape(-1).tolist(),
        )

        def by_prompt(flat: Sequence[Any]) -> list[list[Any]]:
            return [list(flat[i : i + n]) for i in range(0, len(at), n)]

        parts = {name: by_prompt(values) for name, values in scores.parts.items()}
        return by_prompt(texts), by_prompt(scores.rewards), parts
