# SPDX-License-Identifier: Apache-2.0
"""Index of a prefix cache: which row holds the keys, values or states of which conversation.

When a turn ends, its caches stay in a row. The prompt of the next turn begins with the same tokens,
reads the row and frees it. Invariant: which row is used depends only on the order of the calls.
"""

import numpy as np


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
        row = next(iter(self._rows))
        del self._rows[row]
        self._rows[row] = _bytes(tokens)
        return row

    def find(self, prompt: np.ndarray) -> tuple[int, int]:
        """Return the row with the longest proper prefix of a prompt, and the prefix's length.

        The length is 0 if there is no such row.
        """
        text = _bytes(prompt)
        found = [x for x in self._rows.items() if len(x[1]) < len(text) and text.startswith(x[1])]
        row, longest = max(found, key=lambda x: len(x[1]), default=(0, b""))
        return row, len(longest) // np.dtype(np.int32).itemsize

    def drop(self, tokens: np.ndarray) -> None:
        """Free a row of a conversation, if there is one."""
        text = _bytes(tokens)
        row = next((row for row, kept in self._rows.items() if kept == text), None)
        if row is not None:
            self._rows = {row: b"", **{i: x for i, x in self._rows.items() if i != row}}

    def clear(self) -> None:
        """Free all rows."""
        # Free rows have no bytes and come first; then the least recently written row.
        self._rows = dict.fromkeys(range(self.num_rows), b"")


def _bytes(tokens: np.ndarray) -> bytes:
    return tokens.astype(np.int32).tobytes()
