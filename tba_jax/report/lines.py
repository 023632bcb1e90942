# SPDX-License-Identifier: Apache-2.0
"""Checks of the lines of metrics.jsonl and schedule.jsonl.

A damaged line is often still valid JSON. Fields that no reader uses may have any value.
"""

from collections.abc import Mapping
from typing import Any

_NUMBERS = (int, float, type(None))
_LOSS = "train/loss"  # every line of a training step has it

# Types of event fields. Fields whose names end in _s are times.
_EVENT_FIELDS: dict[str, type] = {
    "event": str,
    **dict.fromkeys(("step", "version", "searcher", "round", "merge_step"), int),
    **{"log": str, "num_bytes": int, "found_bytes": int},
    **dict.fromkeys(("prompt_ids", "trajectory_ids", "weights", "bucket"), list),
    "rejected": dict,
}
# Fields that an event must have.
_REQUIRED = {
    "sync": ("step", "version"),
    "eval": ("step",),
    "round": ("searcher", "round", "version"),
    "step": ("step", "trajectory_ids", "weights", "bucket"),
    "lost": ("step", "log", "num_bytes", "found_bytes"),
}


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


def wrong_event(record: Mapping[str, Any]) -> str:
    """Return the error in a line of schedule.jsonl; "" without one."""
    event = record.get("event")
    if not isinstance(event, str) or event not in _REQUIRED:
        return f"'event' is {event!r:.40}"
    for name in _REQUIRED[event]:
        if name not in record:
            return f"has no {name!r}"
    for name, value in record.items():
        if name.endswith("_s"):
            is_right = isinstance(value, _NUMBERS)
        elif name in ("prompt_ids", "bucket"):
            is_right = isinstance(value, list) and _are_numbers(value)
        else:
            is_right = isinstance(value, _EVENT_FIELDS.get(name, object))
        if not is_right:
            return f"{name!r} is {value!r:.40}"
    return ""


def _are_numbers(values: list[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values)
