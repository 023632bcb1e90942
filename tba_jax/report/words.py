# SPDX-License-Identifier: Apache-2.0
"""Numbers, metric names and JSON values as text."""

import unicodedata
from collections.abc import Mapping
from typing import Any


def format_duration(seconds: float) -> str:
    """Return a duration such as "0:07", "3:12" or "1:02:05"."""
    total = max(0, round(seconds))
    hours, minutes, rest = total // 3600, total // 60 % 60, total % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_count(number: float) -> str:
    """Return a count in at most three digits with k, M or G, such as "845", "8.1k" or "1.3M"."""
    for unit in ("", "k", "M", "G"):
        if abs(number) < 999.5 or unit == "G":
            break
        number /= 1000
    return f"{number:.1f}{unit}" if unit and abs(number) < 9.95 else f"{number:.0f}{unit}"


def is_share(metric: str) -> bool:
    """Return whether a metric of this name lies in [0, 1] and is shown in percent."""
    return metric.startswith("pass_at_") or metric.endswith(("_rate", "_share"))


def metric_label(metric: str) -> str:
    """Return the usual name of an evaluation metric: "pass@1", "win rate"."""
    return metric.replace("pass_at_", "pass@").replace("_", " ")


def format_metric(metric: str, value: float) -> str:
    """Return an evaluation metric's value as text: shares in percent, else three decimals.

    pass@1 is the mean reward, which other rewards than 0 and 1 may bring out of [0, 1].
    """
    return f"{value:.1%}" if is_share(metric) and 0 <= value <= 1 else f"{value:.3f}"


def held_out(n: int) -> str:
    """Return the number of held-out problems as text."""
    return f"{n} held-out problem{'s' if n != 1 else ''}"


# These characters change the direction of the text around them.
_DIRECTION_MARKS = frozenset(
    "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)


def shown(text: str) -> str:
    """Return a text with control and direction-changing characters escaped.

    Line breaks, tabs and joiners stay; emoji and some scripts need joiners.
    """
    if text.isascii() and text.isprintable():  # such as pictures in base64
        return text
    return "".join(
        char.encode("unicode_escape").decode("ascii")
        if char in _DIRECTION_MARKS
        or (char not in "\n\t" and unicodedata.category(char) in ("Cc", "Cs", "Cn"))
        else char
        for char in text
    )


def plain(value: Any) -> str:
    """Return a JSON value as one readable line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {plain(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(plain(item) for item in value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)
