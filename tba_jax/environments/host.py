# SPDX-License-Identifier: Apache-2.0
"""Process of a user's environment, with one episode at a time.

Two kinds of classes work unchanged. Classes for TRL's `environment_factory` have `reset`, public
typed methods as tools, and optionally `get_reward`. Gym-like classes have `init` and `step`. An
agent is a function `run(base_url, row)` that samples from an OpenAI client and returns the reward.
The parent process sends one JSON request and waits for one JSON answer. Imports neither jax nor
transformers.

Invariant: every request gets an answer, or the process ends.
"""

import asyncio
import functools
import importlib
import inspect
import json
import math
import numbers
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Protocol

from tba_jax.environments.gym import GymLike
from tba_jax.rewards.processes import enter_process
from tba_jax.settings import import_file

TOOL_START, TOOL_END = "<tool>", "</tool>"
RESULT = "<result>{}</result>"
BASE_URL = "base_url"
"""First argument of an agent, and column of the row that it begins with."""
MOST_CHARACTERS = 2**18
"""Of an observation; a longer one is a failure."""
_MOST_TEXT = 4000  # maximum characters of a traceback
_CALL = re.compile(re.escape(TOOL_START) + "(.*?)" + re.escape(TOOL_END), re.DOTALL)


class _Failure(Exception):
    """The environment broke its contract.

    Attributes:
        name: name of the rejection.
    """

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


class _Kind(Protocol):
    """Interface of environments."""

    has_reward: bool

    def begin(self, row: Mapping[str, Any]) -> Any:
        """Begin an episode; return the first text or None."""
        ...

    def turn(self, text: str) -> tuple[Any, str]:
        """Return the observation after a turn, and the reason if the episode ends, or ""."""
        ...

    def reward(self) -> Any:
        """Return the reward of the episode."""
        ...


class Tools:
    """Adapter from a class for TRL's `environment_factory`.

    Args:
        environment: an instance.

    Raises:
        TypeError: a public method lacks annotations or a docstring.
    """

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self.has_reward = hasattr(environment, "get_reward")
        self._tools: dict[str, Callable[..., Any]] = {}
        for name, method in inspect.getmembers(environment, inspect.ismethod):
            if name.startswith("_") or name in ("reset", "get_reward"):
                continue
            parameters = inspect.signature(method).parameters.values()
            if not method.__doc__ or any(p.annotation is p.empty for p in parameters):
                raise TypeError(
                    f"tool {name} needs a docstring and an annotation for each argument; begin "
                    "the name of a method that is not a tool with an underscore"
                )
            self._tools[name] = method

    def begin(self, row: Mapping[str, Any]) -> Any:
        return _result(_call_with(self._environment.reset, row))

    def turn(self, text: str) -> tuple[Any, str]:
        calls = _CALL.findall(text)
        if not calls:
            return None, "eos"
        return "".join(RESULT.format(self._call(each)) for each in calls), ""

    def reward(self) -> Any:
        return _result(self._environment.get_reward())

    def _call(self, text: str) -> str:
        """Return the result of a tool call, or the error of the call or the tool as text."""
        try:
            call = json.loads(text)
            name, arguments = call["name"], call.get("arguments", {})
            if name not in self._tools:
                return f"error: no tool {name!r}; there are {', '.join(self._tools)}"
            return str(_result(self._tools[name](**arguments)))
        except Exception as error:  # As in TRL, the policy sees the error.
            return f"error: {type(error).__name__}: {error!s:.200}"


class Agent:
    """Adapter from an agent, which is not asked turn by turn.

    Args:
        run: (base URL, row) -> reward; possibly a coroutine function.
    """

    has_reward = True

    def __init__(self, run: Callable[[str, Mapping[str, Any]], Any]) -> None:
        self._run = run
        self._reward: Any = None

    def begin(self, row: Mapping[str, Any]) -> None:
        row = dict(row)
        self._reward = _result(self._run(row.pop(BASE_URL), row))

    def turn(self, text: str) -> tuple[Any, str]:
        raise NotImplementedError("an agent requests its turns")

    def reward(self) -> Any:
        return self._reward


def accepted(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the offered arguments that a function accepts."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(offered)
    names = {p.name for p in parameters if p.kind is not p.VAR_POSITIONAL}
    return {name: value for name, value in offered.items() if name in names}


def _call_with(function: Callable[..., Any], offered: Mapping[str, Any]) -> Any:
    return function(**accepted(function, offered))


def _result(value: Any) -> Any:
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def load(name: str) -> Callable[[], _Kind]:
    """Return a function that makes an environment of package.module:NAME or path/to/file.py:NAME.

    Raises:
        Any exception of the import; AttributeError, TypeError: not an environment.
    """
    module_name, _, own = name.rpartition(":")
    if module_name.endswith(".py"):
        module: Any = import_file(module_name)
    else:
        module = importlib.import_module(module_name)
    factory = getattr(module, own)
    if hasattr(factory, "init") and hasattr(factory, "step"):
        return lambda: GymLike(factory())
    if (
        inspect.isfunction(factory)
        and next(iter(inspect.signature(factory).parameters), "") == BASE_URL
    ):
        return lambda: Agent(factory)
    if not callable(factory) or (isinstance(factory, type) and not hasattr(factory, "reset")):
        raise TypeError(
            f"{own} has neither reset() and tools, nor init() and step(); add the "
            "methods of one kind, or give a function run(base_url, row)"
        )
    return lambda: Tools(factory())


class Host:
    """Request handler of an environment process.

    Args:
        name: package.module:CLASS or path/to/file.py:CLASS.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._environment: _Kind | None = None

    @functools.cached_property
    def _make(self) -> Callable[[], _Kind]:
        return load(self._name)

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Execute a request; return a failure as an answer."""
        try:
            return self._answer(request)
        except _Failure as failure:
            self._environment = None
            return {"failure": failure.name, "text": str(failure)}
        except BaseException as error:  # User code may raise anything, even SystemExit.
            self._environment = None
            report = "".join(traceback.format_exception(error))
            *_, last = traceback.format_exception_only(error)
            return {
                "failure": "environment_error",
                "text": last.strip()[:_MOST_TEXT],
                "traceback": report[-_MOST_TEXT:],
            }

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._environment is None:
            self._environment = self._make()
        environment = self._environment
        match request["do"]:
            case "describe":
                return {
                    "has_reward": environment.has_reward,
                    "has_tools": isinstance(environment, Tools),
                    "is_agent": isinstance(environment, Agent),
                }
            case "begin":
                text = _text(environment.begin(request["row"]))
                if isinstance(environment, Agent):
                    return {"finish": "done", "reward": self._reward(environment)}
                return {"observation": text}
            case "turn":
                observation, finish = environment.turn(request["text"])
                answer = {"observation": _text(observation), "finish": finish}
                return {**answer, "reward": self._reward(environment) if finish else None}
            case _:
                return {"finish": "end", "reward": self._reward(environment)}

    def _reward(self, environment: _Kind) -> float | None:
        if not environment.has_reward:
            return None
        value = environment.reward()
        value = value.item() if hasattr(value, "item") else value
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            kind = type(value).__name__
            raise _Failure("environment_type", f"the reward is a {kind}; return a number")
        if not math.isfinite(value):
            raise _Failure("environment_nan", f"the reward is {value}")
        return float(value)


def _text(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        kind = type(value).__name__
        raise _Failure("environment_type", f"the observation is a {kind}; return a text or None")
    if value is not None and len(value) > MOST_CHARACTERS:
        raise _Failure(
            "environment_flood",
            f"the observation has {len(value):,} characters; return at most {MOST_CHARACTERS:,}",
        )
    return value


def serve(
    connection: Connection, name: str, folder: str, groups: str, max_memory_bytes: int
) -> None:
    """Answer requests until the parent process closes the connection."""
    enter_process(folder, os.getppid(), groups, max_memory_bytes)
    sys.stdin = open(os.devnull)
    host = Host(name)
    while True:
        try:
            request = json.loads(connection.recv_bytes())
            connection.send_bytes(json.dumps(host.answer(request)).encode())
        except (EOFError, OSError):  # of the connection; `answer` raises nothing
            return
