# SPDX-License-Identifier: Apache-2.0
"""ExactLag: admission and merges by fixed counts, so that all data have the same staleness.

Every searcher samples the same number of groups, its quota, with every publication, and (D + 1)
quotas with the first publication. At a publication the trainer merges one quota of each searcher,
in order of ticket numbers. The trainer publishes again when all quotas of the newest weights have
begun, so no publication is skipped. A step trains on data sampled with the weights of D
publications ago, while searchers sample with the newest weights.

Invariants: the speed of searchers does not change the staleness, and changes no other result unless
a searcher's tickets depend on time. Groups that were open at an interruption are sampled again with
the newer weights of the resumed run.
"""

import threading
from collections.abc import Mapping, Sequence

from tba_jax.replay.admission import Latency
from tba_jax.replay.outbox import Outbox


class ExactLag:
    """Rules for the start of tickets, for publications and for merges, with an exact lag.

    Args:
        lag: D, in publications.
        sync_period: steps between two publications.
        quota: groups of a searcher per publication.
        outboxes: searcher ID -> outbox; tickets in outboxes count as started.
    """

    def __init__(
        self, lag: int, *, sync_period: int, quota: int, outboxes: Mapping[int, Outbox]
    ) -> None:
        self._lag = lag
        self._sync_period = sync_period
        self._quota = quota
        self._outboxes = outboxes
        self._lock = threading.Lock()
        # Committed numbers after a missing number count as begun.
        self._begun = {s: _num_committed(outbox) for s, outbox in outboxes.items()}
        self._open = dict.fromkeys(outboxes, 0)
        self._unmerged = sum(outbox.num_groups for outbox in outboxes.values())
        self._fresh = 0

    def admit(self, searcher: int, version: int) -> bool:
        """Return whether this searcher may begin one more prompt; if so, count it as begun."""
        with self._lock:
            publication = max(0, self._begun[searcher] // self._quota - self._lag)
            if version < publication * self._sync_period:
                return False
            self._begun[searcher] += 1
            self._open[searcher] += 1
            return True

    def commit(self, searcher: int, latency_s: float, version: int) -> None:
        """Count a group of this searcher as committed to its outbox."""
        del latency_s, version
        with self._lock:
            self._open[searcher] -= 1
            self._unmerged += 1

    def set_open(self, searcher: int, versions: Sequence[int]) -> None:
        """Do nothing: an exact lag has only searchers of this process, which are never lost."""

    def has_begun(self, version: int) -> bool:
        """Return whether every searcher has begun its ticket quota for weights of `version`."""
        wanted = (version // self._sync_period + 1 + self._lag) * self._quota
        with self._lock:
            return min(self._begun.values()) >= wanted

    def due(self, step: int) -> int:
        """Return the ticket number below which tickets are merged before this step."""
        return (step // self._sync_period + 1) * self._quota

    def is_due(self, step: int) -> bool:
        """Return whether all tickets that are due at this step are committed."""
        due = self.due(step)
        return all(outbox.committed[0] >= due for outbox in self._outboxes.values())

    @property
    def num_committed(self) -> int:
        """Number of committed tickets of all searchers; grows while a searcher works."""
        return sum(_num_committed(outbox) for outbox in self._outboxes.values())

    def update(self, *, step: int, version: int, num_merged: int, num_fresh: int) -> None:
        """Report the trainer's progress, as `Admission.update`."""
        del step, version
        with self._lock:
            self._unmerged -= num_merged
            self._fresh = num_fresh

    def note_step(self, seconds: float) -> None:
        """Do nothing: the staleness does not depend on durations."""

    def holds(self, step: int) -> bool:
        """Return False: the driver waits until `is_due` is True."""
        del step
        return False

    def latency(self) -> Latency | None:
        """Return None: no response is late."""
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
    """Return the groups per searcher that suffice for all steps until the next publication."""
    return -(-num_prompts * sync_period // len(searchers))
