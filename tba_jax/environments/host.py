# SPDX-License-Identifier: Apache-2.0
"""Process of a user's environment, with one episode at a time.

Classes for TRL's `environment_factory` have `reset`, public typed methods as tools, and optionally
`get_reward`. Typed functions are tools, as in TRL's `tools`. Classes with `init` and gym's `step`
answer the text of each turn. An agent is a function `run(base_url, row)` that samples from an
OpenAI client and returns the reward. The parent process sends one JSON request and waits for one
JSON answer. This module does not import JAX; it imports transformers only to describe tools.

Invariant: every request gets an answer, or the process ends.
"""

import asyncio
import functools
import importlib
import inspect
import json
import math
import numbers
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

from tba_jax.settings import import_file
from tba_jax.workers import enter, leave

BASE_URL = "base_url"
"""First argument of an agent, and name of the row's column that has its value."""
MOST_CHARACTERS = 2**18
"""Maximum length of an observation; a longer observation is a failure."""
_ERROR = "error: "  # the result of a failed tool call begins with this text
_MOST_TEXT = 4000  # maximum characters of a traceback


class _Failure(Exception):
    """A violation of the interface of environments.

    Attributes:
        name: name of the failure, by which rejected responses are counted.
    """

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


class _Kind(Protocol):
    """Interface of environments."""

    has_reward: bool

    def begin(self, row: Mapping[str, Any]) -> Any:
        """Begin an episode; return the first observation or None."""
        ...

    def reward(self) -> Any:
        """Return the reward of the episode."""
        ...


class Tools:
    """Adapter from a class for TRL's `environment_factory`, or from functions.

    Args:
        environment: an instance of the user's class; None if the tools are functions.
        functions: functions that are tools.

    Attributes:
        failed: results that are errors, from the last call of `results`.

    Raises:
        TypeError: a tool lacks annotations or a docstring, or two tools have one name.
    """

    def __init__(self, environment: Any, functions: Sequence[Callable[..., Any]] = ()) -> None:
        self._environment = environment
        self.has_reward = hasattr(environment, "get_reward")
        methods = inspect.getmembers(environment, inspect.ismethod)
        own = [f for name, f in methods if name[0] != "_" and name not in ("reset", "get_reward")]
        found: list[Callable[..., Any]] = [*own, *functions]
        self._tools = {tool.__name__: tool for tool in found}
        self.failed: list[str] = []
        if len(self._tools) < len(found):
            names = ", ".join(tool.__name__ for tool in found)
            raise TypeError(f"two of the tools {names} have one name. Rename one of them")
        for name, tool in self._tools.items():
            parameters = inspect.signature(tool).parameters.values()
            if not tool.__doc__ or any(p.annotation is p.empty for p in parameters):
                raise TypeError(
                    f"tool {name} needs a docstring and an annotation for each argument; begin "
                    "the name of a method that is not a tool with an underscore"
                )

    def schemas(self) -> list[dict[str, Any]]:
        """Return the JSON schema of each tool, as TRL does.

        Raises:
            Exception: transformers cannot read an annotation or docstring.
        """
        library = importlib.import_module("transformers.utils.chat_template_utils")
        return [library.get_json_schema(tool) for tool in self._tools.values()]

    def begin(self, row: Mapping[str, Any]) -> Any:
        if self._environment is None:
            return None
        return _result(_call_with(self._environment.reset, row))

    def results(self, calls: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the result of each call as text; for a failure, the error of the call or tool."""
        results = list(map(self._called, calls))
        self.failed = [result for result in results if result.startswith(_ERROR)]
        return results

    def reward(self) -> Any:
        return _result(self._environment.get_reward())

    def _called(self, call: Mapping[str, Any]) -> str:
        try:
            if "error" in call:
                return f"{_ERROR}{call['error']}"
            name, arguments = call["name"], call.get("arguments") or {}
            if name not in self._tools:
                return f"{_ERROR}no tool {name!r}; there are {', '.join(self._tools)}"
            return str(_result(self._tools[name](**arguments)))
        except Exception as error:  # As in TRL, the policy sees the error.
            return f"{_ERROR}{type(error).__name__}: {error!s:.200}"


class Steps:
    """Adapter from a class with `init(prompt)` and gym's `step(text)`.

    `step` returns (observation, reward, done, ...); an observation is a text or None. The reward of
    an episode is the sum over its steps.

    Args:
        environment: an instance of the user's class.
    """

    has_reward = True

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._rewards: list[Any] = []

    def begin(self, row: Mapping[str, Any]) -> None:
        self._rewards = []
        self._environment.init(row["prompt"])

    def turn(self, text: str) -> tuple[Any, bool]:
        """Return the observation after a turn, and whether the episode has ended."""
        observation, reward, done, *_ = self._environment.step(text)
        self._rewards.append(reward)
        return observation, bool(done)

    def reward(self) -> Any:
        return sum(self._rewards)


class Agent:
    """Adapter for an agent, which requests its turns from the policy over HTTP.

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

    def reward(self) -> Any:
        return self._reward


def accepted(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments among `offered` that a function accepts."""
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
    """Return a function that makes an environment.

    Args:
        name: package.module:NAME or path/to/file.py:NAME of a class, or of an agent function; or
            names of tool functions, separated by commas.

    Raises:
        AttributeError, TypeError: the object is not an environment. The import may raise any
            exception.
    """
    found = list(map(_imported, name.split(",")))
    if len(found) > 1 or _is_tool(found[0]):
        return lambda: Tools(None, found)
    (factory,) = found
    if hasattr(factory, "init") and hasattr(factory, "step"):
        return lambda: Steps(factory())
    if inspect.isfunction(factory) and BASE_URL in _parameters(factory)[:1]:
        return lambda: Agent(factory)
    if not callable(factory) or (isinstance(factory, type) and not hasattr(factory, "reset")):
        raise TypeError(
            f"{name} has neither reset() and tools, nor init() and step(); add the "
            "methods of one kind, or give a function run(base_url, row)"
        )
    return lambda: Tools(factory())


def _imported(name: str) -> Any:
    module, _, own = name.strip().rpartition(":")
    found = import_file(module) if module.endswith(".py") else importlib.import_module(module)
    return getattr(found, own)


def _is_tool(found: Any) -> bool:
    """Return whether an object is a function with arguments, but not an agent."""
    is_function = inspect.isfunction(found) or inspect.ismethod(found)
    return is_function and _parameters(found)[:1] not in ([], [BASE_URL])


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


class Host:
    """Request handler of an environment process.

    Args:
        name: as in `load`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._environment: _Kind | None = None

    @functools.cached_property
    def _make(self) -> Callable[[], _Kind]:
        return load(self._name)

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Execute a request and return the answer, which may be a failure."""
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
                has_tools = isinstance(environment, Tools)
                return {
                    "has_reward": environment.has_reward,
                    "has_tools": has_tools,
                    "schemas": environment.schemas() if has_tools and request["schemas"] else [],
                    "is_agent": isinstance(environment, Agent),
                }
            case "begin":
                text = _text(environment.begin(request["row"]))
                if isinstance(environment, Agent):
                    return {"finish": "done", "reward": self._reward(environment)}
                return {"observation": text}
            case "turn":
                assert isinstance(environment, Steps)
                observation, is_done = environment.turn(request["text"])
                reward = self._reward(environment) if is_done else None
                finish = "done" if is_done else ""
                return {"observation": _text(observation), "finish": finish, "reward": reward}
            case "calls":
                assert isinstance(environment, Tools)
                results = environment.results(request["calls"])
                _text("".join(results))
                return {
                    "results": results,
                    "finish": "" if results else "eos",
                    "reward": None if results else self._reward(environment),
                    "failed_calls": environment.failed,
                }
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
            raise _Failure("environment_nan", f"the reward is {value}; return a finite number")
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


def serve(connection: Connection, name: str, folder: str, max_memory_bytes: int, log: str) -> None:
    """Answer requests until the parent process closes the connection."""
    enter(connection, folder, {}, max_memory_bytes, log)
    host = Host(name)
    while True:
        try:
            request = json.loads(connection.recv_bytes())
            connection.send_bytes(json.dumps(host.answer(request)).encode())
        except (EOFError, OSError):  # the connection is closed; `answer` raises no exception
            leave()
