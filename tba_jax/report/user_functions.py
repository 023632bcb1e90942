# SPDX-License-Identifier: Apache-2.0
"""Functions in users' files that return numbers to log; an error in one does not end a run."""

import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from tba_jax.settings import ConfigError, load_function


class UserFunctions:
    """Functions of the user; each returns a dict of numbers by name, or None.

    Args:
        field: setting with the names of the functions, separated by commas.
        arguments: names of the functions' arguments.

    Raises:
        ConfigError: a function cannot be loaded, or does not take these arguments.
    """

    def __init__(
        self, field: str, names: str, arguments: tuple[str, ...], note: Callable[[str], None]
    ) -> None:
        self._field, self._note = field, note
        self._functions = {
            name: load_function(field, name) for name in map(str.strip, names.split(",")) if name
        }
        for name, function in self._functions.items():
            try:
                inspect.signature(function).bind(*arguments)
            except TypeError as error:
                raise ConfigError(
                    f"{field}={name}: the run calls it with ({', '.join(arguments)}): {error}. "
                    f"Write def {name.rpartition(':')[2]}({', '.join(arguments)})"
                ) from error
            except ValueError:
                pass  # some built-in functions have no signature
        self._told: set[str] = set()

    def __call__(self, *arguments: Any) -> dict[str, float]:
        """Return the numbers of all functions; a function that fails is not called again."""
        numbers_found: dict[str, float] = {}
        for name, function in [*self._functions.items()]:
            try:
                found = function(*arguments)
                numbers_found |= self._numbers(name, {} if found is None else found)
            except Exception as error:  # the traceback of the user's code shows the place
                del self._functions[name]
                where = "".join(traceback.format_exception(error)).rstrip()
                self._note(
                    f"{self._field}={name} raised {type(error).__name__}: {error}. The run "
                    f"continues without this function\n{where}"
                )
        return numbers_found

    def _numbers(self, name: str, found: Any) -> dict[str, float]:
        """Return the finite numbers of `found`; print a line once for each other value."""
        if not isinstance(found, Mapping):
            raise TypeError(f"returned {found!r:.60}, wanted numbers by name, or None")
        kept = {}
        for key, value in found.items():
            value = value.item() if hasattr(value, "item") else value
            if isinstance(value, numbers.Real) and math.isfinite(value):
                kept[str(key)] = float(value)
            elif (said := f"{name} {key}") not in self._told:
                self._told.add(said)
                self._note(
                    f"{self._field}={name} returned {value!r:.60} as {key!r}, which is left out: "
                    "wanted a finite number"
                )
        return kept
