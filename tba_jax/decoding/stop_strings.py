# SPDX-License-Identifier: Apache-2.0
"""Detection of stop strings: the number of tokens after which a response's text contains one.

Invariant: the result is the same as if the whole text were decoded after every token, whatever the
number of tokens per call.
"""

from collections.abc import Callable, Sequence

import numpy as np

# A suffix of a response may begin inside a character, or with a space that its tokenizer drops.
_SLACK = 8


class StopStrings:
    """The strings that end a response.

    Args:
        strings: one or more texts that are not empty.
        decode: function token ids -> text. Further tokens do not change the text of earlier tokens,
            except an unfinished character at its end.
    """

    def __init__(
        self, strings: Sequence[str], decode: Callable[[Sequence[int] | np.ndarray], str]
    ) -> None:
        self.strings = tuple(strings)
        self._decode = decode
        self._reach = max(map(len, self.strings)) + _SLACK

    def end(self, tokens: np.ndarray, num_read: int) -> int:
        """Return the number of tokens after which the text contains a stop string; 0 if none does.

        Args:
            tokens: int32 [t], the response so far.
            num_read: length of a prefix whose text is known to contain no stop string.
        """
        # Decode only a suffix: strings that the new tokens could complete begin in their text or
        # at most `_reach` characters before.
        size, read = self._reach, tokens[:num_read]
        while size < num_read and len(self._decode(read[-size:])) < self._reach:
            size *= 2
        if not self._is_in(tokens[max(0, num_read - size) :]):
            return 0
        ends = range(num_read + 1, len(tokens) + 1)
        return next((end for end in ends if self._is_in(tokens[:end])), 0)

    def _is_in(self, tokens: np.ndarray) -> bool:
        text = self._decode(tokens)
        return any(string in text for string in self.strings)
