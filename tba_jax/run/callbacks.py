# SPDX-License-Identifier: Apache-2.0
"""Callbacks of `run_training`: they return numbers to log, and an error does not end the run."""

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tba_jax.settings import ConfigError


def combined(
    functions: Sequence[Callable[..., Any]], note: Callable[[str], None]
) -> Callable[[int, Mapping[str, Any]], dict[str, float]]:
    """Return a function of (step, values) that returns the numbers of all functions by name.

    A function that fails is not called again.

    Args:
        note: shows a line to the user.

    Raises:
        ConfigError: a function does not take these arguments.
    """
    called = list(functions)
    for function in called:
        try:
            inspect.signature(function).bind("step", "values")
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"callbacks: the run calls {_name(function)} with (step, values): {error}. Write "
                f"def {_name(function)}(step, values)"
            ) from error

    def call(step: int, values: Mapping[str, Any]) -> dict[str, float]:
        found: dict[str, float] = {}
        for function in [*called]:
            try:
                numbers = dict(function(step, values) or {})
                found |= {str(name): float(value) for name, value in numbers.items()}
            except Exception as error:  # the traceback shows the place in the user's code
                called.remove(function)
                where = "".join(traceback.format_exception(error)).rstrip()
                note(
                    f"callback {_name(function)} raised {type(error).__name__}: {error}. The run "
                    "continues without this function. Return numbers by name, or None\n" + where
                )
        return found

    return call


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
