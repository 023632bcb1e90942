# SPDX-License-Identifier: Apache-2.0
"""Prompts and responses as reward functions get them: texts, or lists of chat messages.

It imports only the standard library, because reward processes import it.
"""

from collections.abc import Mapping, Sequence

Content = str | Sequence[Mapping[str, str]]


def text_of(content: Content) -> str:
    """A text itself; of chat messages what the last one says.

    text_of([{"role": "assistant", "content": "4"}]) == text_of("4") == "4"
    """
    return content if isinstance(content, str) else content[-1]["content"]
