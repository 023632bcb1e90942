# SPDX-License-Identifier: Apache-2.0
"""Admission: how many prompts may be under way between being taken and being trained on.

Searchers ask before they begin a prompt; the trainer says how far it is. A bound on staleness acts
here, where nothing has been spent yet, and not where responses have been paid for. It knows
neither responses nor devices. Invariant: without new word from the trainer the number of groups
under way (being decoded, graded, waiting in an outbox or unused in the buffer) ends at its limit.
"""

import collections
import math
import threading
from collections.abc import Sequence
from typing import NamedTuple

_KEPT = 512  # latencies that are remembered
_KEPT_STEPS = 32  # the median of so many counts: some of them compile


class Demand(NamedTuple):
    """What the trainer takes.

    Attributes:
        prompts: p, fresh groups that a batch may need at once.
        share: m, the mean share of them that is fresh.
        max_staleness: bound in steps; 0: none, then everything is admitted.
        sync_period: steps between two publications and merges.
        initial: groups wanted before the first step.
    """

    prompts: int
    share: float
    max_staleness: int
    sync_period: int
    initial: int = 0


class Latency(NamedTuple):
    """What searchers and trainer were measured to take.

    Attributes:
        mean_steps, p95_steps: from admission to commit, in steps of the trainer that did not wait.
        step_s: such a step.
        late_share: share of the responses that cannot be used within the bound.
        feasible: least bound that 95 % of them can meet.
    """

    mean_steps: float
    p95_steps: float
    step_s: float
    late_share: float
    feasible: int


class Admission:
    """Counts groups under way, and says whether another may begin.

    A group that is admitted at step t with weights of version v waits for those before it. The
    trainer takes m p of them in a step, so it is used within the bound if there are at most
    (v + bound + 1 - t) m p, itself included (the rule of AReaL, arXiv 2505.24298, with the share
    that is replayed taken off). Once it is known how long responses take, no more are admitted than
    keep the trainer fed, so that searchers with power to spare make data fresher and not older.
    Where responses take longer than the bound, that many would leave the trainer without data: as
    many as it takes meanwhile are admitted, and what is late is late.

    When there is less room than there are searchers that want some, those come first that were
    admitted the longest ago.

    Args:
        demand: of the trainer, or of this host's part of it.
        searchers: indices of those who ask.
        unmerged: groups that wait in outboxes already.
    """

    def __init__(self, demand: Demand, searchers: Sequence[int], unmerged: int = 0) -> None:
        self._demand = demand
        self._lock = threading.Lock()
        self._open = dict.fromkeys(searchers, 0)
        self._unmerged = unmerged
        self._fresh = 0
        self._step = self._version = 0
        self._turn = dict.fromkeys(searchers, 0)  # serial number of the last admission of each
        self._serial = 0
        self._hungry: set[int] = set()
        self._latencies: collections.deque[float] = collections.deque(maxlen=_KEPT)
        self._steps: collections.deque[float] = collections.deque(maxlen=_KEPT_STEPS)
        self._step_s = 0.0

    def admit(self, searcher: int, version: int = 0) -> bool:
        """Whether this searcher may begin one more prompt; if so, it is under way.

        Args:
            searcher: who asks.
            version: of the weights it would begin with, whatever they are.
        """
        del version
        with self._lock:
            room = self._limit() - self._under_way()
            ahead = [s for s in self._hungry if self._turn[s] < self._turn[searcher]]
            if room <= len(ahead):
                self._hungry.add(searcher)
                return False
            self._hungry.discard(searcher)
            self._serial += 1
            self._turn[searcher] = self._serial
            self._open[searcher] += 1
            return True

    def commit(self, searcher: int, latency_s: float) -> None:
        """A group of this searcher lies in its outbox, `latency_s` after it was admitted."""
        with self._lock:
            self._open[searcher] -= 1
            self._unmerged += 1
            self._latencies.append(latency_s)

    def set_open(self, searcher: int, count: int) -> None:
        """So many groups of this searcher are under way: it was lost, or is heard of again."""
        with self._lock:
            self._open[searcher] = count
            self._hungry.discard(searcher)

    def update(self, *, step: int, version: int, num_merged: int, num_fresh: int) -> None:
        """Where the trainer is.

        Args:
            step: updates done.
            version: newest published.
            num_merged: groups that left the outboxes since the last call.
            num_fresh: groups in the buffer that wait for their first use.
        """
        with self._lock:
            self._step, self._version = step, version
            self._unmerged -= num_merged
            self._fresh = num_fresh

    def note_step(self, seconds: float) -> None:
        """A step of the trainer took as long, waiting for data not counted."""
        with self._lock:
            self._steps.append(seconds)
            self._step_s = _quantile(sorted(self._steps), 0.5)

    @property
    def limit(self) -> float:
        """Groups that may be under way now; inf without a bound."""
        with self._lock:
            return self._limit()

    @property
    def num_under_way(self) -> int:
        """Groups admitted and not used yet."""
        with self._lock:
            return self._under_way()

    def _under_way(self) -> int:
        return sum(self._open.values()) + self._unmerged + self._fresh

    def _limit(self) -> float:
        demand = self._demand
        if not demand.max_staleness:
            return math.inf
        rate = demand.share * demand.prompts
        steps: float = self._version + demand.max_staleness + 1 - self._step
        if len(self._latencies) >= demand.prompts and self._step_s:
            mean = sum(self._latencies) / len(self._latencies) / self._step_s
            slow = _quantile(sorted(self._latencies), 0.95) / self._step_s
            # Not more than keeps the trainer fed, nor less than it takes while they are made.
            steps = min(steps, slow + demand.sync_period)
            steps = max(steps, mean + 0.5 + demand.sync_period)
        least = demand.prompts if self._step else max(demand.prompts, demand.initial)
        return max(least, math.ceil(rate * steps))

    def latency(self) -> Latency | None:
        """What was measured; None before there is enough of it."""
        with self._lock:
            latencies, step_s = sorted(self._latencies), self._step_s
        if len(latencies) < 2 * self._demand.prompts or not step_s:
            return None
        steps = [seconds / step_s for seconds in latencies]
        extra = 2 * self._demand.sync_period - 1
        # From the publication before it was admitted to the merge after it was committed.
        ages = [math.ceil(s) + extra for s in steps]
        bound = self._demand.max_staleness
        return Latency(
            mean_steps=sum(steps) / len(steps),
            p95_steps=_quantile(steps, 0.95),
            step_s=step_s,
            late_share=sum(age > bound for age in ages) / len(ages),
            feasible=int(_quantile(ages, 0.95)),
        )


def _quantile(ascending: Sequence[float], share: float) -> float:
    return ascending[min(len(ascending) - 1, math.ceil(share * len(ascending)) - 1)]
