# SPDX-License-Identifier: Apache-2.0
"""Admission: limits the prompts that searchers have started and the trainer has not used.

Searchers ask before they begin a prompt, and the trainer reports its progress. A bound on staleness
thus takes effect before a response costs anything. Invariant: without further reports of the
trainer, the number of open groups (in decoding, grading, an outbox, or unused in the buffer) stops
at its limit. With a strict bound, no group begins that the trainer could not use in time.
"""

import collections
import math
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_KEPT = 512  # number of latencies for the statistics
_KEPT_STEPS = 32  # number of step times for the median: some steps include compilation


class Demand(NamedTuple):
    """The trainer's demand for groups.

    Attributes:
        prompts: p, maximum number of fresh groups in a batch.
        share: m, mean share of fresh groups in a batch.
        max_staleness: bound on staleness, in steps; 0: no bound, every group is admitted.
        sync_period: steps between two publications and merges.
        initial: groups needed before the first step.
        is_strict: the trainer waits instead of exceeding the bound.
    """

    prompts: int
    share: float
    max_staleness: int
    sync_period: int
    initial: int = 0
    is_strict: bool = False


class Latency(NamedTuple):
    """Measured time that groups take from admission to their use.

    Attributes:
        mean_steps, p95_steps: latency from admission to commit, in units of `step_s`.
        step_s: median duration of a step, without the wait for data.
        behind_steps: median publication latency: steps by which the weights at a prompt's start
            are older than the newest published ones.
        late_share: share of the responses that cannot be used within the bound.
        feasible: smallest bound that 95 % of the responses can meet.
    """

    mean_steps: float
    p95_steps: float
    step_s: float
    behind_steps: int
    late_share: float
    feasible: int


class Admission:
    """Count of open groups, and the rule for the start of another group.

    Groups are used in the order of admission, m p fresh groups per step: p is the maximum number
    of fresh groups in a batch, and m is their mean share, as in `Demand`. A group that is admitted
    at step t with weights of version v is therefore used within the bound if at most
    (v + bound + 1 - t) m p groups are open, including this group (the rule of AReaL, arXiv
    2505.24298, minus the replayed share). v is the version of the asking searcher, not the newest
    published version, because publication latency uses up a part of the bound. Once latencies are
    known, no more groups are admitted than the trainer needs, so fast searchers make the data
    fresher. If a response takes longer than the bound, this limit would leave the trainer without
    data. Then the limit is the number of groups that the trainer uses during one response, and
    some responses are late.

    A strict admission always keeps the rule: searchers wait for newer weights, and the trainer
    waits while `holds` is true. Responses are then used within the bound if every batch slot is
    fresh (m = 1). For smaller m, the number of fresh slots per step is random, and a response may
    be used one step after the bound.

    If only some of the asking searchers can be admitted, those whose last admission is the oldest
    come first.

    Args:
        unmerged: groups that already wait in outboxes.
    """

    def __init__(self, demand: Demand, searchers: Sequence[int], unmerged: int = 0) -> None:
        self._demand = demand
        self._lock = threading.Lock()
        self._open: dict[int, list[int]] = {s: [] for s in searchers}  # versions of open groups
        self._unmerged = unmerged
        self._fresh = 0
        self._step = self._version = 0
        self._turn = dict.fromkeys(searchers, 0)  # serial number of the last admission of each
        self._serial = 0
        self._hungry: set[int] = set()
        self._latencies: collections.deque[float] = collections.deque(maxlen=_KEPT)
        self._steps: collections.deque[float] = collections.deque(maxlen=_KEPT_STEPS)
        self._behind: collections.deque[int] = collections.deque(maxlen=_KEPT)
        self._step_s = 0.0

    def admit(self, searcher: int, version: int) -> bool:
        """Return whether this searcher may begin one more prompt; if so, count it as open.

        Args:
            version: version of the weights that it would begin with, or an older one.
        """
        with self._lock:
            limit = self._limit(version)
            room = limit - self._under_way()
            self._hungry.discard(searcher)
            ahead = [s for s in self._hungry if self._turn[s] < self._turn[searcher]]
            if room <= len(ahead):
                if limit:  # a searcher that waits for weights does not delay others
                    self._hungry.add(searcher)
                return False
            self._serial += 1
            self._turn[searcher] = self._serial
            self._open[searcher].append(version)
            self._behind.append(max(0, self._version - version))
            return True

    def commit(self, searcher: int, latency_s: float, version: int) -> None:
        """Count a group of this searcher as committed to its outbox.

        Args:
            latency_s: time since its admission.
            version: version of its admission.
        """
        with self._lock:
            self._open[searcher].remove(version)
            self._unmerged += 1
            self._latencies.append(latency_s)

    def set_open(self, searcher: int, versions: Sequence[int]) -> None:
        """Set the versions of a searcher's open groups, when the searcher is lost or reconnects."""
        with self._lock:
            self._open[searcher] = list(versions)
            self._hungry.discard(searcher)

    def holds(self, step: int) -> bool:
        """Return whether the trainer must wait before this step for a group that would be late."""
        demand = self._demand
        if not demand.is_strict:
            return False
        with self._lock:
            oldest = min((v for versions in self._open.values() for v in versions), default=step)
            return oldest <= step - demand.max_staleness

    def update(self, *, step: int, version: int, num_merged: int, num_fresh: int) -> None:
        """Report the trainer's progress.

        Args:
            step: completed steps.
            version: newest published version.
            num_merged: groups that left the outboxes since the last call.
            num_fresh: groups in the buffer that wait for their first use.
        """
        with self._lock:
            self._step, self._version = step, version
            self._unmerged -= num_merged
            self._fresh = num_fresh

    def note_step(self, seconds: float) -> None:
        """Record the duration of a step; the wait for data does not count."""
        with self._lock:
            self._steps.append(seconds)
            self._step_s = _quantile(sorted(self._steps), 0.5)

    @property
    def limit(self) -> float:
        """Maximum number of open groups, if searchers have the newest weights; inf: no bound."""
        with self._lock:
            return self._limit(self._version)

    @property
    def num_under_way(self) -> int:
        """Groups admitted and not used yet."""
        with self._lock:
            return self._under_way()

    def _under_way(self) -> int:
        return sum(map(len, self._open.values())) + self._unmerged + self._fresh

    def _limit(self, version: int) -> float:
        demand = self._demand
        if not demand.max_staleness:
            return math.inf
        rate = demand.share * demand.prompts
        steps: float = version + demand.max_staleness + 1 - self._step
        if demand.is_strict and steps < 1:
            return 0  # wait for newer weights
        if len(self._latencies) >= demand.prompts and self._step_s:
            mean = sum(self._latencies) / len(self._latencies) / self._step_s
            slow = _quantile(sorted(self._latencies), 0.95) / self._step_s
            # The trainer's demand during one response is both the minimum and the maximum.
            steps = min(steps, slow + demand.sync_period)
            if not demand.is_strict:
                steps = max(steps, mean + 0.5 + demand.sync_period)
        least = demand.prompts if self._step else max(demand.prompts, demand.initial)
        return max(least, math.floor(rate * steps) if demand.is_strict else math.ceil(rate * steps))

    def latency(self) -> Latency | None:
        """Return the measured latency of groups; None before there are enough measurements."""
        with self._lock:
            latencies, step_s = sorted(self._latencies), self._step_s
            behind = int(_quantile(sorted(self._behind), 0.5)) if self._behind else 0
        if len(latencies) < 2 * self._demand.prompts or not step_s:
            return None
        steps = [seconds / step_s for seconds in latencies]
        extra = 2 * self._demand.sync_period - 1 + behind
        # Age of a group: from the publication of its weights to the merge after its commit.
        ages = [math.ceil(s) + extra for s in steps]
        bound = self._demand.max_staleness
        return Latency(
            mean_steps=sum(steps) / len(steps),
            p95_steps=_quantile(steps, 0.95),
            step_s=step_s,
            behind_steps=behind,
            late_share=sum(age > bound for age in ages) / len(ages),
            feasible=int(_quantile(ages, 0.95)),
        )


def _quantile(ascending: Sequence[float], share: float) -> float:
    return ascending[min(len(ascending) - 1, math.ceil(share * len(ascending)) - 1)]


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

    def commit(self, searcher: int, latency_s: float, version: int) -> None:
        """Count a round as finished."""
        del latency_s, version
        with self._lock:
            self._open[searcher] -= 1

    def set_open(self, searcher: int, versions: Sequence[int]) -> None:
        """Set the open rounds of a searcher; other rounds that it started may start again."""
        with self._lock:
            self._left[searcher] += self._open[searcher] - len(versions)
            self._open[searcher] = len(versions)
