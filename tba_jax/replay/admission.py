# SPDX-License-Identifier: Apache-2.0
"""Admission: limits the prompts that searchers have started and the trainer has not used.

Searchers ask before they begin a prompt, and the trainer reports its progress. A bound on staleness
thus takes effect before a response costs anything. Invariant: without further reports of the
trainer, the number of open groups (in decoding, grading, an outbox, or unused in the buffer) stops
at its limit.
"""

import math
import threading
from collections.abc import Mapping, Sequence


class Admission:
    """Count of open groups, and the rule for the start of another group.

    The trainer uses groups in the order of their versions, m p fresh groups per step. A searcher
    with weights of version v therefore begins a group at step t only while at most
    (v + bound + 1 - t) m p groups are open, including the new group (the rule of AReaL, arXiv
    2505.24298, without replayed groups). Once v is too old for the bound, the searcher waits for
    newer weights. A batch may consist of fresh groups only, so the limit is at least p groups.

    Args:
        num_prompts: p, maximum number of fresh groups in a batch.
        share: m, mean share of fresh groups in a batch.
        max_staleness: bound on staleness, in steps; 0: no bound, every group is admitted.
        initial: groups needed before the first step.
        unmerged: groups that already wait in outboxes.
    """

    def __init__(
        self,
        searchers: Sequence[int],
        *,
        num_prompts: int,
        share: float,
        max_staleness: int,
        initial: int = 0,
        unmerged: int = 0,
    ) -> None:
        self._num_prompts = num_prompts
        self._share = share
        self._max_staleness = max_staleness
        self._initial = initial
        self._lock = threading.Lock()
        self._open: dict[int, list[int]] = {s: [] for s in searchers}  # versions of open groups
        self._unmerged = unmerged
        self._fresh = 0
        self._step = 0

    def admit(self, searcher: int, version: int) -> bool:
        """Return whether this searcher may begin one more prompt; if so, count it as open.

        Args:
            version: version of the weights that it would begin with, or an older one.
        """
        with self._lock:
            if self._under_way() >= self._limit(version):
                return False
            self._open[searcher].append(version)
            return True

    def commit(self, searcher: int, version: int) -> None:
        """Count a group of this searcher, admitted with this version, as in its outbox."""
        with self._lock:
            self._open[searcher].remove(version)
            self._unmerged += 1

    def set_open(self, searcher: int, versions: Sequence[int]) -> None:
        """Set the versions of a searcher's open groups, when the searcher is lost or reconnects."""
        with self._lock:
            self._open[searcher] = list(versions)

    def has_open_below(self, version: int) -> bool:
        """Return whether a group is open that began with weights older than `version`."""
        with self._lock:
            return any(v < version for versions in self._open.values() for v in versions)

    def update(self, *, step: int, num_merged: int, num_fresh: int) -> None:
        """Report the trainer's progress.

        Args:
            step: completed steps.
            num_merged: groups that left the outboxes since the last call.
            num_fresh: groups in the buffer that wait for their first use.
        """
        with self._lock:
            self._step = step
            self._unmerged -= num_merged
            self._fresh = num_fresh

    @property
    def num_under_way(self) -> int:
        """Groups admitted and not used yet."""
        with self._lock:
            return self._under_way()

    def _under_way(self) -> int:
        return sum(map(len, self._open.values())) + self._unmerged + self._fresh

    def _limit(self, version: int) -> float:
        if not self._max_staleness:
            return math.inf
        steps = version + self._max_staleness + 1 - self._step
        if steps < 1:
            return 0  # wait for newer weights
        least = self._num_prompts if self._step else max(self._num_prompts, self._initial)
        return max(least, math.floor(self._share * self._num_prompts * steps))


class RoundAdmission:
    """Admission of rounds of remote searchers with driver=sync, each with one version."""

    def __init__(self, searchers: Sequence[int]) -> None:
        self._lock = threading.Lock()
        self._left = dict.fromkeys(searchers, 0)
        self._open = dict.fromkeys(searchers, 0)
        self._version = -1

    def allow(self, rounds: Mapping[int, int], version: int) -> None:
        """Let searchers start more rounds.

        Args:
            rounds: searcher ID -> number of rounds.
        """
        with self._lock:
            self._version = version
            for searcher, count in rounds.items():
                self._left[searcher] += count

    def admit(self, searcher: int, version: int) -> bool:
        """Return whether this searcher may start a round with weights of this version."""
        with self._lock:
            if version != self._version or not self._left[searcher]:
                return False
            self._left[searcher] -= 1
            self._open[searcher] += 1
            return True

    def commit(self, searcher: int, version: int) -> None:
        """Count a round as finished."""
        del version
        with self._lock:
            self._open[searcher] -= 1

    def set_open(self, searcher: int, versions: Sequence[int]) -> None:
        """Set the open rounds of a searcher; other rounds that it started may start again."""
        with self._lock:
            self._left[searcher] += self._open[searcher] - len(versions)
            self._open[searcher] = len(versions)
