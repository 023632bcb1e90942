# SPDX-License-Identifier: Apache-2.0
"""The weighted sum of several reward sources as one source: text functions and a reward model.

Invariant: a response for which a source fails has no reward, because a partial sum would be a
different reward. If a source does not apply to a response (`reward_none`), the other sources score
it.
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
    """One source of a sum.

    Attributes:
        source: computes rewards, possibly with parts, which are reported as well.
        weight: weight of its rewards.
        name: name of its rewards among the parts; "": not a part, because it is already a sum.
    """

    source: RewardSource
    weight: float
    name: str


class WeightedSum:
    """Weighted sum of thread-safe reward sources, which are called one after the other."""

    def __init__(self, summands: Sequence[Summand]) -> None:
        self._summands = tuple(summands)

    def check(self) -> None:
        """Wait until every source can be used; raise the error of the first unusable source."""
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
        """Return the weighted sum; the parts are the unweighted values by name."""
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
        """Return the sum of the sources for a searcher on these devices."""
        moved = [summand._replace(source=summand.source.on(site)) for summand in self._summands]
        return WeightedSum(moved)

    def close(self) -> None:
        """Close every source."""
        for summand in self._summands:
            summand.source.close()
