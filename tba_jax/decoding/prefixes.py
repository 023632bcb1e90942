# SPDX-License-Identifier: Apache-2.0
"""Which conversations have keys and values, or states, in the rows of a prefix cache.

A turn that ends leaves its caches in a row. The next turn of the conversation begins with its
tokens and takes the row. Equal conversations share a row. The least recently written row is
evicted. Invariant: the rows taken
depend only on the order of the calls, so a replayed schedule takes the same rows.
"""

from typing import NamedTuple

import numpy as np


class Kept(NamedTuple):
    """A kept row.

    Attributes:
        row: its number.
        length: tokens in it.
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
        """Return the row for `num` equal conversations; evict the oldest one if no row is free."""
        key = tokens.astype(np.int32).tobytes()
        row, waiting = self._rows.pop(key, (None, 0))
        if row is None:
            if not self._free:
                self._free.append(self._rows.pop(next(iter(self._rows)))[0])
            row = self._free.pop()
        self._rows[key] = row, waiting + num
        return row

    def find(self, prompt: np.ndarray) -> Kept | None:
        """Return the row with the most first tokens of a prompt, not all of them; None: no row."""
        if not self._rows:
            return None
        text = prompt.astype(np.int32).tobytes()
        found = [k for k in self._rows if len(k) < len(text) and text.startswith(k)]
        if not found:
            return None
        longest = max(found, key=len)
        return Kept(self._rows[longest][0], len(longest) // np.dtype(np.int32).itemsize)

    def drop(self, tokens: np.ndarray) -> None:
        """Free the row of a conversation, if it has one and no equal conversation waits."""
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
