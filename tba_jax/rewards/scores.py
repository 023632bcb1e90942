# SPDX-License-Identifier: Apache-2.0
"""Rewards: the interface `async score(completions) -> [Score]`, sums, and the grader of a run.

Invariant: every response gets a finite reward or a named reason, in the order of the responses.
"""

import asyncio
import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tba_jax.workers import loop_of

if TYPE_CHECKING:
    import numpy as np

    from tba_jax.devices.site import Site
    from tba_jax.flow.trajectory import Prompt

NONE, TOO_LONG = "reward_none", "attack_too_long"
"""Reasons of a response to which no reward applies, and of an attack that no victim can read."""


class Completion(NamedTuple):
    """A response to score. Neighbours with the same prompt are a group.

    Attributes:
        prompt: text of the prompt.
        text: text of the response, without special tokens.
        columns: further columns of the prompt's row of the data.
        ids: int32 [t], tokens of the response, end-of-sequence included; None: not known.
        has_eos: False if the length limit cut the response.
    """

    prompt: str
    text: str
    columns: Mapping[str, Any] = {}
    ids: "np.ndarray | None" = None
    has_eos: bool = True


def responses_to(prompts: "Sequence[Prompt]", *rows: Sequence[Any]) -> list[Completion]:
    """Return responses to these prompts; `rows` are their texts, ids and has_eos."""
    found = zip(prompts, *rows, strict=True)
    return [Completion(p.text, text, p.columns, ids, has_eos) for p, text, ids, has_eos in found]


class Score(NamedTuple):
    """Result of one response; it can be written as JSON.

    Attributes:
        reward: a finite number; None if there is a reason.
        reason: name of the failure; None if there is a reward.
        text: description of the failure, such as a traceback.
        parts: further values by name, such as those of each reward of a sum; nan for no value.
    """

    reward: float | None
    reason: str | None = None
    text: str = ""
    parts: Mapping[str, float] = {}


class RewardFailure(RuntimeError):
    """Rewards cannot be computed, or fail too often; the message has the cause."""


class RewardSource:
    """Thread-safe source of rewards; a subclass has `score`, or `rate`, the same but blocking."""

    rate: Callable[[Sequence[Completion]], list[Score]]

    def check(self) -> None:
        """Wait until rewards can be computed; raise ValueError or RewardFailure if they cannot."""

    async def score(self, completions: Sequence[Completion]) -> list[Score]:
        """Return a reward or a reason for each response."""
        return await asyncio.to_thread(self.rate, completions)

    def on(self, site: "Site") -> "RewardSource":
        """Return the source for a searcher on these devices; self, unless it has a model."""
        return self

    def close(self) -> None:
        """Release all resources; a concurrent `score` ends with an error."""


def summed(scores: Mapping[str, Score], weights: Iterable[float]) -> Score:
    """Return the weighted sum of several rewards of one response.

    If one reward fails, so does the sum: a partial sum would be a different reward. A reward that
    does not apply (`NONE`) is left out. The parts of a sum of one reward are those of the reward.
    """
    parts: dict[str, float] = {}
    for name, score in scores.items():
        own = {name: math.nan if score.reward is None else score.reward}
        parts |= {**score.parts, **(own if len(scores) > 1 else {})}
    broken = [score for score in scores.values() if score.reason not in (None, NONE)]
    pairs = zip(weights, scores.values(), strict=True)
    known = [weight * score.reward for weight, score in pairs if score.reward is not None]
    if broken or not known:
        return [*broken, *scores.values()][0]._replace(parts=parts)
    return Score(math.fsum(known), parts=parts)


def part_means(parts: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the mean of each part over the items to which it applies, as `reward_part_NAME`."""
    known = {name: [x for x in values if not math.isnan(x)] for name, values in parts.items()}
    return {f"reward_part_{k}": statistics.fmean(v) if v else math.nan for k, v in known.items()}


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

    async def score(self, completions: Sequence[Completion]) -> list[Score]:
        """Return the sum for each response; the sources score concurrently.

        Raises:
            RewardFailure: too many responses failed.
        """
        found = await asyncio.gather(*(x.score(completions) for x in self.sources.values()))
        weights, n = self.weights or (1.0,) * len(found), len(completions)
        rows = zip(*found, strict=True)
        result = [summed(dict(zip(self.sources, row, strict=True)), weights) for row in rows]
        failed = [i for i, x in enumerate(result) if x.reason not in (None, NONE, TOO_LONG)]
        if len(failed) > self.max_failure_rate * n:
            counts, of = Counter(result[i].reason for i in failed), completions[failed[0]]
            raise RewardFailure(
                f"reward {', '.join(self.sources)} failed on {len(failed)} of {n} responses "
                f"{dict(counts)}, above reward.max_failure_rate = {self.max_failure_rate}. First "
                f"failure:\n{result[failed[0]].text}\nprompt: {of.prompt!r:.500}\n"
                f"completion: {of.text!r:.500}"
            )
        return result

    def on(self, site: "Site") -> "WeightedSum":
        there = {name: source.on(site) for name, source in self.sources.items()}
        return dataclasses.replace(self, sources=there)

    def close(self) -> None:
        for source in self.sources.values():
            source.close()


class Grade(NamedTuple):
    """Text and score of a response, and whether the response has the task's first kind, if any.

    All responses of a call have the same parts.
    """

    text: str
    reward: float | None
    reason: str | None
    parts: Mapping[str, float]
    is_first_kind: bool


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
        verdicts: Sequence[Score | None] = (),
    ) -> list[Grade]:
        """Grade n responses, of one group or of a whole round.

        Args:
            responses, has_eos: as `ids` and `has_eos` of completions.
            verdicts: results of the environments; None: an environment gives no rewards.
        """
        texts, given = self.decode_text(responses), verdicts or [None] * len(responses)
        scores = [verdict or Score(None, NONE) for verdict in given]
        wanted = (None, NONE) if self.adds else ()
        every = enumerate(responses_to(prompts, texts, responses, has_eos))
        asked = {i: x for i, x in every if given[i] is None or scores[i].reason in wanted}
        if asked and self.rewards is not None:
            score = self.rewards.score([*asked.values()])
            found = asyncio.run_coroutine_threadsafe(score, loop_of()).result()
            for i, score in zip(asked, found, strict=True):
                both = {"environment": scores[i], "task.reward": score}
                scores[i] = score if given[i] is None else summed(both, (1.0, 1.0))
        names = [name for score in scores for name in score.parts]
        absent, grades = dict.fromkeys([*names, *self.data_sets], math.nan), []
        for prompt, text, score in zip(prompts, texts, scores, strict=True):
            parts = {**absent, **score.parts}
            if self.data_sets and score.reward is not None:
                parts[prompt.columns["data_set"]] = score.reward
            is_first = bool(self.first_kind) and self.response_kind(text) == self.first_kind
            grades.append(Grade(text, score.reward, score.reason, parts, is_first))
        return grades
