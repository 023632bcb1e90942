# SPDX-License-Identifier: Apache-2.0
"""Interface of reward sources, which searchers and evaluations call, and sums of rewards.

`RewardPool` runs a text reward in processes; learned rewards score on a device. Invariant: every
response gets a reward or a named reason.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from tba_jax.devices.site import Site


class ScoreResult(NamedTuple):
    """Rewards of some responses, in their order.

    Attributes:
        rewards: a finite number, or None if the item has a reason.
        reasons: name of the failure, or None if the item has a reward.
        first_traceback: text or traceback of the first failure; empty without a failure.
        parts: with several rewards, name -> unweighted values, one per item; nan for no reward.
            Empty with one reward.
    """

    rewards: list[float | None]
    reasons: list[str | None]
    first_traceback: str
    parts: Mapping[str, Sequence[float]] = {}


class Verdict(NamedTuple):
    """Result of an environment for an episode.

    Attributes:
        reward: a finite number; None if the episode has a reason.
        reason: name of the failure; None if the episode has a reward.
    """

    reward: float | None
    reason: str | None


class RewardSource(Protocol):
    """Thread-safe source of the rewards of responses."""

    def check(self) -> None:
        """Wait until rewards can be computed.

        Raises:
            ValueError: rewards cannot be computed; the message has the reason.
        """

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        *,
        completion_ids: Sequence[np.ndarray],
        has_eos: Sequence[bool],
    ) -> ScoreResult:
        """Score the responses; every item gets a reward or a reason.

        Args:
            prompts: prompt texts, one per response.
            completions: response texts, without special tokens.
            columns: further columns of the data, each with one value per response.
            completion_ids: int32 [t] each, the tokens of the responses, end-of-sequence included.
            has_eos: False if the length limit cut the response.
        """
        ...

    def on(self, site: "Site") -> "RewardSource":
        """Return the source for a searcher on these devices; self, unless models are divided."""
        return self

    def close(self) -> None:
        """Release all resources; a concurrent `score` ends with an error."""


class RewardFailure(RuntimeError):
    """Reward functions cannot start, or fail too often; the message has the cause."""


class WeightedSum(NamedTuple):
    """The weighted sum of reward sources, which stops a run if too many items fail.

    Attributes:
        max_failure_rate: share of the items of a call that may fail.
        is_part: whether an environment adds its rewards; items to which no source applies are then
            no failures.
    """

    names: Sequence[str]
    sources: Sequence[RewardSource]
    weights: Sequence[float]
    max_failure_rate: float = 1.0
    is_part: bool = False

    def check(self) -> None:
        for source in self.sources:
            source.check()

    def score(self, *responses: Any, **options: Any) -> ScoreResult:
        """Score the responses, as `RewardSource.score`.

        Raises:
            RewardFailure: more than `max_failure_rate` of the items failed.
        """
        results = [source.score(*responses, **options) for source in self.sources]
        found = summed(self.names, results, self.weights)
        harmless = (None, "reward_none") if self.is_part else (None,)
        counts = Counter(reason for reason in found.reasons if reason not in harmless)
        n = len(found.reasons)
        if counts.total() > self.max_failure_rate * n:
            raise RewardFailure(
                f"reward {', '.join(self.names)} failed on {counts.total()} of {n} items "
                f"{dict(counts)}, above reward.max_failure_rate = {self.max_failure_rate}. First "
                f"failure:\n{found.first_traceback}"
            )
        return found

    def on(self, site: "Site") -> "WeightedSum":
        return self._replace(sources=[source.on(site) for source in self.sources])

    def close(self) -> None:
        for source in self.sources:
            source.close()


def summed(
    names: Sequence[str], results: Sequence[ScoreResult], weights: Sequence[float]
) -> ScoreResult:
    """Return the weighted sum of several rewards of the same items.

    An item on which one reward fails has no reward: a partial sum would be a different reward. A
    reward that does not apply to an item (`reward_none`) is left out of the item's sum. The parts
    of a sum of one reward are those of the reward.
    """
    rewards: list[float | None] = []
    reasons: list[str | None] = []
    for i in range(len(results[0].rewards)):
        causes = [result.reasons[i] for result in results]
        failed = [cause for cause in causes if cause not in (None, "reward_none")]
        reasons.append(failed[0] if failed else None if None in causes else "reward_none")
        values = zip(weights, [result.rewards[i] for result in results], strict=True)
        known = [weight * value for weight, value in values if value is not None]
        rewards.append(math.fsum(known) if known and reasons[-1] is None else None)
    parts: dict[str, Sequence[float]] = {}
    for name, result in zip(names, results, strict=True):
        parts.update(result.parts)
        if len(results) > 1:
            parts[name] = [math.nan if value is None else value for value in result.rewards]
    tracebacks = [result.first_traceback for result in results if result.first_traceback]
    # A reward that does not apply to some items needs no traceback.
    return ScoreResult(
        rewards, reasons, tracebacks[0] if tracebacks and any(reasons) else "", parts
    )


def part_means(parts: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the mean of each part over the items to which it applies, as `reward_part_NAME`."""
    means = {}
    for name, values in parts.items():
        known = [value for value in values if not math.isnan(value)]
        means[f"reward_part_{name}"] = float(np.mean(known)) if known else math.nan
    return means
