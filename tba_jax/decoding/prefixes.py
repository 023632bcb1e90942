# SPDX-License-Identifier: Apache-2.0
"""Index of a prefix cache: which row holds the keys, values or states of which conversation.

When a turn ends, its caches stay in a row. The prompt of the next turn begins with the same tokens
and uses the row. Equal conversations share a row. The least recently written row is evicted.
Invariant: which row is used depends only on the order of the calls, so a replay uses the same rows.
"""

from typing import NamedTuple

import numpy as np


class Kept(NamedTuple):
    """A row of the prefix cache that holds a conversation.

    Attributes:
        row: index of the row.
        length: number of tokens in the row.
    """

    row: int
    length: int


class PrefixRows:
    """Tokens of the conversations in the rows of a prefix cache.

    Args:
        num_rows: number of rows, possibly 0.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.clear()

    def put(self, tokens: np.ndarray, num: int = 1) -> int:
        """Return a row for a conversation; evict the least recently written row if none is free.

        Args:
            tokens: tokens of the conversation.
            num: number of equal conversations that will wait for the row.
        """
        key = tokens.astype(np.int32).tobytes()
        row, waiting = self._rows.pop(key, (None, 0))
        if row is None:
            if not self._free:
                self._free.append(self._rows.pop(next(iter(self._rows)))[0])
            row = self._free.pop()
        self._rows[key] = row, waiting + num
        return row

    def find(self, prompt: np.ndarray) -> Kept | None:
        """Return the row with the longest proper prefix of a prompt; None: there is no such row."""
        if not self._rows:
            return None
        text = prompt.astype(np.int32).tobytes()
        found = [k for k in self._rows if len(k) < len(text) and text.startswith(k)]
        if not found:
            return None
        longest = max(found, key=len)
        return Kept(self._rows[longest][0], len(longest) // np.dtype(np.int32).itemsize)

    def drop(self, tokens: np.ndarray) -> None:
        """Free the row of a conversation, unless another equal conversation waits for it."""
        key = tokens.astype(np.int32).tobytes()
        row, waiting = self._rows.get(key, (0, 0))
        if waiting > 1:
            self._rows[key] = row, waiting - 1
        elif waiting:
            del self._rows[key]
            self._free.append(row)

    def clear(self) -> None:
        """Free all rows."""
        # By the int32 tokens, the oldest first: (row, conversations that wait with these tokens).
        self._rows: dict[bytes, tuple[int, int]] = {}
        self._free = list(range(self.num_rows))
