# SPDX-License-Identifier: Apache-2.0
"""Loads a user's reward function and calls it as TRL does, in a reward worker.

A function is named "package.module:function" or "path/to/file.py:function". It receives, as lists,
those of `prompts`, `completions`, `completion_ids` and the columns of the data that its signature
accepts, and TRL's `log_metric`. It returns one float or None per completion. This module imports
neither jax nor transformers. Invariant: whatever the function does, the caller gets an Outcome and
no exception.
"""

import asyncio
import functools
import importlib
import inspect
import numbers
import os
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tba_jax import settings
from tba_jax.settings import GIVEN, import_file
from tba_jax.workers import Exchange, Handler

UNUSABLE = "unusable"
# Arguments that every function can take besides the columns.
_STANDARD = ("prompts", "completions", "completion_ids", "log_metric")
# Arguments of TRL that are not passed, and what to do instead.
_REFUSED = {
    "environments": "objects of environments are in other processes. Give the class a method "
    "get_reward(): its value is added to the rewards of task.reward",
    "trainer_state": "reward processes do not see the trainer. Leave the argument out",
    "log_extra": "no table of completions is logged. Leave the argument out, or use log_metric",
}
_LARGEST = float(np.finfo(np.float32).max)  # rewards are float32
_MOST_TEXT = 4000  # characters of a traceback: an exception may carry megabytes


class Missing(NamedTuple):
    """Failure that a function may return instead of a reward: its name and description."""

    reason: str
    text: str


class Outcome(NamedTuple):
    """Result of one call of a reward function; it can be written as JSON.

    Attributes:
        rewards: a finite number per completion, or None; empty if the call failed.
        reasons: name of the failure of each completion without a reward, else None.
        text: description of the first failure, such as the traceback of the function's error.
        failure: name of the failure of the call; `UNUSABLE` if no call can succeed.
        metrics: mean of the values that the function gave `log_metric`, by name.
    """

    rewards: Sequence[float | None]
    reasons: Sequence[str | None]
    text: str = ""
    failure: str = ""
    metrics: Mapping[str, float] = {}


class _Function(NamedTuple):
    """A loaded function and the keywords that it accepts; `accepted` None: every keyword."""

    call: Callable[..., Any]
    accepted: frozenset[str] | None
    required: tuple[str, ...]


def split_functions(text: str) -> tuple[str, ...]:
    """Return the function names of a config field, which separates names by commas.

    Raises:
        ValueError: a name does not have the form module:function or file.py:function.
    """
    functions = tuple(part.strip() for part in text.split(","))
    for function in functions:
        module, _, name = function.rpartition(":")
        if not module or not name or (":" in module and not module.endswith(".py")):
            raise ValueError(
                f"reward function {function!r}: want package.module:function or "
                "path/to/file.py:function, for example tba_jax.rewards.numeric:gsm8k_reward"
            )
    return functions


def part_names(functions: Sequence[str]) -> tuple[str, ...]:
    """Return short names of functions: the part after the colon if it is unique, else the name.

    part_names(["a:f", "b:g", "c:g"]) == ("f", "b:g", "c:g")
    """
    short = [function.rpartition(":")[2] for function in functions]
    return tuple(
        name if short.count(name) == 1 else function
        for name, function in zip(short, functions, strict=True)
    )


@functools.cache
def _load(function: str) -> _Function:
    """Import the function with this name.

    Raises:
        AttributeError, TypeError: there is no such function. The import may raise any exception.
    """
    module, _, name = function.rpartition(":")
    target: Any = GIVEN.get(function)
    if target is None:
        target = import_file(module) if module.endswith(".py") else importlib.import_module(module)
        for part in name.split("."):
            if not hasattr(target, part):
                raise AttributeError(f"there is no {name!r} in {module}")
            target = getattr(target, part)
    if isinstance(target, type):
        target = target()  # a class whose instances are the function
    if not callable(target):
        raise TypeError(f"{function} is a {type(target).__name__}, not a function")
    try:
        parameters = inspect.signature(target).parameters.values()
    except ValueError:  # some built-in functions have no signature
        return _Function(target, None, ())
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    accepted = None if takes_all else frozenset(p.name for p in named)
    return _Function(target, accepted, tuple(p.name for p in named if p.default is p.empty))


def make_handler(functions: Sequence[str]) -> Handler:
    """Return the handler of a reward worker; it imports the functions' modules now.

    A message is (function of this module, *arguments); a failed import is reported by `load_error`.
    """
    _load.cache_clear()  # a notebook may define another function of the same name
    for function in functions:
        load_error(function, None)

    async def handle(exchange: Exchange, message: Any) -> None:
        exchange.answer(await run(*message))

    return handle


async def run(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of this module, which may be a coroutine function."""
    result = function(*arguments)
    return await result if inspect.isawaitable(result) else result


def load_error(function: str, columns: Collection[str] | None) -> str:
    """Return why a function cannot be used; "" if it can be used.

    Args:
        columns: names of the data's columns; None: unknown, so arguments of the function are not
            checked.
    """
    subject = f"reward function {function!r}"
    try:
        required = _load(function).required
    except BaseException as error:  # users' code may even call sys.exit()
        return f"{subject} cannot be loaded: {_why(function, error)}"
    own = {*(columns or ())} - {"prompt"}
    for name in required if columns is not None else ():
        if name in _REFUSED:
            return f"{subject} needs TRL's argument {name!r}: {_REFUSED[name]}"
        if name not in _STANDARD and name not in own:
            return (
                f"{subject} needs the argument {name!r}, but the data has no such column. Its "
                f"columns are: {', '.join(sorted(own)) or 'none'}"
            )
    return ""


def _why(function: str, error: BaseException) -> str:
    """Return why a function cannot be loaded."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        missing = error.name.partition(".")[0]
        if missing != function.partition(":")[0].partition(".")[0]:
            return f"it needs {missing!r}, which is not installed"
    elif isinstance(error, ImportError):
        return str(error)
    *where, reason = report_of(error).rstrip().splitlines()
    advice = f"Want package.module:function importable from {os.getcwd()} or the environment, or "
    return "\n".join([f"{reason}. {advice}path/to/file.py:function", *where])


async def score_chunk(function: str, columns: Mapping[str, Sequence[Any]]) -> Outcome:
    """Call the function once.

    Args:
        columns: `prompts` and `completions`, which are texts or lists of chat messages, and further
            arguments; those that the function does not take are left out.
    """
    logged: dict[str, list[float]] = {}

    def log_metric(name: str, value: Any) -> None:
        logged.setdefault(str(name), []).append(float(value))

    try:
        call, accepted, _ = _load(function)
        offered = {**columns, "log_metric": log_metric}
        names = columns if accepted is None else accepted & offered.keys()
        result = await run(functools.partial(call, **{name: offered[name] for name in names}))
        if isinstance(result, str | bytes | Mapping | set | frozenset):
            raise _Unusable(f"returned a {type(result).__name__}")
        found, n = [_checked(value) for value in result], len(columns["completions"])
        if len(found) != n:
            raise _Unusable(f"returned {len(found)} rewards for {n} completions")
    except asyncio.CancelledError:
        raise
    except _Unusable as error:
        text = f"{error}; want a list with one float or None per completion"
        return Outcome([], [], text, UNUSABLE)
    except BaseException as error:  # users' code may even call sys.exit(); the caller gets a text
        return Outcome([], [], report_of(error), "reward_error")
    failures = [x if isinstance(x, Missing) else None for x in found]
    return Outcome(
        [None if isinstance(x, Missing) else x for x in found],
        [failure and failure.reason for failure in failures],
        next((failure.text for failure in failures if failure), ""),
        metrics={name: sum(values) / len(values) for name, values in logged.items()},
    )


class _Unusable(Exception):
    """The result of a function that breaks its contract."""


def _checked(value: Any) -> float | Missing:
    """Return a finite reward, or why there is none."""
    if isinstance(value, Missing):
        return value
    try:
        reward = as_number(value)
    except TypeError as error:
        name = type(value).__name__
        raise _Unusable(f"returned {value!r:.80}, a {name}, as a reward ({error})") from None
    if reward is None:
        return Missing("reward_none", "the function returned None")
    if not abs(reward) <= _LARGEST:
        return Missing("reward_nan", f"the function returned {reward}")
    return reward


def as_number(value: Any) -> float | None:
    """Return a user's reward as a float; booleans, numpy scalars and None are allowed.

    Raises:
        TypeError: the value is not a number.
    """
    number = value.item() if hasattr(value, "item") else value  # an array's element
    if number is not None and not isinstance(number, numbers.Real):
        raise TypeError("not a number")
    return None if number is None else float(number)


def report_of(error: BaseException) -> str:
    """Return the traceback of the user's frames, without those of this package and of imports."""
    report = traceback.TracebackException.from_exception(error)
    ours = (__file__, settings.__file__)
    users = [f for f in report.stack if f.filename not in ours and "importlib" not in f.filename]
    report.stack = traceback.StackSummary.from_list(users)
    text = "".join(report.format() if users else report.format_exception_only())
    half = _MOST_TEXT // 2
    return text if len(text) <= _MOST_TEXT else f"{text[:half]}\n... (cut) ...\n{text[-half:]}"
