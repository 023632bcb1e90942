# SPDX-License-Identifier: Apache-2.0
"""Callbacks of `run_training`: they return numbers to log, and an error does not end the run."""

import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tba_jax.settings import ConfigError


class Callbacks:
    """Functions of (step, values) that return a dict of numbers by name, or None.

    Raises:
        ConfigError: a function does not take these arguments.
    """

    def __init__(
        self, functions: Sequence[Callable[..., Any]], note: Callable[[str], None]
    ) -> None:
        self._note, self._functions = note, [*functions]
        for function in functions:
            try:
                inspect.signature(function).bind("step", "values")
            except TypeError as error:
                raise ConfigError(
                    f"callbacks: the run calls {_name(function)} with (step, values): {error}. "
                    f"Write def {_name(function)}(step, values)"
                ) from error
            except ValueError:
                pass  # some built-in functions have no signature
        self._noted: set[str] = set()

    def __call__(self, step: int, values: Mapping[str, Any]) -> dict[str, float]:
        """Return the numbers of all functions; a function that fails is not called again."""
        kept: dict[str, float] = {}
        for function in [*self._functions]:
            name = _name(function)
            try:
                found = function(step, values)
                found = {} if found is None else found
                if not isinstance(found, Mapping):
                    raise TypeError(f"returned {found!r:.60}, wanted numbers by name, or None")
                for key, value in found.items():
                    value = value.item() if hasattr(value, "item") else value
                    if isinstance(value, numbers.Real) and math.isfinite(value):
                        kept[str(key)] = float(value)
                    elif f"{name} {key}" not in self._noted:
                        self._noted.add(f"{name} {key}")
                        self._note(
                            f"callback {name} returned {value!r:.60} as {key!r}, which is left "
                            "out: wanted a finite number"
                        )
            except Exception as error:  # the traceback of the user's code shows the place
                self._functions.remove(function)
                where = "".join(traceback.format_exception(error)).rstrip()
                self._note(
                    f"callback {name} raised {type(error).__name__}: {error}. The run continues "
                    f"without this function\n{where}"
                )
        return kept


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__).rpartition(".")[2]
