# SPDX-License-Identifier: Apache-2.0
r"""The contents of the last \boxed{...} of a text."""

_BOXED = "\\boxed{"


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
