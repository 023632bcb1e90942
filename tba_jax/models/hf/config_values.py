# SPDX-License-Identifier: Apache-2.0
"""Checks of sizes, numbers and types in a config.json; an invalid value is refused by name.

Invariant: accepted values are usable in computations, and are checked before memory is allocated.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

# Upper bounds far above any model, so that mistakes are refused before memory is allocated.
LARGEST = {"num_layers": 10_000, "num_positions": 2**31 - 1, "max_positions": 2**31 - 1}
_LARGEST_SIZE = 2**24

_KINDS: Mapping[str, tuple[type, str]] = {
    "model_type": (str, "text"),
    "hidden_act": (str, "text"),
    "activation_function": (str, "text"),
    "architectures": (list, "a list"),
    "layer_types": (list, "a list"),
    "quantization_config": (dict, "an object"),
    "rope_scaling": (dict, "an object"),
    "rope_parameters": (dict, "an object"),
    "id2label": (dict, "an object"),
}


def check_kinds(hf_config: Mapping[str, Any]) -> None:
    """Check that texts, lists and objects have their type, or are null.

    Raises:
        ValueError: names the setting and its value.
    """
    for name, (kind, words) in _KINDS.items():
        value = hf_config.get(name)
        if value is not None and not isinstance(value, kind):
            raise _wrong(name, value, words)
        if isinstance(value, list) and not all(isinstance(item, str) for item in value):
            raise _wrong(name, value, "a list of texts")


def check_sizes(values: Mapping[str, Any], settings: Mapping[str, str]) -> None:
    """Check that sizes are whole numbers above 0.

    Args:
        values: contents of config.json.
        settings: size in TransformerConfig -> setting in config.json, which may be missing.

    Raises:
        ValueError: names the setting and its value.
    """
    for ours, name in settings.items():
        if name not in values:
            continue
        value, most = values[name], LARGEST.get(ours, _LARGEST_SIZE)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise _wrong(name, value, f"a whole number from 1 to {most:,}")


def check_numbers(values: Mapping[str, Any], names: Iterable[str]) -> None:
    """Check that the numbers that are present are finite and above 0.

    Raises:
        ValueError: names the setting and its value.
    """
    for name in names:
        if name in values:
            number(name, values[name])


def number(name: str, value: Any, *, least: float = 0.0) -> float:
    """Return a finite number above `least`.

    Raises:
        ValueError: the value is not such a number; names setting and value.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= least:
        raise _wrong(name, value, f"a number above {least:g}")
    return float(value)


def check_flags(values: Mapping[str, Any], names: Iterable[str]) -> None:
    """Check that booleans are true or false.

    Raises:
        ValueError: names the setting and its value.
    """
    for name in names:
        if name in values and not isinstance(values[name], bool):
            raise _wrong(name, values[name], "true or false")


def _wrong(name: str, value: Any, wanted: str) -> ValueError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:60] + "..."
    return ValueError(
        f"config.json has {name} = {shown}; wanted {wanted}. Correct it, or download the file again"
    )
