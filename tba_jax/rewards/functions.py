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
import importlib.util
import inspect
import numbers
import os
import threading
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from tba_jax import settings
from tba_jax.settings import GIVEN, import_file
from tba_jax.workers import Exchange, Handler

# Arguments that every function can take besides the columns.
STANDARD_ARGUMENTS = ("prompts", "completions", "completion_ids", "log_metric")
# Arguments of TRL that are not passed, and what to do instead.
_REFUSED = {
    "environments": "objects of environments are in other processes. Give the class a method "
    "get_reward(): its value is added to the rewards of task.reward",
    "trainer_state": "reward processes do not see the trainer. Leave the argument out",
    "log_extra": "no table of completions is logged. Leave the argument out, or use log_metric",
}


class Missing(NamedTuple):
    """Failure that a function may return instead of a reward: its name and description."""

    reason: str
    text: str


class Outcome(NamedTuple):
    """Result of one call of a reward function; it can be written as JSON.

    Attributes:
        rewards: one number, None or Missing per completion; empty if the call failed.
        reason: name of the failure of the call; empty without a failure.
        text: description of the failure, such as the traceback of the function's error.
        unusable: reason why no call of this function can succeed; empty if no reason is known.
        metrics: mean of the values that the function gave `log_metric`, by name.
    """

    rewards: Sequence[float | Missing | None]
    reason: str = ""
    text: str = ""
    unusable: str = ""
    metrics: Mapping[str, float] = {}


class _Function(NamedTuple):
    """A loaded function and the keywords that it accepts; `keywords` None: every keyword."""

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
        if not module or not name or (":" in module and not _is_file(module)):
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


def _is_file(module: str) -> bool:
    return module.endswith(".py")


def _found(function: str) -> Any:
    """Import and return the function with this name."""
    module_name, _, name = function.rpartition(":")
    module = import_file(module_name) if _is_file(module_name) else None
    target: Any = module or importlib.import_module(module_name)
    for part in name.split("."):
        if not hasattr(target, part):
            raise AttributeError(f"there is no {name!r} in {module_name}")
        target = getattr(target, part)
    return target


@functools.cache
def _load(function: str) -> _Function:
    target = GIVEN[function] if function in GIVEN else _found(function)
    if isinstance(target, type):
        target = target()  # a class whose instances are the function
    if not callable(target):
        raise TypeError(f"{function} is a {type(target).__name__}, not a function")
    try:
        parameters = inspect.signature(target).parameters.values()
    except ValueError:  # some built-in functions have no signature
        return _Function(target, None, ())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        accepted = None
    else:
        accepted = frozenset(
            p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        )
    required = tuple(
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    )
    return _Function(target, accepted, required)


def make_handler(functions: Sequence[str]) -> Handler:
    """Return the handler of a reward worker; it imports the functions' modules now.

    A message is (function of this module, arguments); a failed import is reported by `load_error`.
    """
    _load.cache_clear()  # a notebook may define another function of the same name
    for function in functions:
        _attempt(_load, function)

    async def handle(exchange: Exchange, message: Any) -> None:
        function, arguments = message
        result = function(*arguments)
        exchange.answer(await result if inspect.iscoroutine(result) else result)

    return handle


_LOOPS = threading.local()


def run_here(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of this module in this process, on one event loop for each thread."""
    result = function(*arguments)
    if not inspect.iscoroutine(result):
        return result
    if not hasattr(_LOOPS, "loop"):
        _LOOPS.loop = asyncio.new_event_loop()
    return _LOOPS.loop.run_until_complete(result)


def load_error(functions: Sequence[str], columns: Collection[str] | None) -> str:
    """Return why one of the functions cannot be used; "" if all can be used.

    Args:
        columns: names of the data's columns; None: unknown, so arguments of functions are not
            checked.
    """
    for function in functions:
        loaded, error, report = _attempt(_load, function)
        if error is not None:
            return f"reward function {function!r} cannot be loaded: {_why(function, error, report)}"
        if columns is None:
            continue
        for name in loaded.required:
            if name in columns and name != "prompt":
                continue
            if name in _REFUSED:
                text = f"TRL's argument {name!r}: {_REFUSED[name]}"
                return f"reward function {function!r} needs {text}"
            if name not in STANDARD_ARGUMENTS:
                others = ", ".join(sorted(c for c in columns if c != "prompt")) or "none"
                return (
                    f"reward function {function!r} needs the argument {name!r}, but the data has "
                    f"no such column. Its columns are: {others}"
                )
    return ""


def _why(function: str, error: BaseException, report: str) -> str:
    """Return why a function cannot be loaded."""
    missing = _missing_package(error)
    if missing not in ("", function.partition(":")[0].partition(".")[0]):
        return f"it needs {missing!r}, which is not installed"
    if isinstance(error, ImportError) and not missing:
        return str(error)
    *where, reason = report.rstrip().splitlines()
    advice = (
        f"{reason}. Want package.module:function importable from {os.getcwd()} or the environment, "
        "or path/to/file.py:function"
    )
    return f"{advice}\n{report.rstrip()}" if where and not missing else advice


async def score_chunk(
    function: str,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    keywords: Mapping[str, Sequence[Any]],
) -> Outcome:
    """Call the function once.

    Args:
        prompts, completions: texts, or lists of chat messages.
        keywords: further arguments; those that the function does not take are left out.
    """
    logged: dict[str, list[float]] = {}

    def log_metric(name: str, value: Any) -> None:
        logged.setdefault(str(name), []).append(float(value))

    try:
        loaded, accepted = _load(function), _load(function).accepted
        offered: dict[str, Any] = {"prompts": prompts, "completions": completions, **keywords}
        offered = {k: v for k, v in offered.items() if accepted is None or k in accepted}
        if accepted is not None and "log_metric" in accepted:
            offered["log_metric"] = log_metric
        result = loaded.call(**offered)
        if inspect.isawaitable(result):
            result = await result
        if isinstance(result, str | bytes | Mapping | set | frozenset):
            return Outcome([], unusable=f"returned a {type(result).__name__}; {_WANTED}")
        values = list(result)
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # users' code may even call sys.exit(); the caller gets a text
        missing = _missing_package(error)
        if missing and _is_in_a_file(error):
            return Outcome([], unusable=f"needs {missing!r}, which is not installed")
        return Outcome([], "reward_error", _report(error))
    if len(values) != len(completions):
        text = f"returned {len(values)} rewards for {len(completions)} completions; {_WANTED}"
        return Outcome([], unusable=text)
    rewards: list[float | Missing | None] = []
    for value in values:
        number, error, _ = (
            (value, None, "") if isinstance(value, Missing) else _attempt(as_number, value)
        )
        if error is not None:
            shown, failure, _ = _attempt(repr, value)
            text = (
                f"returned {'an object' if failure else shown[:80]}, a {type(value).__name__}, as "
                f"a reward ({type(error).__name__}: {error!s:.200}); {_WANTED}"
            )
            return Outcome([], unusable=text)
        rewards.append(number)
    return Outcome(rewards, metrics={k: sum(v) / len(v) for k, v in logged.items()})


_WANTED = "want a list with one float or None per completion"


def as_number(value: Any) -> float | None:
    """Return a user's reward as a float; booleans, numpy scalars and None are allowed.

    Raises:
        TypeError: the value is not a number.
    """
    number = value.item() if hasattr(value, "item") else value  # an array's element
    if number is not None and not isinstance(number, numbers.Real):
        raise TypeError("not a number")
    return None if number is None else float(number)


def _missing_package(error: BaseException) -> str:
    """Return the package that an import did not find; "" if the error has another cause."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return error.name.partition(".")[0]
    return ""


def _is_in_a_file(error: BaseException) -> bool:
    """Return whether code in a file raised the error, not text that a function executes."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    return bool(frames) and os.path.isfile(frames[-1].filename)


def _report(error: BaseException) -> str:
    """Return the traceback of the user's frames, without those of this package and of imports."""
    report = traceback.TracebackException.from_exception(error)
    ours = (__file__, settings.__file__)
    users = [f for f in report.stack if f.filename not in ours and "importlib" not in f.filename]
    report.stack = traceback.StackSummary.from_list(users)
    text = "".join(report.format() if users else report.format_exception_only())
    # The message may have megabytes.
    return text if len(text) <= 8000 else f"{text[:4000]}\n...\n{text[-4000:]}"


def _attempt(call: Callable[..., Any], *args: Any) -> tuple[Any, BaseException | None, str]:
    """Return (value, None, "") of a call, or (None, exception, its traceback as text)."""
    try:
        return call(*args), None, ""
    except BaseException as error:  # users' code may even call sys.exit()
        return None, error, _report(error)
