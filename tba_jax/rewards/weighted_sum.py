# SPDX-License-Identifier: Apache-2.0
"""The weighted sum of several sources of rewards, as one source: text functions beside a model.

It does not know what the sources are. Invariant: a response that one of them failed on has no
reward, as a sum without a part would be another reward; one that a source does not apply to
(`reward_none`) is scored by the others.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tba_jax.rewards.functions import weighted_sum
from tba_jax.rewards.source import RewardSource, ScoreResult

if TYPE_CHECKING:
    from tba_jax.devices.site import Site


class Summand(NamedTuple):
    """A source in a sum.

    Attributes:
        source: gives rewards, and perhaps parts of its own, which are kept.
        weight: of its rewards.
        name: of its rewards among the parts; "": they are no part, as they are a sum already.
    """

    source: RewardSource
    weight: float
    name: str


class WeightedSum:
    """Asks its sources one after the other; safe to share between threads, as they are."""

    def __init__(self, summands: Sequence[Summand]) -> None:
        self._summands = tuple(summands)

    def check(self) -> None:
        """Wait until every source can be used; raises as the first that cannot."""
        for summand in self._summands:
            summand.source.check()

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        *,
        completion_ids: Sequence[np.ndarray],
        has_eos: Sequence[bool],
    ) -> ScoreResult:
        """As `RewardSource.score`; the parts are the values before weights, by name."""
        results = [
            summand.source.score(
                prompts, completions, columns, completion_ids=completion_ids, has_eos=has_eos
            )
            for summand in self._summands
        ]
        weights = [summand.weight for summand in self._summands]
        rewards: list[float | None] = []
        reasons: list[str | None] = []
        for values, causes in zip(
            zip(*(result.rewards for result in results), strict=True),
            zip(*(result.reasons for result in results), strict=True),
            strict=True,
        ):
            failed = [cause for cause in causes if cause not in (None, "reward_none")]
            reason = failed[0] if failed else None if None in causes else "reward_none"
            reasons.append(reason)
            rewards.append(weighted_sum(values, weights) if reason is None else None)
        parts: dict[str, Sequence[float]] = {}
        for summand, result in zip(self._summands, results, strict=True):
            parts.update(result.parts)
            if summand.name:
                parts[summand.name] = [math.nan if v is None else v for v in result.rewards]
        tracebacks = [result.first_traceback for result in results if result.first_traceback]
        traceback = tracebacks[0] if tracebacks and any(reasons) else ""
        return ScoreResult(rewards, reasons, traceback, parts)

    def on(self, site: "Site") -> "WeightedSum":
        """The same sum for a searcher there."""
        moved = [summand._replace(source=summand.source.on(site)) for summand in self._summands]
        return WeightedSum(moved)

    def close(self) -> None:
        """Close every source."""
        for summand in self._summands:
            summand.source.close()
