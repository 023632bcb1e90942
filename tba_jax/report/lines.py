# SPDX-License-Identifier: Apache-2.0
"""Checks of the lines of metrics.jsonl.

A damaged line is often still valid JSON. Fields that no reader uses may have any value.
"""

from collections.abc import Mapping
from typing import Any

_NUMBERS = (int, float, type(None))
_LOSS = "train/loss"  # every line of a training step has it


def wrong_metrics(record: Mapping[str, Any]) -> str:
    """Return the error in a line of metrics.jsonl; "" without one."""
    if _LOSS not in record and any(name.startswith("train/") for name in record):
        return f"has training metrics, but no {_LOSS!r}"
    for name, value in {"step": None, **record}.items():
        if name.endswith("_histogram"):
            is_right = isinstance(value, list) and all(
                isinstance(pair, list) and len(pair) == 2 and _are_numbers(pair) for pair in value
            )
        elif name == "eval/metric":
            is_right = isinstance(value, str)
        elif name == "step":
            is_right = isinstance(value, int)
        else:
            is_right = isinstance(value, _NUMBERS)
        if not is_right:
            return f"{name!r} is {value!r:.40}"
    return ""


def _are_numbers(values: list[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values)
