# SPDX-License-Identifier: Apache-2.0
"""Texts of prompts and responses, which reward functions receive as texts or chat messages.

Reward processes import this module, so it imports only the standard library.
"""

from collections.abc import Mapping, Sequence

_BOXED = "\\boxed{"

Content = str | Sequence[Mapping[str, str]]


def text_of(content: Content) -> str:
    """Return a text unchanged; for chat messages, return the content of the last message.

    text_of([{"role": "assistant", "content": "4"}]) == text_of("4") == "4"
    """
    return content if isinstance(content, str) else content[-1]["content"]


def last_boxed(text: str) -> str | None:
    r"""Return the contents of the last \boxed{...} with balanced braces; None without one.

    last_boxed(r"so \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    """
    end = len(text)
    while (start := text.rfind(_BOXED, 0, end)) >= 0:
        depth = 0
        for i in range(start + len(_BOXED) - 1, len(text)):
            depth += (text[i] == "{") - (text[i] == "}")
            if depth == 0:
                return text[start + len(_BOXED) : i]
        end = start
    return None
