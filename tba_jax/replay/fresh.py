# SPDX-License-Identifier: Apache-2.0
"""FreshGroups: responses that were never drawn, and the order in which they are drawn.

A group is the responses of one merge to one prompt. This module holds counts, not responses.
Invariants: a group is drawn once, in the order of insertion, while there are enough prompts for a
batch; and a used response is not fresh.
"""

import bisect
import collections
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tba_jax.replay.draws import PromptPool

KEPT_MERGES = 8
"""Number of merges whose prompts can be drawn again: their data are nearly new."""


class _Group:
    """A waiting group.

    Attributes:
        merged: trainer step of its merge.
        prompt_id: ID of the group's prompt.
        unused: number of its responses that were never drawn.
        version: oldest policy version of the unused responses.
        is_used: whether another response of the group was drawn.
    """

    __slots__ = ("merged", "prompt_id", "unused", "version", "is_used")

    def __init__(
        self, merged: int, prompt_id: int, unused: int, version: int, is_used: bool
    ) -> None:
        self.merged = merged
        self.prompt_id = prompt_id
        self.unused = unused
        self.version = version
        self.is_used = is_used


class _Rank:
    """Groups of one rank, drawn in random order before groups of higher ranks."""

    __slots__ = ("pool", "groups")

    def __init__(self) -> None:
        self.pool = PromptPool()
        self.groups: dict[int, list[_Group]] = {}  # by prompt, in order of arrival


class Found(NamedTuple):
    """A group to draw from.

    Attributes:
        merged: trainer step of its merge.
        prompt_id: ID of the group's prompt.
        is_first: whether no response of the group was drawn before.
    """

    merged: int
    prompt_id: int
    is_first: bool


class FreshGroups:
    """Groups with responses that were never drawn.

    Args:
        keeps_older: True: groups of all merges wait, and the oldest policy version is drawn
            first. False: only groups of the newest merge wait.
    """

    def __init__(self, *, keeps_older: bool) -> None:
        self._keeps_older = keeps_older
        self._newest: int | None = None  # step of the newest merge; None with keeps_older
        self._groups: dict[tuple[int, int], _Group] = {}  # by merge and prompt
        self._groups_of: collections.Counter[int] = collections.Counter()  # by prompt
        self._ranks: dict[int, _Rank] = {}
        self._order: list[int] = []  # ranks, ascending
        self._visited: set[int] = set()  # ranks with set-aside prompts
        self.num_untouched = 0

    def __len__(self) -> int:
        """Return the number of waiting groups."""
        return len(self._groups)

    @property
    def prompts(self) -> set[int]:
        """Return the prompts of waiting groups."""
        return set(self._groups_of)

    def open(self, step: int) -> None:
        """Begin the merge of this step, unless it has begun."""
        if self._keeps_older or self._newest == step:
            return
        self._newest = step
        for group in list(self._groups.values()):
            self._remove(group)

    def put(self, merged: int, prompt_id: int, unused: int, version: int) -> bool:
        """Set the unused responses of a group; return whether the group is new.

        Args:
            merged: trainer step of its merge.
            prompt_id: ID of the group's prompt.
            unused: number of unused responses; 0 removes the group.
            version: oldest policy version of the unused responses.
        """
        known = self._groups.get((merged, prompt_id))
        if known is not None:
            self._remove(known)
        if unused:
            is_used = known is not None and known.is_used
            self._add(_Group(merged, prompt_id, unused, version, is_used))
        return known is None and unused > 0

    def use(self, merged: int, prompt_id: int, count: int) -> bool:
        """Count a draw of `count` unused responses of a group.

        Returns:
            Whether the group waits and none of its responses was drawn before.
        """
        group = self._groups.get((merged, prompt_id))
        if group is None:
            return False
        is_first = not group.is_used
        self.num_untouched -= is_first
        group.is_used = True
        self.lose(merged, prompt_id, count)
        return is_first

    def lose(self, merged: int, prompt_id: int, count: int) -> None:
        """Count unused responses that left the store, or that a replay slot has drawn."""
        group = self._groups.get((merged, prompt_id))
        if group is not None:
            group.unused -= count
            if group.unused <= 0:
                self._remove(group)

    def count(self, group_size: int) -> int:
        """Return the number of slots that can be filled.

        Args:
            group_size: unused responses per slot; 0: each slot takes another prompt.
        """
        if group_size:
            return sum(max(1, group.unused // group_size) for group in self._groups.values())
        return len(self._groups_of)

    def draw(
        self, rng: np.random.Generator, taken: Collection[int], group_size: int
    ) -> Found | None:
        """Return a group for a slot; None if there is none.

        Args:
            taken: prompts already in the batch.
            group_size: as in `count`; a group that fills another slot can be drawn again.
        """
        for number in self._order:
            rank = self._ranks[number]
            self._visited.add(number)
            prompt_id = rank.pool.draw(rng, () if group_size else taken)
            if prompt_id is None:
                continue
            group = rank.groups[prompt_id][0]
            is_first = not group.is_used
            if group_size and group.unused >= 2 * group_size:
                self.num_untouched -= is_first
                group.is_used = True
                # The draw has removed the prompt from the epoch.
                rank.pool.discard(prompt_id)
                rank.pool.add(prompt_id)
            else:
                self._remove(group)
            return Found(group.merged, prompt_id, is_first)
        return None

    def give_back(self) -> None:
        """End a batch: prompts that its draws set aside can be drawn again."""
        for number in self._visited:
            if number in self._ranks:
                self._ranks[number].pool.give_back()
        self._visited.clear()

    def _add(self, group: _Group) -> None:
        number = group.version if self._keeps_older else 0
        rank = self._ranks.get(number)
        if rank is None:
            rank = self._ranks[number] = _Rank()
            bisect.insort(self._order, number)
        rank.pool.add(group.prompt_id)
        rank.groups.setdefault(group.prompt_id, []).append(group)
        self._groups[group.merged, group.prompt_id] = group
        self._groups_of[group.prompt_id] += 1
        self.num_untouched += not group.is_used

    def _remove(self, group: _Group) -> None:
        number = group.version if self._keeps_older else 0
        rank = self._ranks[number]
        rank.pool.discard(group.prompt_id)
        rank.groups[group.prompt_id].remove(group)
        if rank.groups[group.prompt_id]:
            rank.pool.add(group.prompt_id)
        else:
            del rank.groups[group.prompt_id]
        if not rank.groups:
            del self._ranks[number]
            self._order.remove(number)
        del self._groups[group.merged, group.prompt_id]
        self._groups_of[group.prompt_id] -= 1
        if not self._groups_of[group.prompt_id]:
            del self._groups_of[group.prompt_id]
        self.num_untouched -= not group.is_used

    def state(self) -> dict[str, Any]:
        """Return the state, JSON-compatible."""
        waiting = [
            [group.merged, prompt_id, group.unused, group.version, group.is_used]
            for number in self._order
            for prompt_id in self._ranks[number].pool.ids
            for group in self._ranks[number].groups[prompt_id]
        ]
        return {"fresh": waiting, "merges": [] if self._newest is None else [self._newest]}

    @classmethod
    def restored(cls, state: Mapping[str, Any], *, keeps_older: bool) -> "FreshGroups":
        """Return the groups of a saved `state`, in the order in which they were saved."""
        groups = cls(keeps_older=keeps_older)
        groups._newest = max(state["merges"], default=None)
        for group in state["fresh"]:
            groups._add(_Group(*group))
        return groups


class _Merge:
    """Prompts of one merge that still have stored responses."""

    def __init__(self, rows: Mapping[int, int], pool: PromptPool) -> None:
        self.rows = dict(rows)  # number of rows by prompt
        self.pool = pool


class RecentMerges:
    """Prompts of the newest merges, to fill fresh slots when no unused response is left.

    Prompts of the newest merge are drawn first, then those of earlier merges. Only prompts with
    stored responses can be drawn.
    """

    def __init__(self) -> None:
        self._merges: dict[int, _Merge] = {}  # by their step, ascending; KEPT_MERGES at most

    def add(self, merged: int, prompt_id: int) -> None:
        """Record a stored row of the newest merge."""
        merge = self._merges.get(merged)
        if merge is None:
            merge = self._merges[merged] = _Merge({}, PromptPool())
            if len(self._merges) > KEPT_MERGES:
                del self._merges[next(iter(self._merges))]
        merge.rows[prompt_id] = merge.rows.get(prompt_id, 0) + 1
        merge.pool.add(prompt_id)

    def lose(self, merged: int, prompt_id: int) -> None:
        """Record the removal of a row."""
        merge = self._merges.get(merged)
        if merge is None:
            return
        merge.rows[prompt_id] -= 1
        if not merge.rows[prompt_id]:
            del merge.rows[prompt_id]
            merge.pool.discard(prompt_id)

    def ids(self) -> set[int]:
        """Return the prompts of the newest merges."""
        return {prompt_id for merge in self._merges.values() for prompt_id in merge.rows}

    def draw(self, rng: np.random.Generator, taken: Collection[int]) -> tuple[int, int] | None:
        """Return (step of the merge, prompt) of the newest merge with a prompt not in `taken`.

        All prompts of a merge are drawn before a prompt repeats.
        """
        for merged, merge in reversed(self._merges.items()):
            prompt_id = merge.pool.draw(rng, taken)
            if prompt_id is None:
                merge.pool.recycle()
                prompt_id = merge.pool.draw(rng, taken)
            if prompt_id is not None:
                return merged, prompt_id
        return None

    def give_back(self) -> None:
        """End a batch: prompts that its draws set aside can be drawn again."""
        for merge in self._merges.values():
            merge.pool.give_back()

    def state(self) -> list[dict[str, Any]]:
        """Return the state, JSON-compatible."""
        return [
            {"step": merged, "ids": list(merge.pool.ids), "left": merge.pool.num_left}
            for merged, merge in self._merges.items()
        ]

    @classmethod
    def restored(
        cls, state: Sequence[Mapping[str, Any]], rows: Mapping[tuple[int, int], int]
    ) -> "RecentMerges":
        """Return the merges of a saved `state`.

        Args:
            rows: stored rows by merge and prompt.
        """
        recent = cls()
        for entry in state:
            step, ids = entry["step"], entry["ids"]
            own = {prompt_id: rows[step, prompt_id] for prompt_id in ids}
            recent._merges[step] = _Merge(own, PromptPool(ids, entry["left"]))
        return recent
