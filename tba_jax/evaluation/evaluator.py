# SPDX-License-Identifier: Apache-2.0
"""Held-out evaluation of a policy: responses to the task's evaluation split, graded and measured.

It uses the decoder and the reward source that training uses, at one pinned policy version. What
needs weights or rewards is done part by part, wherever these weights are; figures are made of all
parts together. It does not know whether a trainer is running, who does which part, nor what a task
counts as good: it reports the mean reward, pass@k where that is the task's headline, and whatever
the metric functions it is given return. Invariant: the same weights give the same figures, because
a problem draws from the same key in every call, and parts do not depend on how many do them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tba_jax.decoding.engine import Decoded, Decoder, row_keys
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.environments.episodes import Episodes, EpisodeSession
from tba_jax.evaluation.config import EvalSettings
from tba_jax.flow.evaluation_shard import EvaluationShard
from tba_jax.flow.trajectory import Prompt
from tba_jax.rewards.grader import Grader
from tba_jax.rewards.source import Verdict, part_means


class Responses(NamedTuple):
    """Responses to p prompts, n to each, and what was made of them.

    Attributes:
        prompts: p prompts.
        tokens: int32 [p n t], padded.
        lengths: int [p n], tokens of each response, end-of-sequence included.
        has_eos: bool [p n], False where the length limit cut the response.
        texts: n response texts per prompt.
        rewards: n rewards per prompt, None where one could not be computed.
        parts: name -> n values per prompt, what the reward source reports beside the rewards.
        measured: name -> values per prompt, of the measures.
    """

    prompts: Sequence[Prompt]
    tokens: np.ndarray
    lengths: np.ndarray
    has_eos: np.ndarray
    texts: list[list[str]]
    rewards: list[list[float | None]]
    parts: Mapping[str, list[list[float]]]
    measured: Mapping[str, list[list[float]]] = {}


# What needs the weights or another judge, part by part: the weights evaluated, in the decoder's
# layout, and the responses of a part -> name and values per prompt, to be found in `measured`.
Measure = Callable[[Any, Responses], Mapping[str, list[list[float]]]]

# Named floats made of all responses of one evaluation, e.g. {"win_rate": 0.61}.
MetricFunction = Callable[[Responses], Mapping[str, float]]


class Station(NamedTuple):
    """What evaluates on one set of devices: decoder, grader, measures, makers of episodes."""

    decoder: Decoder
    grader: Grader
    measures: tuple[Measure, ...] = ()
    episodes: Episodes | None = None


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
        stations: where parts can be done, counted from 0; equal but for their devices.
        settings: how many responses are drawn, and how.
        metric: the headline; `reward_mean`, `pass_at_1`, or what one of `metrics` returns.
        min_new_tokens: no response ends before as many tokens.
        metrics: further metric functions, in the order they are asked.

    Attributes:
        part_size: prompts of a part, as many as fill the slots.
    """

    def __init__(
        self,
        *,
        prompts: Sequence[Prompt],
        num_skipped: int,
        stations: Sequence[Station],
        settings: EvalSettings,
        metric: str,
        min_new_tokens: int = 0,
        metrics: Sequence[MetricFunction] = (),
    ) -> None:
        self.prompts = list(prompts)
        self.num_skipped = num_skipped
        self._stations = list(stations)
        self._sampling = SamplingSettings(
            settings.max_new_tokens,
            temperature=settings.temperature,
            min_new_tokens=min_new_tokens,
        )
        self._num_slots = settings.num_slots
        self._metric = metric
        self._num_samples = settings.num_samples
        self._metrics = tuple(metrics)
        size = max(1, settings.num_slots // settings.num_samples)
        self.part_size = min(size, len(self.prompts))

    @property
    def num_parts(self) -> int:
        """Parts of an evaluation."""
        return -(-len(self.prompts) // self.part_size)

    def run(self, params: Any) -> Evaluation:
        """Decode, grade and measure all at once, at the first station.

        Raises:
            ValueError: nothing reports the headline metric.
        """
        return self.merge([self._answer(params, 0, len(self.prompts), 0, 0)])

    def part(self, params: Any, number: int, station: int = 0) -> EvaluationShard:
        """One part.

        Args:
            params: the weights, on the devices of the station.
            number: of the part, counted from 0.
            station: which one does it.
        """
        first = number * self.part_size
        stop = min(first + self.part_size, len(self.prompts))
        # The last one is filled up with prompts of the one before: all parts have one shape.
        return self._answer(params, stop - self.part_size, stop, first, station)

    def merge(self, parts: Sequence[EvaluationShard]) -> Evaluation:
        """The figures of all parts together, in whatever order they come.

        Raises:
            ValueError: nothing reports the headline metric.
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
                f"the task's headline metric {self._metric!r} is not among those that evaluation "
                f"reports: {', '.join(values)}. Give evaluation the function that measures it, or "
                "name another as the task's `metric`"
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

    def _answer(
        self, params: Any, begin: int, stop: int, first: int, station: int
    ) -> EvaluationShard:
        """Decode prompts `begin` to `stop`; grade and measure those from `first` on."""
        decoder, grader, measures, episodes = self._stations[station]
        n, params = self._num_samples, decoder.weights(params)
        keys = row_keys(jax.random.key(0), len(self.prompts) * n).reshape(-1, n, 2)
        prompts = self.prompts[first:stop]
        verdicts: list[Verdict | None] = []
        if episodes is None:
            decoded = decoder.decode(
                params,
                [p.tokens for p in self.prompts[begin:stop]],
                num_samples=n,
                key=keys[begin:stop],
                settings=self._sampling,
                num_slots=self._num_slots,
            )
            decoded = Decoded(*(x[first - begin :] for x in decoded))
        else:
            session = decoder.session(
                params, num_slots=self._num_slots, prefill_prompts=self._num_slots, is_fed=True
            )
            decoded, verdicts = _episodes(
                episodes.over(session), prompts, keys[first:stop], self._sampling
            )
        at = list(np.ndindex(decoded.lengths.shape))
        tokens = [decoded.tokens[i, j, : decoded.lengths[i, j]] for i, j in at]
        has_eos = decoded.has_eos.ravel().tolist()
        grades = grader.grade([prompts[i] for i, _ in at], tokens, has_eos, verdicts)

        def by_prompt(flat: Sequence[Any]) -> list[list[Any]]:
            return [list(flat[i : i + n]) for i in range(0, len(flat), n)]

        responses = Responses(
            prompts,
            decoded.tokens,
            decoded.lengths,
            decoded.has_eos,
            by_prompt(grades.texts),
            by_prompt(grades.rewards),
            {name: by_prompt(values) for name, values in grades.parts.items()},
        )
        measured: dict[str, list[list[float]]] = {}
        for measure in measures:
            measured.update(measure(params, responses))
        return EvaluationShard(
            first,
            by_prompt([row.tolist() for row in tokens]),
            decoded.has_eos.tolist(),
            responses.texts,
            responses.rewards,
            responses.parts,
            by_prompt(grades.is_first_kind),
            measured,
        )


def _episodes(
    session: EpisodeSession, prompts: Sequence[Prompt], keys: np.ndarray, settings: SamplingSettings
) -> tuple[Decoded, list[Verdict | None]]:
    """Episodes of the prompts as responses, and the verdicts of their environments."""
    n = keys.shape[1]
    temperatures = np.full(n, settings.temperature, np.float32)
    for prompt, own in zip(prompts, keys, strict=True):
        session.submit(prompt, own, settings, temperatures)
    episodes = sorted(session.run(), key=lambda y: (y.request, y.sample))
    shape = len(prompts), n
    decoded = Decoded(
        np.zeros((*shape, settings.max_new_tokens), np.int32),
        np.array([len(y.tokens) for y in episodes]).reshape(shape),
        np.zeros((*shape, settings.max_new_tokens), np.float32),
        np.array([y.has_eos for y in episodes]).reshape(shape),
        np.array([y.version_min for y in episodes]).reshape(shape),
        np.array([y.version_max for y in episodes]).reshape(shape),
    )
    for y in episodes:
        at = (y.request, y.sample)
        decoded.tokens[at][: len(y.tokens)] = y.tokens
        decoded.token_logprobs[at][: len(y.tokens)] = y.token_logprobs
    return decoded, [y.verdict for y in episodes]


def _joined(parts: Sequence[EvaluationShard], prompts: Sequence[Prompt]) -> Responses:
    """The responses of all parts, in order.

    Raises:
        ValueError: some prompts are missing, or come twice.
    """
    rows = [row for part in parts for row in part.tokens]
    starts = np.cumsum([0, *(len(part.tokens) for part in parts)]).tolist()
    if [part.first for part in parts] != starts[:-1] or len(rows) != len(prompts):
        raise ValueError(
            f"the parts of an evaluation begin at prompts {[part.first for part in parts]} and "
            f"hold {len(rows)}; wanted all {len(prompts)} prompts once"
        )
    lengths = np.array([[len(tokens) for tokens in row] for row in rows])
    tokens = np.zeros((*lengths.shape, int(lengths.max())), np.int32)
    for i, j in np.ndindex(lengths.shape):
        tokens[i, j, : lengths[i, j]] = rows[i][j]

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
