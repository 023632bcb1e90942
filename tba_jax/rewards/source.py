# SPDX-License-Identifier: Apache-2.0
"""What a searcher and an evaluation need of whoever computes rewards.

`RewardPool` runs a text reward in processes; learned rewards score on a device. Both answer alike.
Invariant: a response without a reward has a named reason instead.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from tba_jax.devices.site import Site

# Metrics of single rewards among several: reward_part_NAME.
PART_PREFIX = "reward_part_"


class ScoreResult(NamedTuple):
    """Rewards of one call, in the order of its items.

    Attributes:
        rewards: a finite number, or None where there is a reason.
        reasons: a named reason, or None where there is a reward.
        first_traceback: of the first failure; empty without one.
        parts: what each of several rewards gave, by name, before weights, with one value per
            item; nan where it gave none. Empty where there is only one.
    """

    rewards: list[float | None]
    reasons: list[str | None]
    first_traceback: str
    parts: Mapping[str, Sequence[float]] = {}


class Verdict(NamedTuple):
    """What an environment said of an episode.

    Attributes:
        reward: a finite number, or None where there is a reason.
        reason: a named reason, or None where there is a reward.
    """

    reward: float | None
    reason: str | None


def part_means(parts: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Mean of each named part over the items it applies to, as metrics reward_part_NAME."""
    means = {}
    for name, values in parts.items():
        known = [v for v in values if not math.isnan(v)]
        means[f"{PART_PREFIX}{name}"] = float(np.mean(known)) if known else math.nan
    return means


class RewardSource(Protocol):
    """Scores responses; safe to share between threads."""

    def check(self) -> None:
        """Wait until rewards can be computed.

        Raises:
            ValueError: they cannot; says why.
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
        """Score the responses; every item comes back with a reward or with a reason.

        Args:
            prompts: prompt texts, one per response.
            completions: response texts, without special tokens.
            columns: further columns of the data, each with one value per response.
            completion_ids: int32 [t] each, the tokens of the responses, end-of-sequence included.
            has_eos: False where the length limit cut the response.
        """
        ...

    def on(self, site: "Site") -> "RewardSource":
        """The source for a searcher there: itself, unless its models are divided over devices."""
        ...

    def close(self) -> None:
        """Release what it holds; a `score` under way ends with an error."""
        ...


class Elsewhere:
    """In place of rewards that other hosts compute: nobody asks for one here."""

    def check(self) -> None:
        """Nothing: those hosts do."""

    def score(self, *args: Any, **kwargs: Any) -> ScoreResult:
        """Not here."""
        raise AssertionError("rewards are computed where searchers are")

    def on(self, site: "Site") -> "Elsewhere":
        """Nothing is there either."""
        del site
        return self

    def close(self) -> None:
        """It holds nothing."""
