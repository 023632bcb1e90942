# SPDX-License-Identifier: Apache-2.0
"""PromptPool: prompts drawn at random without replacement, in epochs, from a changing set.

Invariant: between two `recycle` calls no prompt is drawn twice, despite additions and removals. The
cost per operation is constant.
"""

from collections.abc import Collection, Iterable

import numpy as np


class PromptPool:
    """A set of prompt IDs, of which some remain in the current epoch.

    Attributes:
        ids: all IDs; the first `num_left` remain to be drawn in this epoch.
        num_left: number of IDs that remain.
    """

    def __init__(self, ids: Iterable[int] = (), num_left: int = 0) -> None:
        self.ids = list(ids)
        self.num_left = num_left
        self._where = {prompt_id: index for index, prompt_id in enumerate(self.ids)}
        self._aside: list[int] = []

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, prompt_id: int) -> None:
        """Add a prompt to this epoch; a prompt that is present stays as it is."""
        if prompt_id not in self._where:
            self._where[prompt_id] = len(self.ids)
            self.ids.append(prompt_id)
            self._move_left(prompt_id)

    def discard(self, prompt_id: int) -> None:
        """Remove a prompt, if present."""
        index = self._where.get(prompt_id)
        if index is None:
            return
        if index < self.num_left:
            self.num_left -= 1
            self._swap(index, self.num_left)
            index = self.num_left
        self._swap(index, len(self.ids) - 1)
        self.ids.pop()
        del self._where[prompt_id]

    def draw(self, rng: np.random.Generator, excluded: Collection[int]) -> int | None:
        """Return a random remaining prompt that is not excluded; None if there is none.

        Excluded prompts that are found on the way are set aside until `give_back` or `recycle`.
        """
        while self.num_left:
            # A float times a count is uniform enough below 2^53, and ten times faster than
            # rng.integers.
            index = int(rng.random() * self.num_left)
            self.num_left -= 1
            self._swap(index, self.num_left)
            prompt_id = self.ids[self.num_left]
            if prompt_id not in excluded:
                return prompt_id
            self._aside.append(prompt_id)
        return None

    def give_back(self) -> None:
        """Make set-aside prompts drawable again in this epoch."""
        for prompt_id in self._aside:
            if prompt_id in self._where:
                self._move_left(prompt_id)
        self._aside.clear()

    def recycle(self) -> None:
        """Begin a new epoch with all prompts."""
        self.num_left = len(self.ids)
        self._aside.clear()

    def _move_left(self, prompt_id: int) -> None:
        index = self._where[prompt_id]
        if index >= self.num_left:
            self._swap(index, self.num_left)
            self.num_left += 1

    def _swap(self, i: int, j: int) -> None:
        ids = self.ids
        ids[i], ids[j] = ids[j], ids[i]
        self._where[ids[i]], self._where[ids[j]] = i, j
