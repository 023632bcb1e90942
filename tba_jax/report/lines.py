# SPDX-License-Identifier: Apache-2.0
"""Checks of the lines of metrics.jsonl and schedule.jsonl.

A damaged line is often still valid JSON. Fields that no reader uses may have any value.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_NUMBERS = (int, float, type(None))
_LOSS = "train/loss"  # every line of a training step has it
_NUMBERS_OF_JSON = {int, float, bool, type(None)}

# Types of event fields. Fields whose names end in _s are times.
_EVENT_FIELDS: dict[str, type] = {
    "event": str,
    **dict.fromkeys(("step", "version", "searcher", "round", "chunk", "merge_step"), int),
    **{"log": str, "num_bytes": int, "found_bytes": int},
    **dict.fromkeys(("prompt_ids", "trajectory_ids", "weights", "bucket", "tickets"), list),
    "rejected": dict,
    "begins": bool,
}
# Fields that an event must have.
_REQUIRED = {
    "sync": ("step", "version"),
    "eval": ("step",),
    "round": ("searcher", "round", "version"),
    "chunk": ("searcher", "chunk", "version", "tickets", "begins"),
    "step": ("step", "trajectory_ids", "weights", "bucket"),
    "lost": ("step", "log", "num_bytes", "found_bytes"),
}


def wrong_metrics(record: Mapping[str, Any]) -> str:
    """Return the error in a line of metrics.jsonl; "" without one."""
    names = tuple(record)
    pick, others = _layout(names)
    if _NUMBERS_OF_JSON.issuperset(map(type, pick(record))):  # true for nearly every line
        record = {name: record[name] for name in others}
    if _lacks_loss(names):
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


@functools.lru_cache(maxsize=256)  # A run writes few kinds of lines.
def _layout(names: tuple[str, ...]) -> tuple[Callable[[Mapping[str, Any]], Any], tuple[str, ...]]:
    """Return a getter of a line's number fields, and the names of its other fields."""
    others = [x for x in names if x in ("step", "eval/metric") or x.endswith("_histogram")]
    return _picker([x for x in names if x not in others]), tuple(others)


@functools.lru_cache(maxsize=256)
def _event_layout(
    names: tuple[str, ...],
) -> tuple[Callable[[Mapping[str, Any]], Any], tuple[str, ...]]:
    """Return a getter of an event's time fields, and the names of its other checked fields."""
    others = tuple(x for x in names if x in _EVENT_FIELDS)
    return _picker([x for x in names if x.endswith("_s")]), others


@functools.lru_cache(maxsize=256)
def _lacks_loss(names: tuple[str, ...]) -> bool:
    """Return whether a line with these names has training metrics without the loss."""
    return _LOSS not in names and any(name.startswith("train/") for name in names)


def _picker(names: Sequence[str]) -> Callable[[Mapping[str, Any]], Any]:
    if len(names) > 1:
        return operator.itemgetter(*names)
    # itemgetter with one name returns no tuple.
    return lambda record: [record[name] for name in names]


def wrong_event(record: Mapping[str, Any]) -> str:
    """Return the error in a line of schedule.jsonl; "" without one."""
    event = record.get("event")
    if not isinstance(event, str) or event not in _REQUIRED:
        return f"'event' is {event!r:.40}"
    for name in _REQUIRED[event]:
        if name not in record:
            return f"has no {name!r}"
    pick, others = _event_layout(tuple(record))
    if _NUMBERS_OF_JSON.issuperset(map(type, pick(record))):  # true for nearly every line
        record = {name: record[name] for name in others}
    for name, value in record.items():
        if name.endswith("_s"):
            is_right = isinstance(value, _NUMBERS)
        elif name in ("tickets", "prompt_ids", "bucket"):
            is_right = isinstance(value, list) and _are_numbers(value)
        else:
            is_right = isinstance(value, _EVENT_FIELDS.get(name, object))
        if not is_right:
            return f"{name!r} is {value!r:.40}"
    return ""


def _are_numbers(values: list[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values)
