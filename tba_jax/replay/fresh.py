# SPDX-License-Identifier: Apache-2.0
"""FreshWindow: which prompts have responses of the newest syncs that were never drawn.

It holds numbers of responses, not responses, and knows no locks. Invariants: a prompt is drawn once
per sync as long as there are enough of them, newest sync first; and what was used is not fresh.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from tba_jax.replay.prompt_pool import PromptPool


class _Sync:
    """Prompts with responses that arrived at one sync and were not drawn since.

    Attributes:
        step: trainer step of the sync.
        pool: those prompts.
        unused: prompt id -> how many of its responses are unused.
        version: prompt id -> oldest policy version among its responses of this sync.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.pool = PromptPool()
        self.unused: dict[int, int] = {}
        self.version: dict[int, int] = {}

    def put(self, prompt_id: int, unused: int, version: int) -> None:
        self.pool.add(prompt_id)
        self.unused[prompt_id] = unused
        self.version[prompt_id] = version

    def drop(self, prompt_id: int) -> None:
        self.pool.discard(prompt_id)
        del self.unused[prompt_id], self.version[prompt_id]


class FreshWindow:
    """The last few syncs, oldest first.

    Args:
        num_syncs: how many count as newest.
    """

    def __init__(self, num_syncs: int) -> None:
        self._num_syncs = num_syncs
        self._syncs: dict[int, _Sync] = {}
        self._next = 0

    @property
    def newest(self) -> int:
        """Number of the newest sync, counting from 0; -1 before the first."""
        return self._next - 1

    @property
    def num_groups(self) -> int:
        """Prompts to be drawn, each counted for every sync that it came with."""
        return sum(len(fresh.pool) for fresh in self._syncs.values())

    def open(self, step: int) -> None:
        """Begin a sync, unless the newest one is of this very step."""
        if self._syncs and next(reversed(self._syncs.values())).step == step:
            return
        self._syncs[self._next] = _Sync(step)
        self._next += 1
        if len(self._syncs) > self._num_syncs:
            del self._syncs[next(iter(self._syncs))]

    def put(self, prompt_id: int, unused: int, version: int) -> None:
        """What the newest sync holds of a prompt: unused responses and their oldest version."""
        self._syncs[self.newest].put(prompt_id, unused, version)

    def lose_one(self, sync: int, prompt_id: int) -> None:
        """An unused response that came with `sync` was used or removed."""
        fresh = self._syncs.get(sync)
        if fresh is None:
            return
        left = fresh.unused.get(prompt_id, 0) - 1
        if left > 0:
            fresh.unused[prompt_id] = left
        elif left == 0:
            fresh.drop(prompt_id)

    def drop_older(self, version: int) -> None:
        """Forget prompts with a response of an older version than this."""
        for fresh in self._syncs.values():
            for prompt_id in [i for i, oldest in fresh.version.items() if oldest < version]:
                fresh.drop(prompt_id)

    def count(self, enough: int, group: int) -> int:
        """How many slots can be filled; right up to `enough`, at least that above it.

        Args:
            enough: more need not be counted.
            group: 0: slots of different prompts; else groups of as many unused responses.
        """
        if group:
            unused = [n for fresh in self._syncs.values() for n in fresh.unused.values()]
            return sum(max(1, n // group) for n in unused)
        largest = max((len(fresh.pool) for fresh in self._syncs.values()), default=0)
        if largest >= enough or len(self._syncs) < 2:
            return largest
        return len(set().union(*(fresh.unused for fresh in self._syncs.values())))

    def draw(
        self, rng: np.random.Generator, taken: Collection[int], group: int
    ) -> tuple[int, int] | None:
        """(sync, prompt id) for a slot; None where there is none.

        Args:
            rng: where the draw comes from.
            taken: prompts that are in the batch already.
            group: as in `count`; a prompt with another such group can be drawn again.
        """
        for sync, fresh in reversed(self._syncs.items()):
            prompt_id = fresh.pool.draw(rng, () if group else taken)
            if prompt_id is None:
                continue
            if group and fresh.unused[prompt_id] >= 2 * group:
                fresh.pool.discard(prompt_id)
                fresh.pool.add(prompt_id)  # the draw took it out of the epoch
            else:
                fresh.drop(prompt_id)
            return sync, prompt_id
        return None

    def give_back(self) -> None:
        """The batch is complete: what its draws set aside can be drawn again."""
        for fresh in self._syncs.values():
            fresh.pool.give_back()

    def state(self) -> dict[str, Any]:
        """JSON-compatible."""
        return {
            "fresh": [
                {
                    "sync": sync,
                    "step": fresh.step,
                    "prompts": [[i, fresh.unused[i], fresh.version[i]] for i in fresh.pool.ids],
                }
                for sync, fresh in self._syncs.items()
            ],
            "next_sync": self._next,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put back what `state` returned."""
        entries: Sequence[Mapping[str, Any]] = state["fresh"]
        self._syncs = {}
        for entry in entries:
            fresh = self._syncs[entry["sync"]] = _Sync(entry["step"])
            for prompt_id, unused, version in entry["prompts"]:
                fresh.put(prompt_id, unused, version)
        self._next = state["next_sync"]
