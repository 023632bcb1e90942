# SPDX-License-Identifier: Apache-2.0
"""Contents of the replay buffer, with all indices and counters.

`Contents` adds rounds, evicts responses and counts draws; `ReplayBuffer` chooses the draws and
holds the lock.
Invariant: every addition, use and removal of a response is recorded alike in the store, the fresh
groups, the prompt pool, the ledger and the economy.
"""

import collections
from collections.abc import Mapping
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
from tba_jax.replay.store import MERGED, PROMPT_ID, USES, TrajectoryStore


class Contents:
    """Stored rows with their indices and counters.

    Attributes:
        replay: prompts of the store, for draws in epochs.
        fresh: groups that wait to be drawn.
        recent: prompts of the newest merges.
    """

    def __init__(self, settings: ReplaySettings) -> None:
        self._settings = settings
        self.store = TrajectoryStore()
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

    def use(self, indices: Int[np.ndarray, " n"]) -> list[tuple[Any, ...]]:
        """Count a draw of each of these distinct rows; return the rows before the change."""
        rows = self.store.use(indices)
        for index, row in zip(indices.tolist(), rows, strict=True):
            if not row[USES]:
                self.ledger.counters["trained_unique"] += 1
                self.economy.trained[self.store.length(index)] += 1
                is_first = self.fresh.use(row[MERGED], row[PROMPT_ID], 1)
                self.economy.trained_groups += is_first
        return rows

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
            "buffer/num_bytes": float(store.num_bytes),
            "buffer/reward_mean": store.sum_rewards / count,
            "buffer/age_mean": age / count,
            "buffer/uses_mean": store.sum_uses / count,
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
            self.store.insert(group.prompt, y, row_id=self._next_id, merged=step)
            self._next_id += 1
            self.recent.add(step, prompt_id)
            self.replay.add(prompt_id)

    def _refresh(self, merged: int, prompt_id: int) -> bool:
        """Recount the unused responses of a group; return whether the group is new."""
        unused, version = 0, 0
        if prompt_id in self.store:
            rows = self.store.rows[self.store.indices(prompt_id)]
            is_unused = (rows["merged"] == merged) & (rows["uses"] == 0)
            if is_unused.any():
                unused = int(is_unused.sum())
                version = int(rows["version_min"][is_unused].min())
        return self.fresh.put(merged, prompt_id, unused, version)

    def _evict(self, index: int, reason: str) -> None:
        """Remove a response, and count it by `reason`."""
        row = self.store.remove(index)
        self.ledger.counters[f"evicted_{reason}"] += 1
        if not row[USES]:
            self.fresh.lose(row[MERGED], row[PROMPT_ID], 1)
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
        self.store = TrajectoryStore.restored(arrays, meta)
        self.replay = PromptPool(arrays["prompt_ids"].tolist(), meta["replay_left"])
        self.fresh = FreshGroups.restored(meta, keeps_older=self._settings.max_staleness > 0)
        merged = arrays["row_merged"].tolist()
        rows = collections.Counter(zip(merged, arrays["row_prompt_id"].tolist(), strict=True))
        self.recent = RecentMerges.restored(meta["recent"], rows)
        self.ledger.restore(meta)
        self.economy = Economy.restored(meta["economy"])
        self._next_id = meta["next_id"]
