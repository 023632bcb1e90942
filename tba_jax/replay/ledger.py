# SPDX-License-Identifier: Apache-2.0
"""Ledger: where every response went that entered the buffer.

It counts responses, equal ones as often as they came; it knows neither responses nor reasons. Its
invariant: generated = stored + evicted_* + duplicate + rejected.
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
    """Responses were lost or invented; the message has the numbers."""


class Ledger:
    """Counters of responses.

    Attributes:
        counters: generated, duplicate, evicted_REASON: what became of those that came in; united:
            how many share the row of an equal one; used, trained_unique, repeats: responses handed
            out, how often for the first time, and how often beyond what was stored; fresh_short,
            fresh_recycled: fresh slots that became replay slots, and that were filled again from
            the newest merge; redrawn: groups that were drawn and not wanted; skipped: slots that
            were left empty, whose groups are among the used.
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
        """All counters, with what is `stored` now and what was rejected in all."""
        return {**self.counters, "stored": stored, "rejected": sum(self.rejected.values())}

    def check(
        self, *, counted: int, listed: int, outbox_pending: int, outbox_generated: int | None
    ) -> None:
        """Account for every response.

        Args:
            counted: stored responses by the store's counter.
            listed: the same, counted prompt by prompt.
            outbox_pending: responses waiting in outboxes.
            outbox_generated: responses ever put into outboxes; None: only what was merged counts.

        Raises:
            LedgerError: they do not add up; with the numbers.
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
        """JSON-compatible."""
        return {"counters": dict(self.counters), "rejected": dict(self.rejected)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put back what `state` returned."""
        self.counters = {**dict.fromkeys(_COUNTERS, 0), **state["counters"]}
        self.rejected = dict(state["rejected"])
