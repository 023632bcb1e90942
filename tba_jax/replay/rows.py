# SPDX-License-Identifier: Apache-2.0
"""Records of the replay buffer: a stored response, the responses to one prompt, a merged group."""

import dataclasses
from operator import attrgetter
from typing import Optional

from tba_jax.flow.trajectory import Prompt
from tba_jax.replay.config import PROMPT_OVERHEAD_BYTES, RESPONSE_OVERHEAD_BYTES

AGE = attrgetter("version", "id")
"""Sort key of rows and groups, oldest first."""


@dataclasses.dataclass(slots=True, eq=False)
class Row:
    """A stored response.

    Attributes:
        id: number in the order of merges.
        version: oldest policy version of its tokens.
        packed: its trajectory as bytes; empty once the row is removed.
        uses: number of draws that have it.
        group: the group that it was merged with; restored only if still fresh or of the newest
            merge.
    """

    id: int
    prompt_id: int
    version: int
    reward: float
    packed: bytes
    uses: int = 0
    group: Optional["MergedGroup"] = None

    def __lt__(self, other: "Row") -> bool:
        return (self.version, self.id) < (other.version, other.id)

    @property
    def num_bytes(self) -> int:
        """Bytes of the row, including estimated bookkeeping."""
        return len(self.packed) + RESPONSE_OVERHEAD_BYTES


@dataclasses.dataclass(slots=True, eq=False)
class Store:
    """A prompt with its rows, oldest first.

    Attributes:
        place: index of the prompt in the list from which prompts are drawn.
    """

    prompt: Prompt
    place: int
    rows: list[Row] = dataclasses.field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes of the prompt alone, including estimated bookkeeping."""
        return self.prompt.tokens.nbytes + len(self.prompt.text) + PROMPT_OVERHEAD_BYTES


@dataclasses.dataclass(slots=True, eq=False)
class MergedGroup:
    """The stored rows of one merged group, by ID.

    Attributes:
        id: ID of its first response.
        version: oldest policy version of its responses at the merge.
        is_fresh: whether the group waits to be drawn.
        is_trained: whether a row was drawn while the group was fresh.
    """

    id: int
    prompt_id: int
    version: int
    is_fresh: bool = True
    is_trained: bool = False
    rows: list[Row] = dataclasses.field(default_factory=list)

    @property
    def num_unused(self) -> int:
        """Number of rows that were never drawn."""
        return sum(not row.uses for row in self.rows)
