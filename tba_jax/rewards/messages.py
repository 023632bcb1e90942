# SPDX-License-Identifier: Apache-2.0
"""Prompts and responses in the form that reward functions receive: texts or chat messages.

Reward processes import this module, so it imports only the standard library.
"""

from collections.abc import Mapping, Sequence

Content = str | Sequence[Mapping[str, str]]


def text_of(content: Content) -> str:
    """Return a text unchanged; for chat messages, return the content of the last message.

    text_of([{"role": "assistant", "content": "4"}]) == text_of("4") == "4"
    """
    return content if isinstance(content, str) else content[-1]["content"]
