# SPDX-License-Identifier: Apache-2.0
"""Contents of the replay buffer, with all indices and counters.

`Contents` adds rounds, evicts responses and counts draws; `ReplayBuffer` chooses the draws and
holds the lock.
Invariant: every addition, use and removal of a response is recorded alike in the store, the fresh
groups, the prompt pool, the ledger and the economy.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from tba_jax.flow.rounds import RoundCommit
from tba_jax.flow.state import PartState
from tba_jax.flow.trajectory import Group
from tba_jax.replay.config import ReplaySettings
from tba_jax.replay.draws import PromptPool
from tba_jax.replay.fresh import FreshGroups, RecentMerges
from tba_jax.replay.ledger import Economy, Ledger
from tba_jax.replay.store import COUNT, MERGED, PROMPT_ID, USES, TrajectoryStore


class Contents:
    """Stored rows with their indices and counters.

    Attributes:
        replay: prompts of the store, for draws in epochs.
        fresh: groups that wait to be drawn.
        recent: prompts of the newest merges.
    """

    def __init__(self, settings: ReplaySettings) -> None:
        self._settings = settings
        self.store = TrajectoryStore(unites=settings.deduplicate)
        self.replay = PromptPool()
        self.fresh = FreshGroups(keeps_older=settings.max_staleness > 0)
        self.recent = RecentMerges()
        self.ledger = Ledger()
        self.economy = Economy()
        self._next_id = 0

    def take_in(self, commit: RoundCommit, step: int) -> None:
        """Add one whole round; the result does not depend on how rounds are grouped into merges."""
        touched = sorted({g.prompt.prompt_id for g in commit.groups if g.trajectories})
        if touched:
            self.fresh.open(step)
        self.ledger.counters["generated"] += commit.generated
        for group in commit.groups:
            self._insert(group, step)
        for prompt_id in touched:
            self._evict_surplus(prompt_id)
        self._evict_bytes()
        for prompt_id in touched:
            self.economy.merged_groups += self._refresh(step, prompt_id)

    def age(self, step: int) -> None:
        """Evict unused responses that are too stale at this step, if replay.late=drop."""
        if self._settings.max_staleness and self._settings.late == "drop":
            self._evict_late(step - self._settings.max_staleness)

    def use(
        self, indices: Int[np.ndarray, " n"], times: Int[np.ndarray, " n"]
    ) -> list[tuple[Any, ...]]:
        """Count draws of these rows, `times` each, and evict rows that reached max_reuse.

        Returns:
            The rows before the eviction.
        """
        rows = self.store.use(indices, times)
        for index, row, n in zip(indices.tolist(), rows, times.tolist(), strict=True):
            unused = row[COUNT] - row[USES]
            if unused > 0:
                first = min(n, unused)
                self.ledger.counters["trained_unique"] += first
                self.economy.trained[self.store.length(index)] += first
                is_first = self.fresh.use(row[MERGED], row[PROMPT_ID], first)
                self.economy.trained_groups += is_first
        return rows

    def evict_used_up(self, indices: Sequence[int]) -> None:
        """Evict the rows at these indices that reached max_reuse."""
        most = self._settings.max_reuse
        for index in indices if most else ():
            row = self.store.rows[index]
            if row["uses"] >= most * row["count"]:
                self._evict(index, "reuse")

    def copies(self, indices: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Return how many responses of each row may still be drawn."""
        count = self.store.rows["count"][indices]
        if not self._settings.max_reuse:
            return count
        return np.minimum(
            count, self._settings.max_reuse * count - self.store.rows["uses"][indices]
        )

    def totals(self) -> dict[str, int]:
        """Return all counters of the ledger, and the number of stored responses."""
        return self.ledger.totals(self.store.num_trajectories)

    def stats(self, step: int) -> dict[str, float]:
        """Return metrics, as `ReplayBuffer.stats`."""
        store, totals = self.store, self.totals()
        count = max(1, store.num_trajectories)
        received = max(1, totals["generated"] - totals["rejected"])
        age = step * store.num_trajectories - store.sum_versions
        return {
            "buffer/num_prompts": float(len(store)),
            "buffer/num_trajectories": float(store.num_trajectories),
            "buffer/num_rows": float(store.num_rows),
            "buffer/num_bytes": float(store.num_bytes),
            "buffer/reward_mean": store.sum_rewards / count,
            "buffer/age_mean": age / count,
            "buffer/uses_mean": store.sum_uses / count,
            "buffer/unique_fraction": 1 - (totals["duplicate"] + totals["united"]) / received,
            "buffer/replay_ratio": totals["used"] / received,
            "buffer/fresh_short": float(totals["fresh_short"]),
            "buffer/redrawn": float(totals["redrawn"]),
            "buffer/skipped": float(totals["skipped"]),
            **{f"buffer/rejected_{k}": float(n) for k, n in self.ledger.rejected.items()},
            **self.economy.stats(self.fresh.num_untouched, self._settings.max_staleness),
        }

    def _insert(self, group: Group, step: int) -> None:
        self.ledger.reject(group.rejected)
        prompt_id = group.prompt.prompt_id
        for y in group.trajectories:
            self.economy.came_in[len(y.response_tokens)] += 1
            if self.store.insert(group.prompt, y, row_id=self._next_id, merged=step):
                self._next_id += 1
                self.recent.add(step, prompt_id)
                self.replay.add(prompt_id)
            else:
                self.ledger.counters["united"] += 1

    def _refresh(self, merged: int, prompt_id: int) -> bool:
        """Recount the unused responses of a group; return whether the group is new."""
        unused, version = 0, 0
        if prompt_id in self.store:
            rows = self.store.rows[self.store.indices(prompt_id)]
            left = rows["count"] - rows["uses"]
            is_unused = (rows["merged"] == merged) & (left > 0)
            if is_unused.any():
                unused = int(left[is_unused].sum())
                version = int(rows["version_min"][is_unused].min())
        return self.fresh.put(merged, prompt_id, unused, version)

    def _evict(self, index: int, reason: str, copies: int | None = None) -> None:
        """Remove a row, or `copies` of its never-drawn responses, and count it by `reason`."""
        row = self.store.remove(index, copies)
        gone = row[COUNT] if copies is None else copies
        self.ledger.counters[f"evicted_{reason}"] += gone
        unused = max(0, row[COUNT] - row[USES])
        if unused:
            self.fresh.lose(row[MERGED], row[PROMPT_ID], min(gone, unused))
        if gone == row[COUNT]:
            self.recent.lose(row[MERGED], row[PROMPT_ID])
        if row[PROMPT_ID] not in self.store:
            self.replay.discard(row[PROMPT_ID])

    def _evict_surplus(self, prompt_id: int) -> None:
        indices = self.store.indices(prompt_id)
        surplus = len(indices) - self._settings.capacity_per_prompt
        if surplus > 0:
            rows = self.store.rows[indices]
            order = np.lexsort((rows["id"], rows["version_min"]))
            for index in indices[order[:surplus]].tolist():
                self._evict(index, "capacity")

    def _evict_bytes(self) -> None:
        while self.store.num_bytes > self._settings.max_bytes:
            index = self.store.oldest()
            assert index is not None, "num_bytes is positive but the store is empty"
            self._evict(index, "bytes")

    def _evict_late(self, version: int) -> None:
        """Evict unused responses whose policy version is older than `version`."""
        for merged, prompt_id in self.fresh.older_than(version):
            indices = self.store.indices(prompt_id)
            rows = self.store.rows[indices]
            left = rows["count"] - rows["uses"]
            is_late = (rows["merged"] == merged) & (rows["version_min"] < version) & (left > 0)
            for index, copies in zip(
                indices[is_late].tolist(), left[is_late].tolist(), strict=True
            ):
                self._evict(index, "late", copies)
            # Without its unused copies, a row may have reached max_reuse.
            self.evict_used_up(indices[is_late & (rows["uses"] > 0)].tolist())
            self._refresh(merged, prompt_id)

    def state(self) -> PartState:
        """Return flat arrays (see TrajectoryStore.snapshot) and JSON-compatible metadata."""
        arrays, meta = self.store.snapshot(self.replay.ids)
        return PartState(
            arrays,
            {
                **meta,
                "replay_left": self.replay.num_left,
                **self.fresh.state(),
                "recent": self.recent.state(),
                **self.ledger.state(),
                "economy": self.economy.state(),
                "next_id": self._next_id,
            },
        )

    def restore(self, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> None:
        """Replace the contents by a saved `state`."""
        self.store = TrajectoryStore.restored(arrays, meta, unites=self._settings.deduplicate)
        self.replay = PromptPool(arrays["prompt_ids"].tolist(), meta["replay_left"])
        self.fresh = FreshGroups.restored(meta, keeps_older=self._settings.max_staleness > 0)
        merged = arrays["row_merged"].tolist()
        rows = collections.Counter(zip(merged, arrays["row_prompt_id"].tolist(), strict=True))
        self.recent = RecentMerges.restored(meta["recent"], rows)
        self.ledger.restore(meta)
        self.economy = Economy.restored(meta["economy"])
        self._next_id = meta["next_id"]
