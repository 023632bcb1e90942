# SPDX-License-Identifier: Apache-2.0
"""Ledger: counts of responses, groups and batch slots over a whole run.

The ledger counts where responses are, which share of the groups is trained on, and whether training
prefers short or long responses. Invariants: generated = stored + evicted_* + rejected, and a group
that is no longer fresh was either trained or unused.
"""

import collections
from collections.abc import Mapping
from typing import Any

import numpy as np

from tba_jax.replay.config import ReplaySettings

_COUNTERS = (
    *("generated", "stored", "evicted_capacity", "evicted_bytes", "evicted_age"),
    *("used", "trained_unique", "repeats", "redrawn", "skipped"),
    *("batches", "slots", "fresh", "fresh_short", "fresh_recycled"),
    *("groups_trained", "groups_unused"),
)
_MIN_BATCHES = 20  # fewer would describe the initial fill
_MIN_TRAINED_SHARE = 0.9
_MAX_RANK_OFFSET = 0.05
_MAX_M_OFFSET = 0.05


class LedgerError(AssertionError):
    """Responses were lost or duplicated; the message has the numbers."""


class Ledger:
    """Counters of a replay buffer.

    Attributes:
        counters: counts by name.
            generated, stored, evicted_REASON: merged responses, and where they are.
            used, trained_unique: drawn responses, and first draws among them.
            repeats: draws beyond the stored number of responses.
            redrawn: rejected draws.
            skipped: emptied slots, whose groups count as used.
            batches, slots, fresh: drawn batches, their slots, and slots with new data.
            fresh_short: fresh slots that became replay slots.
            fresh_recycled: fresh slots that were filled again from the newest merge.
            groups_trained, groups_unused: groups that are no longer fresh, with and without a draw.
        rejected: responses without a reward, by named reason.
        lengths, trained_lengths: number of merged and of trained responses, by number of tokens.
    """

    def __init__(self) -> None:
        self.counters = dict.fromkeys(_COUNTERS, 0)
        self.rejected: collections.Counter[str] = collections.Counter()
        self.lengths: collections.Counter[int] = collections.Counter()
        self.trained_lengths: collections.Counter[int] = collections.Counter()

    def reject(self, reasons: Mapping[str, int]) -> None:
        """Count the rejected responses of a group."""
        self.rejected.update(reasons)
        self.counters["generated"] += sum(reasons.values())

    def check(self, num_waiting: int, num_generated: int | None) -> None:
        """See `ReplayBuffer.check_ledger`."""
        counts, rejected = self.counters, self.rejected.total()
        if num_generated is None:
            num_generated = counts["generated"] + num_waiting
        gone = {k: n for k, n in counts.items() if k.startswith("evicted_")}
        total = num_waiting + counts["stored"] + sum(gone.values()) + rejected
        if num_generated != total:
            raise LedgerError(
                f"{num_generated} responses were generated, but {total} are accounted for: "
                f"{num_waiting} wait for a merge, {counts['stored']} stored, {gone}, "
                f"rejected {dict(self.rejected)}"
            )

    def stats(self) -> dict[str, float]:
        """Return the `buffer/*` metrics of the counts."""
        counts = self.counters
        received = counts["generated"] - self.rejected.total()
        over = counts["groups_trained"] + counts["groups_unused"]
        return {
            "buffer/replay_ratio": counts["used"] / max(1, received),
            **{f"buffer/{k}": float(counts[k]) for k in ("fresh_short", "redrawn", "skipped")},
            **{f"buffer/rejected_{k}": float(n) for k, n in sorted(self.rejected.items())},
            "buffer/trained_share": counts["groups_trained"] / over if over else 1.0,
            "buffer/length_rank": self._length_rank(),
            "buffer/effective_m": counts["fresh"] / max(1, counts["slots"]),
        }

    def _length_rank(self) -> float:
        """Return the mean rank, in [0, 1], of trained lengths among all merged lengths.

        Equal lengths share their middle rank, so 0.5 is unbiased. Below 0.5, short responses are
        preferred. The result is 0.5 if no response was trained.
        """
        if not self.trained_lengths:
            return 0.5
        lengths = sorted(self.lengths)
        merged = np.array([self.lengths[n] for n in lengths], np.float64)
        trained = np.array([self.trained_lengths[n] for n in lengths], np.float64)
        rank = (np.cumsum(merged) - merged / 2) / merged.sum()
        return float((rank * trained).sum() / trained.sum())

    def warnings(self, settings: ReplaySettings) -> list[str]:
        """Return a warning for each kind of waste or bias, with the setting to change."""
        if self.counters["batches"] < _MIN_BATCHES:
            return []
        stats = self.stats()
        share, rank = stats["buffer/trained_share"], stats["buffer/length_rank"]
        m, found = stats["buffer/effective_m"], []
        if settings.max_staleness:
            use_more = "Use fewer searchers, or raise replay.max_staleness."
        else:
            use_more = "Use fewer searchers, or set replay.max_staleness, so that groups wait."
        if share < _MIN_TRAINED_SHARE:
            found.append(
                f"only {share:.0%} of the searchers' groups were trained on while they were fresh. "
                + use_more
            )
        if abs(rank - 0.5) > _MAX_RANK_OFFSET:
            kind = "short" if rank < 0.5 else "long"
            found.append(
                f"training prefers {kind} responses: the mean rank of their lengths is {rank:.2f}, "
                f"unbiased is 0.50. {use_more}"
            )
        if m < settings.recency_prob - _MAX_M_OFFSET:
            wait = ", or set --config.replay.pace=trainer to wait for them"
            found.append(
                f"{m:.2f} of the slots hold the newest data, but replay.recency_prob is "
                f"{settings.recency_prob:.2f}. Add searchers{wait * (settings.pace == 'off')}."
            )
        return found

    def state(self) -> dict[str, Any]:
        """Return the counts, JSON-compatible."""
        return {name: list(counts.items()) for name, counts in vars(self).items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Replace the counts by a saved `state`."""
        for name, counts in vars(self).items():
            counts.clear()
            counts.update(dict(state[name]))
