# SPDX-License-Identifier: Apache-2.0
"""Ledger: accounts for every response that entered the buffer.

Equal responses count separately. Invariant: generated = stored + evicted_* + duplicate + rejected.
"""

from collections.abc import Mapping
from typing import Any

_COUNTERS = (
    "generated",
    "united",
    "duplicate",
    "evicted_capacity",
    "evicted_bytes",
    "evicted_reuse",
    "evicted_late",
    "used",
    "trained_unique",
    "repeats",
    "fresh_short",
    "fresh_recycled",
    "redrawn",
    "skipped",
)


class LedgerError(RuntimeError):
    """Responses were lost or duplicated; the message has the numbers."""


class Ledger:
    """Counters of responses.

    Attributes:
        counters: generated, duplicate, evicted_REASON: fate of merged responses; united: responses
            that share the row of an equal one; used, trained_unique, repeats: drawn responses,
            first draws, and draws beyond the stored number; fresh_short, fresh_recycled: fresh
            slots that became replay slots, or were filled again from the newest merges; redrawn:
            rejected draws; skipped: emptied slots, whose groups count as used.
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
        gone["duplicate"] = totals["duplicate"]
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
