# SPDX-License-Identifier: Apache-2.0
"""Values of a config.json: refused by name where they are no size, number or kind that they can be.

It does not know what the settings mean. Invariant: what passes here can be computed with; nothing
was allocated for it yet.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

# Above any model there is, and below what could not even be listed: mistakes end here.
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
    """Settings that are texts, lists or objects are that, or null.

    Raises:
        ValueError: naming the setting and its value.
    """
    for name, (kind, words) in _KINDS.items():
        value = hf_config.get(name)
        if value is not None and not isinstance(value, kind):
            raise _wrong(name, value, words)
        if isinstance(value, list) and not all(isinstance(item, str) for item in value):
            raise _wrong(name, value, "a list of texts")


def check_sizes(values: Mapping[str, Any], settings: Mapping[str, str]) -> None:
    """Sizes are whole numbers above 0.

    Args:
        values: contents of config.json.
        settings: what a size is for us -> the setting that has it; those that are absent pass.

    Raises:
        ValueError: naming the setting and its value.
    """
    for ours, name in settings.items():
        if name not in values:
            continue
        value, most = values[name], LARGEST.get(ours, _LARGEST_SIZE)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise _wrong(name, value, f"a whole number from 1 to {most:,}")


def check_numbers(values: Mapping[str, Any], names: Iterable[str]) -> None:
    """Numbers are finite and above 0, those that are there.

    Raises:
        ValueError: naming the setting and its value.
    """
    for name in names:
        if name in values:
            number(name, values[name])


def number(name: str, value: Any, *, least: float = 0.0) -> float:
    """A finite number above `least`.

    Raises:
        ValueError: it is not; naming the setting and its value.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= least:
        raise _wrong(name, value, f"a number above {least:g}")
    return float(value)


def check_flags(values: Mapping[str, Any], names: Iterable[str]) -> None:
    """Settings that are yes or no are true or false.

    Raises:
        ValueError: naming the setting and its value.
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
