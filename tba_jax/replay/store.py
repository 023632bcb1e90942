# SPDX-License-Identifier: Apache-2.0
"""Records of the replay buffer: the responses to one prompt, and a merged group.

Responses are columns, because a million objects would take three times the memory, and the garbage
collector would visit them all.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tba_jax.flow.trajectory import Prompt
from tba_jax.replay.config import PROMPT_OVERHEAD_BYTES, RESPONSE_OVERHEAD_BYTES

COLUMNS = {"ids": "<i8", "versions": "<i8", "rewards": "<f8", "uses": "<i8", "groups": "<i8"}
"""Columns of a `Store` with their dtypes."""


@dataclass(slots=True, eq=False)
class Store:
    """A prompt with its responses, oldest policy version first, then lowest ID.

    Attributes:
        place: index of the prompt in the list from which prompts are drawn.
        packed: each trajectory as bytes.
        ids: number of each response, in the order of merges.
        versions: oldest policy version of the tokens.
        rewards: raw reward.
        uses: number of draws that have the response.
        groups: ID of the merged group.
    """

    prompt: Prompt
    place: int
    packed: list[bytes] = field(default_factory=list)
    ids: array = field(default_factory=lambda: array("q"))
    versions: array = field(default_factory=lambda: array("q"))
    rewards: array = field(default_factory=lambda: array("d"))
    uses: array = field(default_factory=lambda: array("q"))
    groups: array = field(default_factory=lambda: array("q"))

    @property
    def columns(self) -> tuple[array, ...]:
        """The columns in the order of COLUMNS."""
        return self.ids, self.versions, self.rewards, self.uses, self.groups

    @property
    def first(self) -> tuple[int, int, int]:
        """Version and ID of the oldest response, and the prompt."""
        return self.versions[0], self.ids[0], self.prompt.prompt_id

    @property
    def num_bytes(self) -> int:
        """Bytes of prompt and responses, including estimated bookkeeping."""
        of_prompt = self.prompt.tokens.nbytes + len(self.prompt.text) + PROMPT_OVERHEAD_BYTES
        return of_prompt + sum(map(len, self.packed)) + RESPONSE_OVERHEAD_BYTES * len(self.packed)

    def insert(self, packed: bytes, values: Sequence[int | float]) -> None:
        """Insert a response with a new ID; `values` are in the order of COLUMNS."""
        index = bisect_right(self.versions, values[1])
        self.packed.insert(index, packed)
        for column, value in zip(self.columns, values, strict=True):
            column.insert(index, value)

    def find(self, version: int, row_id: int) -> int | None:
        """Return the index of a response; None if it is not stored."""
        begin, end = bisect_left(self.versions, version), bisect_right(self.versions, version)
        index = bisect_left(self.ids, row_id, begin, end)
        return index if index < end and self.ids[index] == row_id else None

    def members(self, group_id: int) -> list[int]:
        """Return the indices of the responses of a group."""
        return np.flatnonzero(np.frombuffer(self.groups, np.int64) == group_id).tolist()


@dataclass(slots=True, eq=False)
class MergedGroup:
    """A merged group that is fresh or of the newest merge.

    Attributes:
        id: ID of its first response.
        version: oldest policy version of its responses at the merge.
        step: step of the merge.
        num_rows, num_unused: number of its stored responses, and of those that were never drawn.
        is_fresh: whether the group waits to be drawn.
        is_trained: whether a response was drawn.
    """

    id: int
    prompt_id: int
    version: int
    step: int
    num_rows: int
    num_unused: int
    is_fresh: bool = True
    is_trained: bool = False
