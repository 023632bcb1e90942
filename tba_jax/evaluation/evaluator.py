# SPDX-License-Identifier: Apache-2.0
"""Held-out evaluation of a policy: responses to the task's evaluation split, graded and measured.

An evaluation uses the decoder and the reward source of training, at one policy version. Any
searcher with the weights can answer a shard of the prompts (`ShardEvaluator`). Metrics are computed
from all shards together (`Evaluator`). Invariant: the same weights give the same metrics, because a
prompt has the same random key in every call, and shards do not depend on the number of searchers
(tests/evaluation/test_evaluator.py).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.decoding.sampling import fold_in
from tba_jax.environments.episodes import EnvironmentPool, EpisodeSession
from tba_jax.flow.tickets import EvaluationShard, EvaluationTicket
from tba_jax.flow.trajectory import Prompt
from tba_jax.rewards.scores import Grader, part_means


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

    @classmethod
    def of(cls, prompts: Sequence[Prompt], shards: Sequence[EvaluationShard], length: int):
        """Return the responses of shards in the order of their prompts, padded to `length`."""
        rows = [row for shard in shards for row in shard.tokens]
        lengths = np.array([[len(tokens) for tokens in row] for row in rows])
        padded = np.zeros((*lengths.shape, length), np.int32)
        for i, j in np.ndindex(lengths.shape):
            padded[i, j, : lengths[i, j]] = rows[i][j]

        def joined(name: str) -> dict[str, list[list[float]]]:
            # A reward may report a value for some responses only.
            keys = dict.fromkeys(key for shard in shards for key in getattr(shard, name))
            none = [[[math.nan] * len(row) for row in shard.rewards] for shard in shards]
            pairs = [(getattr(x, name), rows) for x, rows in zip(shards, none, strict=True)]
            return {key: [row for x, rows in pairs for row in x.get(key, rows)] for key in keys}

        return cls(
            prompts,
            padded,
            lengths,
            np.array([row for shard in shards for row in shard.has_eos]),
            [row for shard in shards for row in shard.texts],
            [row for shard in shards for row in shard.rewards],
            joined("parts"),
            joined("measured"),
        )


# Computes measurements that need the weights or another judge: (weights in the decoder's layout,
# responses of a shard) -> {name: values per prompt}. The results become `Responses.measured`.
Measure = Callable[[Any, Responses], Mapping[str, list[list[float]]]]

# Computes metrics by name from all responses of one evaluation, such as {"win_rate": 0.61}.
MetricFunction = Callable[[Responses], Mapping[str, float]]


@dataclasses.dataclass(frozen=True)
class ShardEvaluator:
    """Answers, grades and measures shards on one set of devices.

    Attributes:
        sampling: settings of the responses.
        num_samples: n, responses per prompt.
        num_slots: responses decoded at a time.
    """

    decoder: Decoder
    grader: Grader
    sampling: SamplingSettings
    num_samples: int
    num_slots: int
    measures: tuple[Measure, ...] = ()
    environments: EnvironmentPool | None = None

    def evaluate(self, params: Any, ticket: EvaluationTicket) -> EvaluationShard:
        """Return the graded responses to the prompts of a shard.

        Args:
            params: weights on these devices.
        """
        n, prompts, params = self.num_samples, ticket.prompts, self.decoder.weights(params)
        session = EpisodeSession(self.decoder, params, self.environments, num_slots=self.num_slots)
        numbers = np.arange(ticket.first * n, (ticket.first + len(prompts)) * n)
        keys = fold_in(jax.random.key(0), numbers).reshape(-1, n, 2)
        temperatures = np.full(n, self.sampling.temperature)
        for prompt, own in zip(prompts, keys, strict=True):
            session.submit(prompt, own, self.sampling, temperatures)
        found = sorted(session.run(), key=lambda y: (y.request, y.sample))
        grades = self.grader.grade(
            [prompt for prompt in prompts for _ in range(n)],
            [y.graded_tokens for y in found],
            [y.has_eos for y in found],
            [y.verdict for y in found],
        )

        def by_prompt(flat: Sequence[Any]) -> list[list[Any]]:
            return [list(flat[i : i + n]) for i in range(0, len(flat), n)]

        shard = EvaluationShard(
            ticket.first,
            by_prompt([y.tokens.tolist() for y in found]),
            by_prompt([y.has_eos for y in found]),
            by_prompt([x.text for x in grades]),
            by_prompt([x.reward for x in grades]),
            by_prompt([x.is_first_kind for x in grades]),
            {name: by_prompt([x.parts[name] for x in grades]) for name in grades[0].parts},
            {},
        )
        responses = Responses.of(prompts, [shard], self.sampling.max_new_tokens)
        measured: dict[str, list[list[float]]] = {}
        for measure in self.measures:
            measured.update(measure(params, responses))
        return shard._replace(measured=measured)


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
        fields = self._asdict()
        values = fields.pop("values")
        del fields["texts"], fields["rewards"]
        return {**values, **fields}


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


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Division of an evaluation into shards, and its metrics.

    Attributes:
        prompts: held-out prompts, the same for every evaluation.
        num_skipped: number of prompts that were left out because they are too long; only reported.
        shard_size: number of prompts per shard, which fills the slots.
        metric: headline metric: `reward_mean`, `pass_at_1`, or a metric that `metrics` return.
        metrics: further metric functions, called in this order.
    """

    prompts: list[Prompt]
    num_skipped: int
    shard_size: int
    metric: str
    metrics: tuple[MetricFunction, ...] = ()

    def tickets(self, version: int) -> list[EvaluationTicket]:
        """Return the shards of an evaluation."""
        size = self.shard_size
        return [
            EvaluationTicket(version, first, tuple(self.prompts[first : first + size]))
            for first in range(0, len(self.prompts), size)
        ]

    def merge(self, shards: Sequence[EvaluationShard]) -> Evaluation:
        """Compute the metrics of all shards together, in any order.

        Raises:
            ValueError: no function reports the headline metric.
        """
        shards = sorted(shards, key=lambda shard: shard.first)
        longest = max(len(tokens) for shard in shards for row in shard.tokens for tokens in row)
        responses = Responses.of(self.prompts, shards, longest)
        texts, rewards = responses.texts, responses.rewards
        assert len(texts) == len(self.prompts), "each prompt has been answered once"
        flat = [r for row in rewards for r in row]
        known = [r for r in flat if r is not None]
        values = pass_at_k(rewards) if self.metric == "pass_at_1" else {}
        values["reward_mean"] = float(np.mean(known)) if known else float("nan")
        values |= part_means({k: [x for row in v for x in row] for k, v in responses.parts.items()})
        for function in self.metrics:
            values.update({name: float(value) for name, value in function(responses).items()})
        if self.metric not in values:
            raise ValueError(
                f"the task's headline metric {self.metric!r} is not among the metrics of "
                f"evaluation: {', '.join(values)}. Add a metric function that returns it, or set "
                "the task's `metric` to one of these"
            )
        is_only = len(self.prompts) == 1
        return Evaluation(
            metric=self.metric,
            values=values,
            n=len(self.prompts),
            num_skipped=self.num_skipped,
            num_failed=len(flat) - len(known),
            response_length_mean=float(np.mean(responses.lengths)),
            kind_share=float(np.mean([row for shard in shards for row in shard.is_first_kind])),
            num_trials=responses.lengths.size if is_only else len(self.prompts),
            texts=texts[0] if is_only else [row[0] for row in texts],
            rewards=rewards[0] if is_only else [row[0] for row in rewards],
        )
