# SPDX-License-Identifier: Apache-2.0
"""Interface of reward sources, which searchers and evaluations call.

`RewardPool` runs a text reward in processes; learned rewards score on a device. Invariant: every
response gets a reward or a named reason.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from tba_jax.devices.site import Site

# Prefix of the metrics of each of several rewards: reward_part_NAME.
PART_PREFIX = "reward_part_"


class ScoreResult(NamedTuple):
    """Rewards of one call, in the order of its items.

    Attributes:
        rewards: a finite number, or None if the item has a reason.
        reasons: name of the failure, or None if the item has a reward.
        first_traceback: traceback of the first failure; empty without a failure.
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


def part_means(parts: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the mean of each part over the items to which it applies, by metric name."""
    means = {}
    for name, values in parts.items():
        known = [v for v in values if not math.isnan(v)]
        means[f"{PART_PREFIX}{name}"] = float(np.mean(known)) if known else math.nan
    return means


class RewardSource(Protocol):
    """Thread-safe source of the rewards of responses."""

    def check(self) -> None:
        """Wait until rewards can be computed.

        Raises:
            ValueError: rewards cannot be computed; the message has the reason.
        """
        ...

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
        ...

    def close(self) -> None:
        """Release all resources; a concurrent `score` ends with an error."""
        ...


class RemoteRewards:
    """Placeholder in processes whose rewards are computed by other processes."""

    def check(self) -> None:
        """Do nothing: other processes compute rewards and check the reward functions."""

    def score(self, *args: Any, **kwargs: Any) -> ScoreResult:
        """Raise AssertionError: rewards are computed in the searchers' processes."""
        raise AssertionError("rewards are computed in the searchers' processes")

    def on(self, site: "Site") -> "RemoteRewards":
        """Return self: no searcher of this process computes rewards."""
        del site
        return self

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class EnvironmentRewards:
    """Source for runs with rewards from environments; rejects episodes without a reward."""

    def check(self) -> None:
        """Return at once: the environment has its own check."""

    def score(self, prompts: Sequence[str], *args: Any, **kwargs: Any) -> ScoreResult:
        """Reject every response."""
        n = len(prompts)
        return ScoreResult([None] * n, ["environment_no_reward"] * n, "")

    def on(self, site: "Site") -> "EnvironmentRewards":
        """Return self: there are no models."""
        del site
        return self

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
