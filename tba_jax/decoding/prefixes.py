# SPDX-License-Identifier: Apache-2.0
"""Index of a prefix cache: which row holds the keys, values or states of which conversation.

When a turn ends, its caches stay in a row. The prompt of the next turn begins with the same tokens,
reads the row and frees it. Invariant: which row is used depends only on the order of the calls.
"""

from typing import NamedTuple

import numpy as np


class Kept(NamedTuple):
    """A row of the prefix cache, and the number of tokens of its conversation."""

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

    def put(self, tokens: np.ndarray) -> int:
        """Return the row for a conversation: a free one, or the least recently written one."""
        row = self._free.pop() if self._free else next(iter(self._rows))
        self._rows.pop(row, None)
        self._rows[row] = _bytes(tokens)
        return row

    def find(self, prompt: np.ndarray) -> Kept | None:
        """Return the row with the longest proper prefix of a prompt; None: there is no such row."""
        text = _bytes(prompt) if self._rows else b""
        found = [x for x in self._rows.items() if len(x[1]) < len(text) and text.startswith(x[1])]
        if not found:
            return None
        row, longest = max(found, key=lambda x: len(x[1]))
        return Kept(row, len(longest) // np.dtype(np.int32).itemsize)

    def drop(self, tokens: np.ndarray) -> None:
        """Free a row of a conversation, if there is one."""
        text = _bytes(tokens)
        row = next((row for row, kept in self._rows.items() if kept == text), None)
        if row is not None:
            del self._rows[row]
            self._free.append(row)

    def clear(self) -> None:
        """Free all rows."""
        self._rows: dict[int, bytes] = {}  # the least recently written first
        self._free = list(range(self.num_rows))


def _bytes(tokens: np.ndarray) -> bytes:
    return tokens.astype(np.int32).tobytes()
