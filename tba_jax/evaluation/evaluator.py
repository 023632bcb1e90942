# SPDX-License-Identifier: Apache-2.0
"""Held-out evaluation of a policy: responses to the task's evaluation split, graded and measured.

An evaluation uses the decoder and the reward source of training, at one policy version. Any process
with the weights can decode, grade and measure a shard of the prompts. Metrics are computed from all
shards together. Invariant: the same weights give the same metrics, because a prompt has the same
random key in every call, and shards do not depend on the number of workers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tba_jax.decoding.engine import Decoder, row_keys
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.environments.episodes import Episodes, open_session
from tba_jax.flow.evaluation_shard import EvaluationShard
from tba_jax.flow.trajectory import Prompt
from tba_jax.rewards.grader import Grader
from tba_jax.rewards.source import part_means


class Responses(NamedTuple):
    """Responses to p prompts, n to each, with their rewards and measurements.

    Attributes:
        prompts: p prompts.
        tokens: int32 [p n t], padded.
        lengths: int [p n], number of tokens of each response, end-of-sequence included.
        has_eos: bool [p n], False if the length limit cut the response.
        texts: n response texts per prompt.
        rewards: n rewards per prompt; None where the reward failed.
        parts: name -> n values per prompt that the reward source reports besides the rewards.
        measured: name -> values per prompt that the measures returned.
    """

    prompts: Sequence[Prompt]
    tokens: np.ndarray
    lengths: np.ndarray
    has_eos: np.ndarray
    texts: list[list[str]]
    rewards: list[list[float | None]]
    parts: Mapping[str, list[list[float]]]
    measured: Mapping[str, list[list[float]]] = {}


# Computes measurements that need the weights or another judge: (weights in the decoder's layout,
# responses of a shard) -> {name: values per prompt}. The results become `Responses.measured`.
Measure = Callable[[Any, Responses], Mapping[str, list[list[float]]]]

# Computes metrics by name from all responses of one evaluation, such as {"win_rate": 0.61}.
MetricFunction = Callable[[Responses], Mapping[str, float]]


class ShardEvaluator(NamedTuple):
    """Decoder and grader that evaluate shards on one set of devices."""

    decoder: Decoder
    grader: Grader
    measures: tuple[Measure, ...] = ()
    episodes: Episodes | None = None


class Evaluation(NamedTuple):
    """Result of one evaluation.

    Attributes:
        metric: name of the headline metric, a key of `values`.
        values: metric name -> value. `reward_mean` is the mean of the rewards that did not fail;
            `reward_part_NAME` is the mean of one of several rewards. `pass_at_1` is the mean reward
            with failures counted as 0 (accuracy for rewards 0 or 1); if it is the headline,
            `values` also has pass_at_2, 4, ... up to the samples per prompt.
        n: number of graded prompts.
        num_skipped: number of prompts that are left out because they are too long.
        num_failed: number of responses whose reward failed.
        response_length_mean: mean number of tokens of a response, end-of-sequence included.
        kind_share: share of responses of the task's first kind; 0 for tasks without kinds.
        num_trials: number of independent trials: prompts, or the responses to a single prompt.
        texts: first response to every prompt; with a single prompt, all responses.
        rewards: reward of each response, None for failures.
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
        """Return all fields except texts and rewards, JSON-compatible."""
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
    """Return pass_at_1, and unbiased estimates of pass_at_k for k = 2, 4, ..., at most n.

    pass_at_1 is the mean reward, in which failures count as 0. For larger k, it is the mean over
    prompts of 1 - C(n - c, k) / C(n, k), where c of the n responses are correct (reward >= 1).

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
        num_skipped: number of prompts that were left out because they are too long; only reported.
        shard_evaluators: one for each set of devices.
        sampling: settings of the responses.
        num_samples: responses per prompt.
        num_slots: responses decoded at a time.
        metric: headline metric: `reward_mean`, `pass_at_1`, or a metric that `metrics` return.
        metrics: further metric functions, called in this order.

    Attributes:
        shard_size: number of prompts per shard, which fills the slots.
    """

    def __init__(
        self,
        *,
        prompts: Sequence[Prompt],
        num_skipped: int,
        shard_evaluators: Sequence[ShardEvaluator],
        sampling: SamplingSettings,
        num_samples: int,
        num_slots: int,
        metric: str,
        metrics: Sequence[MetricFunction] = (),
    ) -> None:
        self.prompts = list(prompts)
        self.num_skipped = num_skipped
        self._shard_evaluators = list(shard_evaluators)
        self._sampling = sampling
        self._num_slots = num_slots
        self._metric = metric
        self._num_samples = num_samples
        self._metrics = tuple(metrics)
        self.shard_size = min(max(1, num_slots // num_samples), len(self.prompts))

    @property
    def num_shards(self) -> int:
        """Number of shards of an evaluation."""
        return -(-len(self.prompts) // self.shard_size)

    def run(self, params: Any) -> Evaluation:
        """Evaluate all prompts on the first set of devices.

        Raises:
            ValueError: no function reports the headline metric.
        """
        return self.merge([self._evaluate(params, 0, len(self.prompts), 0, 0)])

    def shard(self, params: Any, number: int, device_set: int = 0) -> EvaluationShard:
        """Decode and grade the responses of one shard.

        Args:
            params: weights on the devices of `device_set`.
            device_set: index of the set of devices, as in `shard_evaluators`.
        """
        first = number * self.shard_size
        stop = min(first + self.shard_size, len(self.prompts))
        # Prompts of the previous shard fill up the last shard, so that all shards have one shape.
        return self._evaluate(params, stop - self.shard_size, stop, first, device_set)

    def merge(self, parts: Sequence[EvaluationShard]) -> Evaluation:
        """Compute the metrics of all shards together, in any order.

        Raises:
            ValueError: no function reports the headline metric.
        """
        parts = sorted(parts, key=lambda part: part.first)
        responses = _joined(parts, self.prompts)
        texts, rewards = responses.texts, responses.rewards
        flat = [r for row in rewards for r in row]
        known = [r for r in flat if r is not None]
        values = pass_at_k(rewards) if self._metric == "pass_at_1" else {}
        values["reward_mean"] = float(np.mean(known)) if known else float("nan")
        values.update(
            part_means({k: [x for row in v for x in row] for k, v in responses.parts.items()})
        )
        for measure in self._metrics:
            values.update({name: float(value) for name, value in measure(responses).items()})
        if self._metric not in values:
            raise ValueError(
                f"the task's headline metric {self._metric!r} is not among the metrics of "
                f"evaluation: {', '.join(values)}. Add a metric function that returns it, or set "
                "the task's `metric` to one of these"
            )
        is_only = len(self.prompts) == 1
        kinds = [kind for part in parts for row in part.is_first_kind for kind in row]
        return Evaluation(
            metric=self._metric,
            values=values,
            n=len(self.prompts),
            num_skipped=self.num_skipped,
            num_failed=len(flat) - len(known),
            response_length_mean=float(np.mean(responses.lengths)),
            kind_share=sum(kinds) / len(kinds),
            num_trials=self._num_samples if is_only else len(self.prompts),
            texts=texts[0] if is_only else [row[0] for row in texts],
            rewards=rewards[0] if is_only else [row[0] for row in rewards],
        )

    def _evaluate(
        self, params: Any, begin: int, stop: int, first: int, device_set: int
    ) -> EvaluationShard:
        """Decode prompts[begin:stop]; return the graded responses to prompts[first:stop]."""
        decoder, grader, measures, episodes = self._shard_evaluators[device_set]
        n, params = self._num_samples, decoder.weights(params)
        keys = row_keys(jax.random.key(0), len(self.prompts) * n).reshape(-1, n, 2)
        # Environments have seen the prompts before `first` already.
        begin = begin if episodes is None else first
        session = open_session(
            decoder,
            params,
            episodes,
            num_slots=min(self._num_slots, (stop - begin) * n),
            num_samples=n,
        )
        temperatures = np.full(n, self._sampling.temperature)
        for prompt, own in zip(self.prompts[begin:stop], keys[begin:stop], strict=True):
            session.submit(prompt, own, self._sampling, temperatures)
        found = sorted(session.run(), key=lambda y: (y.request, y.sample))
        found = found[(first - begin) * n :]
        prompts = self.prompts[first:stop]
        grades = grader.grade(
            [prompt for prompt in prompts for _ in range(n)],
            [y.graded_tokens for y in found],
            [y.has_eos for y in found],
            [y.verdict for y in found],
        )

        def by_prompt(flat: Sequence[Any]) -> list[list[Any]]:
            return [list(flat[i : i + n]) for i in range(0, len(flat), n)]

        lists = by_prompt([y.tokens.tolist() for y in found])
        has_eos = by_prompt([y.has_eos for y in found])
        responses = Responses(
            prompts,
            *_padded(lists, self._sampling.max_new_tokens, decoder.pad_id),
            np.array(has_eos),
            by_prompt(grades.texts),
            by_prompt(grades.rewards),
            {name: by_prompt(values) for name, values in grades.parts.items()},
        )
        measured: dict[str, list[list[float]]] = {}
        for measure in measures:
            measured.update(measure(params, responses))
        return EvaluationShard(
            first,
            lists,
            has_eos,
            responses.texts,
            responses.rewards,
            responses.parts,
            by_prompt(grades.is_first_kind),
            measured,
        )


def _padded(
    rows: Sequence[Sequence[Sequence[int]]], length: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (padded tokens, int32 [p n length]; lengths, int [p n])."""
    lengths = np.array([[len(tokens) for tokens in row] for row in rows])
    tokens = np.full((*lengths.shape, length), pad_id, np.int32)
    for i, j in np.ndindex(lengths.shape):
        tokens[i, j, : lengths[i, j]] = rows[i][j]
    return tokens, lengths


def _joined(parts: Sequence[EvaluationShard], prompts: Sequence[Prompt]) -> Responses:
    """Return the responses of all shards, in the order of the prompts.

    Raises:
        ValueError: some prompts are missing or repeated.
    """
    rows = [row for part in parts for row in part.tokens]
    starts = np.cumsum([0, *(len(part.tokens) for part in parts)]).tolist()
    if [part.first for part in parts] != starts[:-1] or len(rows) != len(prompts):
        raise ValueError(
            f"shards of an evaluation start at prompts {[part.first for part in parts]} and "
            f"hold {len(rows)} prompts; wanted each of the {len(prompts)} prompts once"
        )
    longest = max(len(tokens) for row in rows for tokens in row)
    tokens, lengths = _padded(rows, longest, 0)

    def joined(tables: Sequence[Mapping[str, list[list[float]]]]) -> dict[str, list[list[float]]]:
        return {name: [row for table in tables for row in table[name]] for name in tables[0]}

    return Responses(
        prompts,
        tokens,
        lengths,
        np.array([row for part in parts for row in part.has_eos]),
        [row for part in parts for row in part.texts],
        [row for part in parts for row in part.rewards],
        joined([part.parts for part in parts]),
        joined([part.measured for part in parts]),
    )
