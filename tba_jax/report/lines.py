# SPDX-License-Identifier: Apache-2.0
"""Checks of metrics.jsonl, report.json and config.json for what the page reads.

A damaged file is often still valid JSON. Fields that no reader uses may have any value.
"""

from collections.abc import Mapping
from typing import Any

_NUMBERS = (int, float, type(None))
_HUGE = 1e18  # no number of a report is that large
_LOSS = "train/loss"  # every line of a training step has it

# Types of the fields of report.json that the page reads: a dictionary has a type for each field, or
# one for all as "*". Values may be null, except those of `_NEEDED`.
_NUMBER = (int, float)
_EVALUATION = {"n": int, "kind_share": _NUMBER, "response_length_mean": _NUMBER}
_SAMPLE = {
    **dict.fromkeys(("prompt", "before", "after"), str),
    **dict.fromkeys(("before_reward", "after_reward"), _NUMBER),
}
_REPORT = {
    **dict.fromkeys(("driver", "hardware"), str),
    "steps": int,
    **dict.fromkeys(("wall_s", "time_to_first_step_s"), _NUMBER),
    "tokens_per_s": {"*": _NUMBER},
    "staleness": {"*": _NUMBER},
    "sync": {"*": _NUMBER},
    "skipped_prompts": {"*": int},
    "eval": {"before": _EVALUATION, "after": _EVALUATION},
    "ledger": {"rejected": {"*": int}, "*": int},
    "economy": {"warnings": [str], "*": _NUMBER},
    "kinds": [str],
    "samples": [_SAMPLE],
    "config_changes": [str],
    "fleet": {
        "by_searcher": [{"host": str, "state": str, "*": _NUMBER}],
        "*": _NUMBER,
    },
}
_CONFIG = {
    **dict.fromkeys(("num_steps", "eval.num_samples"), int),
    "eval.temperature": _NUMBER,
    "driver": str,
}
# Fields that an object of report.json has, unless it is empty.
_NEEDED = {
    "staleness": ("mean", "p95", "max"),
    "sync": ("count", "mean_s"),
    "economy": ("warnings",),
    "fleet": (
        *("searchers", "slots", "hosts", "searchers_lost", "lost", "duplicates"),
        "by_searcher",
    ),
    "by_searcher": ("searcher", "host", "state", "joins", "groups", "idle_s"),
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


def wrong_report(report: Mapping[str, Any]) -> str:
    """Return the error in the contents of report.json; "" without one."""
    return _wrong(report, _REPORT, "")


def wrong_config(config: Mapping[str, Any]) -> str:
    """Return the error in the fields of a config, by dotted name; "" without one."""
    return _wrong(config, _CONFIG, "")


def _wrong(value: Any, shape: Any, name: str) -> str:
    """Return the error in a JSON value that must have a shape; `name`: its field."""
    if value is None:
        return ""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{name!r} is {value!r:.40}, wanted an object"
        for needed in _NEEDED.get(name, ()) if value else ():
            if value.get(needed) is None:
                return f"{name!r} has no {needed!r}"
        found = (_wrong(x, shape.get(key, shape.get("*", object)), key) for key, x in value.items())
        return next(filter(None, found), "")
    if isinstance(shape, list):
        if not isinstance(value, list) or None in value:
            return f"{name!r} is {value!r:.40}, wanted a list"
        return next(filter(None, (_wrong(x, shape[0], name) for x in value)), "")
    is_right = isinstance(value, shape)
    if shape in (int, _NUMBER):
        is_right = is_right and abs(value) < _HUGE  # also no infinity and no NaN
    return "" if is_right else f"{name!r} is {value!r:.40}"


def _are_numbers(values: list[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values)
