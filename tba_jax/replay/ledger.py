# SPDX-License-Identifier: Apache-2.0
"""Counts of the buffer: responses (`Ledger`), and groups, slots and lengths (`Economy`).

The ledger counts where responses are. The economy reports the
share of groups that is trained on, and whether training prefers short or long responses.
Invariants: generated = stored + evicted_* + rejected. A merged group is trained,
waiting or lost, and a response counts as trained once.
"""

import collections
from collections.abc import Mapping
from typing import Any

import numpy as np

from tba_jax.replay.config import ReplaySettings

_COUNTERS = (
    "generated",
    "evicted_capacity",
    "evicted_bytes",
    "used",
    "trained_unique",
    "repeats",
    "fresh_short",
    "fresh_recycled",
    "redrawn",
    "skipped",
)


# Warnings before this many batches would describe the initial fill.
_MIN_BATCHES = 20
_MIN_TRAINED_SHARE = 0.9
_MAX_RANK_OFFSET = 0.05
_MAX_M_OFFSET = 0.05


class LedgerError(AssertionError):
    """Responses were lost or duplicated; the message has the numbers."""


class Ledger:
    """Counters of responses.

    Attributes:
        counters: counts by name.
            generated, evicted_REASON: merged responses, and those no longer stored.
            used, trained_unique: drawn responses, and first draws among them.
            repeats: draws beyond the stored number of responses.
            fresh_short: fresh slots that became replay slots.
            fresh_recycled: fresh slots that were filled again from the newest merges.
            redrawn: rejected draws.
            skipped: emptied slots, whose groups count as used.
        rejected: responses without a reward, by named reason.
    """

    def __init__(self) -> None:
        self.counters: dict[str, int] = dict.fromkeys(_COUNTERS, 0)
        self.rejected: dict[str, int] = {}

    def reject(self, reasons: Mapping[str, int]) -> None:
        """Count the rejected responses of a group."""
        for reason, count in reasons.items():
            self.rejected[reason] = self.rejected.get(reason, 0) + count

    def totals(self, stored: int) -> dict[str, int]:
        """Return all counters, plus `stored` and the total of rejected responses."""
        return {**self.counters, "stored": stored, "rejected": sum(self.rejected.values())}

    def check(
        self, *, counted: int, listed: int, outbox_pending: int, outbox_generated: int | None
    ) -> None:
        """Check that every response is accounted for.

        Args:
            counted: stored responses by the store's counter.
            listed: stored responses, counted prompt by prompt.
            outbox_pending: responses waiting in outboxes.
            outbox_generated: responses ever put into outboxes; None: check only merged responses.

        Raises:
            LedgerError: the numbers do not add up; the message has them.
        """
        totals = self.totals(counted)
        generated = outbox_generated
        if generated is None:
            generated = totals["generated"] + outbox_pending
        gone = {k: v for k, v in totals.items() if k.startswith("evicted_")}
        total = outbox_pending + listed + sum(gone.values()) + totals["rejected"]
        if generated != total or listed != counted:
            raise LedgerError(
                f"{generated} responses were generated, but {total} are accounted for: "
                f"{outbox_pending} in outboxes, {listed} stored (counted {counted}), {gone}, "
                f"rejected {self.rejected}"
            )

    def state(self) -> dict[str, Any]:
        """Return the counters, JSON-compatible."""
        return {"counters": dict(self.counters), "rejected": dict(self.rejected)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a saved `state`."""
        self.counters = {**dict.fromkeys(_COUNTERS, 0), **state["counters"]}
        self.rejected = dict(state["rejected"])


class Economy:
    """Counts of groups, batch slots and responses over a whole run.

    Attributes:
        batches, slots: numbers of drawn batches and of their slots (one group each).
        fresh_slots: slots that were chosen to draw fresh data.
        unused_slots: fresh slots filled with responses that were never drawn.
        recycled_slots: fresh slots filled with a group of the newest merges that was drawn before.
        merged_groups: groups (one merge, one prompt) that waited to be drawn.
        trained_groups: groups of which a response was drawn while they waited.
        came_in: number of merged responses, by number of tokens.
        trained: number of responses that were drawn, by number of tokens.
        staleness: number of responses in fresh slots that are not recycled, by staleness in steps.
    """

    def __init__(self) -> None:
        self.batches = 0
        self.slots = 0
        self.fresh_slots = 0
        self.unused_slots = 0
        self.recycled_slots = 0
        self.merged_groups = 0
        self.trained_groups = 0
        self.came_in: collections.Counter[int] = collections.Counter()
        self.trained: collections.Counter[int] = collections.Counter()
        self.staleness: collections.Counter[int] = collections.Counter()

    def trained_share(self, waiting: int) -> float:
        """Return the share of trained groups among groups that no longer wait; 1 if there are none.

        Args:
            waiting: number of waiting groups without a drawn response.
        """
        over = self.merged_groups - waiting
        return self.trained_groups / over if over else 1.0

    def length_rank(self) -> float:
        """Return the mean rank, in [0, 1], of trained lengths among all merged lengths.

        Equal lengths share their middle rank, so 0.5 is unbiased. Below 0.5, short responses are
        preferred. The result is 0.5 if no response was trained.
        """
        if not self.trained:
            return 0.5
        lengths = sorted(self.came_in)
        came_in = np.array([self.came_in[n] for n in lengths], np.float64)
        trained = np.array([self.trained[n] for n in lengths], np.float64)
        rank = (np.cumsum(came_in) - came_in / 2) / came_in.sum()
        return float((rank * trained).sum() / trained.sum())

    def effective_m(self) -> float:
        """Return the share of slots that were filled with the newest data; 0 without a slot."""
        return (self.unused_slots + self.recycled_slots) / max(1, self.slots)

    def late_share(self, max_staleness: int) -> float:
        """Return the share of responses in fresh slots that exceed the bound; 0 without a bound."""
        if not max_staleness or not self.staleness:
            return 0.0
        late = sum(n for age, n in self.staleness.items() if age > max_staleness)
        return late / self.staleness.total()

    def stats(self, waiting: int, max_staleness: int) -> dict[str, float]:
        """Return the `buffer/*` metrics by name; `waiting`: as in `trained_share`."""
        return {
            "buffer/trained_share": self.trained_share(waiting),
            "buffer/length_rank": self.length_rank(),
            "buffer/effective_m": self.effective_m(),
            "buffer/late_share": self.late_share(max_staleness),
        }

    def warnings(self, waiting: int, settings: ReplaySettings) -> list[str]:
        """Return a warning for each kind of waste or bias, with the setting to change."""
        if self.batches < _MIN_BATCHES:
            return []
        found = []
        share, rank, m = self.trained_share(waiting), self.length_rank(), self.effective_m()
        if share < _MIN_TRAINED_SHARE:
            found.append(
                f"only {share:.0%} of the searchers' groups were trained on while they were fresh. "
                f"{_keep_groups(settings)}"
            )
        if abs(rank - 0.5) > _MAX_RANK_OFFSET:
            kind = "short" if rank < 0.5 else "long"
            found.append(
                f"training prefers {kind} responses: the mean rank of their lengths is {rank:.2f}, "
                f"unbiased is 0.50. {_keep_groups(settings)}"
            )
        if m < settings.recency_prob - _MAX_M_OFFSET:
            found.append(
                f"{m:.2f} of the slots hold the newest data, but replay.recency_prob is "
                f"{settings.recency_prob:.2f}. {_fill_fresh_slots(settings)}"
            )
        return found

    def state(self) -> dict[str, Any]:
        """Return the counts, JSON-compatible."""
        return {
            name: sorted(value.items()) if isinstance(value, collections.Counter) else value
            for name, value in vars(self).items()
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "Economy":
        """Return the counts from a saved `state`."""
        economy = cls()
        for name, value in state.items():
            is_counter = isinstance(getattr(economy, name), collections.Counter)
            setattr(economy, name, collections.Counter(dict(value)) if is_counter else value)
        return economy


def _keep_groups(settings: ReplaySettings) -> str:
    """Return advice on training on more groups, with settings that are not in use yet."""
    if settings.max_staleness:
        return "Raise replay.max_bytes or replay.capacity_per_prompt, which evict unused groups."
    return (
        "Use fewer searchers, raise batch.num_prompts, or set replay.max_staleness, so that unused "
        "groups wait."
    )


def _fill_fresh_slots(settings: ReplaySettings) -> str:
    """Return advice on filling more slots with the newest data, with settings not in use yet."""
    ways = ["Add searchers"]
    if settings.pace == "off":
        ways.append("set --config.replay.pace=trainer to wait for them")
    return ", or ".join(ways) + "."
