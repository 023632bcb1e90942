# SPDX-License-Identifier: Apache-2.0
"""ExactLag: admission and merging by count, so that data beside a trainer have a constant age.

Every searcher draws the same number of groups, its quota, with every publication, and (D + 1)
quotas with the first. The trainer merges one quota of each at a publication, in the order of their
numbers, and publishes again when the newest weights have begun all of theirs: so no publication is
skipped, none but the newest is kept, and a step trains on what the weights of D publications ago
drew, while the newest draw for later. It knows neither responses nor devices.

Invariants: how fast searchers are changes no age; and, where a searcher's tickets do not depend on
time, nothing else either. What was under way when a run was interrupted is drawn again by the
weights that it resumes with, which are newer.
"""

import threading
from collections.abc import Mapping, Sequence

from tba_jax.replay.admission import Latency
from tba_jax.replay.outbox import Outbox


class ExactLag:
    """Says which tickets may begin, when the trainer may publish, and what it merges.

    Args:
        lag: D, in publications.
        sync_period: steps between two of them.
        quota: groups of a searcher for a publication.
        outboxes: by index of their searchers, which have begun what lies there.
    """

    def __init__(
        self, lag: int, *, sync_period: int, quota: int, outboxes: Mapping[int, Outbox]
    ) -> None:
        self._lag = lag
        self._sync_period = sync_period
        self._quota = quota
        self._outboxes = outboxes
        self._lock = threading.Lock()
        # Numbers above the first that is missing are begun already, and will not begin again.
        self._begun = {s: _num_committed(outbox) for s, outbox in outboxes.items()}
        self._open = dict.fromkeys(outboxes, 0)
        self._unmerged = sum(outbox.num_groups for outbox in outboxes.values())
        self._fresh = 0

    def admit(self, searcher: int, version: int) -> bool:
        """Whether this searcher may begin one more prompt with these weights; if so, it does."""
        with self._lock:
            publication = max(0, self._begun[searcher] // self._quota - self._lag)
            if version < publication * self._sync_period:
                return False
            self._begun[searcher] += 1
            self._open[searcher] += 1
            return True

    def commit(self, searcher: int, latency_s: float, version: int) -> None:
        """A group of this searcher lies in its outbox."""
        del latency_s, version
        with self._lock:
            self._open[searcher] -= 1
            self._unmerged += 1

    def set_open(self, searcher: int, versions: Sequence[int]) -> None:
        """Do nothing: an exact lag is kept for searchers of this process, which are never lost."""

    def has_begun(self, version: int) -> bool:
        """Whether every searcher has begun all that these weights are to draw."""
        wanted = (version // self._sync_period + 1 + self._lag) * self._quota
        with self._lock:
            return min(self._begun.values()) >= wanted

    def due(self, step: int) -> int:
        """Before this step, tickets with lower numbers are merged."""
        return (step // self._sync_period + 1) * self._quota

    def is_due(self, step: int) -> bool:
        """Whether all of these are committed."""
        due = self.due(step)
        return all(outbox.committed[0] >= due for outbox in self._outboxes.values())

    @property
    def num_committed(self) -> int:
        """Tickets ever, of all searchers: it grows while one of them works."""
        return sum(_num_committed(outbox) for outbox in self._outboxes.values())

    def update(self, *, step: int, version: int, num_merged: int, num_fresh: int) -> None:
        """As `Admission.update`."""
        del step, version
        with self._lock:
            self._unmerged -= num_merged
            self._fresh = num_fresh

    def note_step(self, seconds: float) -> None:
        """Nothing: no age depends on it."""

    def holds(self, step: int) -> bool:
        """Never: what a step waits for is `is_due`."""
        del step
        return False

    def latency(self) -> Latency | None:
        """Nothing is late."""
        return None

    @property
    def num_under_way(self) -> int:
        """Groups admitted and not used yet."""
        with self._lock:
            return sum(self._open.values()) + self._unmerged + self._fresh


def _num_committed(outbox: Outbox) -> int:
    position = outbox.position()
    return position["next_round"] + len(position["ahead"])


def quota_of(num_prompts: int, sync_period: int, searchers: Sequence[int]) -> int:
    """Groups of each searcher that are enough for all steps until the next publication."""
    return -(-num_prompts * sync_period // len(searchers))
