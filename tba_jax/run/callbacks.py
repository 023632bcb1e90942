# SPDX-License-Identifier: Apache-2.0
"""Callbacks of `run_training`: they return numbers to log, and an error does not end the run."""

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tba_jax.settings import ConfigError


class Callbacks:
    """Functions of (step, values) that return a dict of numbers by name, or None.

    Args:
        note: shows a line to the user.

    Raises:
        ConfigError: a function does not take these arguments.
    """

    def __init__(
        self, functions: Sequence[Callable[..., Any]], note: Callable[[str], None]
    ) -> None:
        self._functions, self._note = [*functions], note
        for function in functions:
            try:
                inspect.signature(function).bind("step", "values")
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"callbacks: the run calls {_name(function)} with (step, values): {error}. "
                    f"Write def {_name(function)}(step, values)"
                ) from error

    def __call__(self, step: int, values: Mapping[str, Any]) -> dict[str, float]:
        """Return the numbers of all functions; a function that fails is not called again."""
        found: dict[str, float] = {}
        for function in [*self._functions]:
            try:
                numbers = dict(function(step, values) or {})
                found |= {str(name): float(value) for name, value in numbers.items()}
            except Exception as error:  # the traceback shows the place in the user's code
                self._functions.remove(function)
                where = "".join(traceback.format_exception(error)).rstrip()
                self._note(
                    f"callback {_name(function)} raised {type(error).__name__}: {error}. The run "
                    "continues without this function. Return numbers by name, or None\n" + where
                )
        return found


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__).rpartition(".")[2]
