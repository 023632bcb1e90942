# SPDX-License-Identifier: Apache-2.0
"""Rewards: the interface `async score(completions) -> scores`, sums, and the grader of a run.

Invariant: every response gets a finite reward or a named reason, in the order of the responses.
"""

import asyncio
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    from tba_jax.devices.site import Site
    from tba_jax.flow.trajectory import Prompt

NONE = "reward_none"
"""Reason of a response to which no reward applies."""
TOO_LONG = "attack_too_long"
"""Reason of an attack that the victim cannot read."""


class Completions(NamedTuple):
    """Responses to score. Neighbours with the same prompt are a group.

    Attributes:
        prompts: prompt texts, one per response.
        texts: response texts, without special tokens.
        columns: further columns of the data, each with one value per response.
        ids: int32 [t] each, the tokens of the responses, end-of-sequence included.
        has_eos: False if the length limit cut the response.
    """

    prompts: Sequence[str]
    texts: Sequence[str]
    columns: Mapping[str, Sequence[Any]]
    ids: "Sequence[np.ndarray]" = ()
    has_eos: Sequence[bool] = ()


def responses_to(prompts: "Sequence[Prompt]", texts: Any, ids: Any, has_eos: Any) -> Completions:
    """Return responses to these prompts, of which there is at least one."""
    columns = {name: [p.columns[name] for p in prompts] for name in prompts[0].columns}
    return Completions([p.text for p in prompts], texts, columns, ids, has_eos)


class Scores(NamedTuple):
    """Rewards of some responses, in their order; they can be written as JSON.

    Attributes:
        rewards: a finite number, or None if the response has a reason.
        reasons: name of the failure, or None if the response has a reward.
        text: description of the first failure, such as a traceback; empty without a failure.
        parts: further values by name, one per response, such as those of each reward of a sum; nan
            for no value.
    """

    rewards: Sequence[float | None]
    reasons: Sequence[str | None]
    text: str = ""
    parts: Mapping[str, Sequence[float]] = {}


class Verdict(NamedTuple):
    """Reward of an environment for an episode, or the reason (name of the failure) for none."""

    reward: float | None
    reason: str | None


class RewardFailure(RuntimeError):
    """Rewards cannot be computed, or fail too often; the message has the cause."""


class RewardSource:
    """Thread-safe source of rewards; a subclass has at least `score`."""

    def check(self) -> None:
        """Wait until rewards can be computed.

        Raises:
            ValueError, RewardFailure: rewards cannot be computed.
        """

    async def score(self, completions: Completions) -> Scores:
        """Return a reward or a reason for each response."""
        raise NotImplementedError

    def on(self, site: "Site") -> "RewardSource":
        """Return the source for a searcher on these devices; self, unless it has a model."""
        return self

    def close(self) -> None:
        """Release all resources; a concurrent `score` ends with an error."""


def failed(n: int, reason: str, text: str = "") -> Scores:
    """Return the scores of n responses that failed by one name."""
    return Scores([None] * n, [reason] * n, text)


def joined(n: int, found: Iterable[tuple[Sequence[int], Scores]]) -> Scores:
    """Return the scores of n responses from the scores of some of them, given by index.

    The reason of a response without a score is `NONE`.
    """
    rewards: list[float | None] = [None] * n
    reasons: list[str | None] = [NONE] * n
    parts: dict[str, list[float]] = {}
    text = ""
    for items, scores in found:
        text = text or scores.text
        for place, item in enumerate(items):
            rewards[item], reasons[item] = scores.rewards[place], scores.reasons[place]
            for name, values in scores.parts.items():
                parts.setdefault(name, [math.nan] * n)[item] = values[place]
    return Scores(rewards, reasons, text, parts)


def summed(results: Mapping[str, Scores], weights: Sequence[float]) -> Scores:
    """Return the weighted sum of several rewards of the same responses.

    A response on which one reward fails has no reward: a partial sum would be a different reward. A
    reward that does not apply to a response (`NONE`) is left out of its sum. The parts of a sum of
    one reward are those of the reward.
    """
    rewards: list[float | None] = []
    reasons: list[str | None] = []
    values, causes = ([x[i] for x in results.values()] for i in range(2))
    for own, why in zip(zip(*values, strict=True), zip(*causes, strict=True), strict=True):
        broken = [cause for cause in why if cause not in (None, NONE)]
        reasons.append(broken[0] if broken else None if None in why else NONE)
        known = [w * x for w, x in zip(weights, own, strict=True) if x is not None]
        rewards.append(math.fsum(known) if reasons[-1] is None else None)
    parts: dict[str, Sequence[float]] = {}
    for name, result in results.items():
        parts.update(result.parts)
        if len(results) > 1:
            parts[name] = [math.nan if value is None else value for value in result.rewards]
    # A reward that does not apply to some responses needs no traceback.
    text = next((x.text for x in results.values() if x.text), "") if any(reasons) else ""
    return Scores(rewards, reasons, text, parts)


def part_means(parts: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the mean of each part over the items to which it applies, as `reward_part_NAME`."""
    means = {}
    for name, values in parts.items():
        known = [value for value in values if not math.isnan(value)]
        means[f"reward_part_{name}"] = math.fsum(known) / len(known) if known else math.nan
    return means


@dataclasses.dataclass(frozen=True)
class WeightedSum(RewardSource):
    """The weighted sum of rewards, which stops a run if too many responses fail.

    Attributes:
        sources: rewards by name.
        weights: one per source; empty: 1 each.
        max_failure_rate: share of the responses of a call that may fail. A response to which no
            reward applies, or an attack that is too long, is no failure.
    """

    sources: Mapping[str, RewardSource]
    weights: Sequence[float] = ()
    max_failure_rate: float = 1.0

    def check(self) -> None:
        for source in self.sources.values():
            source.check()

    async def score(self, completions: Completions) -> Scores:
        """Return the sum for each response; the sources score concurrently.

        Raises:
            RewardFailure: too many responses failed.
        """
        found = await asyncio.gather(*(x.score(completions) for x in self.sources.values()))
        weights = self.weights or (1.0,) * len(found)
        result = summed(dict(zip(self.sources, found, strict=True)), weights)
        n = len(result.reasons)
        counts = Counter(x for x in result.reasons if x not in (None, NONE, TOO_LONG))
        if counts.total() > self.max_failure_rate * n:
            raise RewardFailure(
                f"reward {', '.join(self.sources)} failed on {counts.total()} of {n} responses "
                f"{dict(counts)}, above reward.max_failure_rate = {self.max_failure_rate}. First "
                f"failure:\n{result.text}"
            )
        return result

    def on(self, site: "Site") -> "WeightedSum":
        there = {name: source.on(site) for name, source in self.sources.items()}
        return dataclasses.replace(self, sources=there)

    def close(self) -> None:
        for source in self.sources.values():
            source.close()


class Grades(NamedTuple):
    """Texts, rewards and kinds of n responses.

    Attributes:
        texts: responses as text, without special tokens.
        rewards, reasons, parts: as in `Scores`.
        is_first_kind: whether a response is of the task's first kind; False for tasks without
            kinds.
    """

    texts: Sequence[str]
    rewards: Sequence[float | None]
    reasons: Sequence[str | None]
    parts: Mapping[str, Sequence[float]]
    is_first_kind: Sequence[bool]

    def between(self, start: int, stop: int) -> "Grades":
        """Return the grades of responses start, ..., stop - 1."""
        chosen = slice(start, stop)
        texts, rewards, reasons, parts, is_first_kind = self
        own = {name: values[chosen] for name, values in parts.items()}
        return Grades(texts[chosen], rewards[chosen], reasons[chosen], own, is_first_kind[chosen])

    @property
    def kind_share(self) -> float:
        """Return the share of responses of the task's first kind."""
        return sum(self.is_first_kind) / len(self.is_first_kind)


@dataclasses.dataclass(frozen=True)
class Grader:
    """Thread-safe computation of the texts, rewards and kinds of responses.

    Attributes:
        rewards: source of the rewards; None: the environment gives them.
        decode_text: token ids -> text of each response, special tokens dropped.
        response_kind: text -> kind of the response, or None.
        first_kind: the kind whose share is logged; "": no share is logged.
        data_sets: values of the column `data_set` for which rewards are reported separately.
        adds: whether rewards of the source are added to those of the environment; if not, the
            source scores only responses without a verdict.
    """

    rewards: RewardSource | None
    decode_text: "Callable[[Sequence[np.ndarray]], list[str]]"
    response_kind: Callable[[str], str | None]
    first_kind: str
    data_sets: tuple[str, ...] = ()
    adds: bool = False

    def grade(
        self,
        prompts: "Sequence[Prompt]",
        responses: "Sequence[np.ndarray]",
        has_eos: Sequence[bool],
        verdicts: Sequence[Verdict | None] = (),
    ) -> Grades:
        """Grade n responses, of one group or of a whole round.

        Args:
            responses: int32 [t] each, end-of-sequence included.
            has_eos: False if the length limit cut the response.
            verdicts: results of the environments of the responses; None: the environment gives no
                rewards.
        """
        texts, n = self.decode_text(responses), len(responses)
        given = verdicts or [None] * n
        scores, asked = failed(n, NONE), [i for i in range(n) if self._asks(given[i])]
        if asked and self.rewards is not None:
            table = (prompts, texts, responses, has_eos)
            chosen = responses_to(*([column[i] for i in asked] for column in table))
            scores = joined(n, [(asked, asyncio.run(self.rewards.score(chosen)))])
        if any(given):
            own = [verdict or Verdict(None, NONE) for verdict in given]
            both = {"environment": Scores([x.reward for x in own], [x.reason for x in own])}
            both |= {"task.reward": scores} if asked else {}
            scores = summed(both, (1.0,) * len(both))
        parts = dict(scores.parts)
        for name in self.data_sets:
            found = zip(prompts, scores.rewards, strict=True)
            own = [x if p.columns["data_set"] == name else None for p, x in found]
            parts[name] = [math.nan if value is None else value for value in own]
        is_first = [
            bool(self.first_kind) and self.response_kind(x) == self.first_kind for x in texts
        ]
        return Grades(texts, scores.rewards, scores.reasons, parts, is_first)

    def _asks(self, verdict: Verdict | None) -> bool:
        """Return whether the source scores a response with this verdict."""
        is_open = verdict is None or (self.adds and verdict.reason in (None, NONE))
        return self.rewards is not None and is_open
