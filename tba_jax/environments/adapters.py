# SPDX-License-Identifier: Apache-2.0
"""Users' environments in a worker, each as one coroutine of an episode: `run(turn, row)`.

`await turn(text, results)` gives the policy a text or the results of its tool calls, and returns
(text, tool calls) of its next turn; None if the episode has reached a limit. Classes for TRL's
`environment_factory` have `reset`, public typed methods as tools, and optionally `get_reward`.
Typed functions are tools, as in TRL's `tools`. Classes with `init` and gym's `step` answer the text
of each turn. An agent is a function `run(base_url, row)` that samples from an OpenAI client and
returns the reward. Coroutines of users run concurrently; other calls of a worker run one after
another. This module does not import JAX; it imports transformers only to describe tools.

Invariant: every message gets an answer, or the process ends.
"""

import asyncio
import functools
import importlib
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from tba_jax.rewards.functions import accepted, as_number, imported
from tba_jax.workers import Handler, Reply

BASE_URL = "base_url"
"""First argument of an agent, and name of the row's column that has its value."""
ERROR = "error: "
"""Start of the result of a failed tool call."""

Turn = Callable[..., Awaitable[Any]]


class _Failure(Exception):
    """A violation of the interface of environments: name of the failure, and text."""


class Tools:
    """Adapter of a class for TRL's `environment_factory`, or of functions; no call ends an episode.

    Args:
        environment: an instance of the user's class; None if the tools are functions.
        functions: functions that are tools.

    Raises:
        TypeError: a tool lacks annotations or a docstring, or two tools have one name.
    """

    finish = "eos"

    def __init__(self, environment: Any, functions: Sequence[Callable[..., Any]] = ()) -> None:
        self._environment = environment
        self.has_reward = hasattr(environment, "get_reward")
        methods = inspect.getmembers(environment, inspect.ismethod)
        own = [f for name, f in methods if name[0] != "_" and name not in ("reset", "get_reward")]
        found: list[Callable[..., Any]] = [*own, *functions]
        self._tools = {tool.__name__: tool for tool in found}
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

    async def run(self, turn: Turn, row: Mapping[str, Any]) -> Any:
        """Run an episode; return its reward."""
        text = None
        if reset := getattr(self._environment, "reset", None):
            text = await _result(reset(**accepted(reset, row)))
        answer = await turn(text)
        while answer is not None and answer[1]:
            answer = await turn(results=[await self._called(call) for call in answer[1]])
        return await _result(self._environment.get_reward()) if self.has_reward else None

    async def _called(self, call: Mapping[str, Any]) -> str:
        try:
            if "error" in call:
                return f"{ERROR}{call['error']}"
            name, arguments = call["name"], call.get("arguments") or {}
            if name not in self._tools:
                return f"{ERROR}no tool {name!r}; there are {', '.join(self._tools)}"
            return str(await _result(self._tools[name](**arguments)))
        except Exception as error:  # as in TRL, the policy sees the error
            return f"{ERROR}{type(error).__name__}: {error!s:.200}"


class Steps:
    """Adapter of a class with `init(prompt)` and gym's `step(text)`.

    `step` returns (observation, reward, done, ...); an observation is a text or None. The reward of
    an episode is the sum over its steps.
    """

    has_reward, finish = True, "done"

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    async def run(self, turn: Turn, row: Mapping[str, Any]) -> Any:
        """Run an episode; return its reward."""
        await _result(self._environment.init(row["prompt"]))
        rewards: list[float | None] = []
        answer = await turn()
        while answer is not None:
            observation, reward, done, *_ = await _result(self._environment.step(answer[0]))
            rewards.append(_number(reward))
            answer = None if done else await turn(observation)
        known = [reward for reward in rewards if reward is not None]
        return sum(known) if known or not rewards else None


class Agent:
    """Adapter of an agent `run(base_url, row)`, which requests its turns over HTTP."""

    has_reward, finish = True, "done"

    def __init__(self, function: Callable[[str, Mapping[str, Any]], Any]) -> None:
        self._function = function

    async def run(self, turn: Turn, row: Mapping[str, Any]) -> Any:
        """Run an episode; return its reward."""
        own = {name: value for name, value in row.items() if name != BASE_URL}
        return await _result(self._function(row[BASE_URL], own))


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _number(value: Any) -> float | None:
    """Return a reward as a finite float; None: the environment gives no reward."""
    try:
        found = as_number(value)
    except TypeError:
        text = f"the reward is a {type(value).__name__}; return a number or None"
        raise _Failure("environment_type", text) from None
    if found is not None and not math.isfinite(found):
        raise _Failure("environment_nan", f"the reward is {found}; return a finite number")
    return found


@functools.cache
def load(name: str) -> Callable[[], Any]:
    """Return a function that makes an environment: an object of an adapter class above.

    Args:
        name: package.module:NAME or path/to/file.py:NAME of a class, or of an agent function; or
            names of tool functions, separated by commas.

    Raises:
        AttributeError, TypeError: the object is not an environment. The import may raise any
            exception.
    """
    found = [imported(each) for each in name.split(",")]
    factory = found[0]
    is_function = inspect.isfunction(factory) or inspect.ismethod(factory)
    first = list(inspect.signature(factory).parameters)[:1] if is_function else []
    if first == [BASE_URL]:
        return lambda: Agent(factory)
    if len(found) > 1 or first:
        return lambda: Tools(None, found)
    if hasattr(factory, "init") and hasattr(factory, "step"):
        return lambda: Steps(factory())
    if not callable(factory) or (isinstance(factory, type) and not hasattr(factory, "reset")):
        raise TypeError(
            f"{name} has neither reset() and tools, nor init() and step(); add the "
            "methods of one kind, or give a function run(base_url, row)"
        )
    return lambda: Tools(factory())


def make_handler(name: str) -> Handler:
    """Return the handler of a worker; it reuses objects of the class, one for each open episode.

    The first message is ("describe", whether schemas are wanted) or ("begin", row), the later ones
    are turns.
    """
    free: list[Any] = []

    async def handle(message: Any, reply: Reply) -> Any:
        async def turn(text: Any = None, results: Sequence[str] = ()) -> Any:
            if not isinstance(text, str | None):
                reason = f"the observation is a {type(text).__name__}; return a text or None"
                raise _Failure("environment_type", reason)
            return await reply({"text": text or "", "results": list(results)})

        kind, value = message
        try:
            adapter = free.pop() if free else load(name)()
            if kind == "describe":
                answer = _described(adapter, name, value)
            else:
                reward = _number(await adapter.run(turn, value))
                answer = {"finish": adapter.finish, "reward": reward}
            free.append(adapter)
        except asyncio.CancelledError:
            raise
        except _Failure as failure:
            answer = dict(zip(("failure", "reason"), failure.args, strict=True))
        except BaseException as error:  # users' code may raise anything, even SystemExit
            traceback.print_exception(error)  # into the log file of the worker
            *_, last = traceback.format_exception_only(error)
            answer = {"failure": "environment_error", "reason": last.strip()[:4000]}
        return answer

    return handle


def _described(adapter: Any, name: str, has_schemas: bool) -> dict[str, Any]:
    is_agent, has_tools = isinstance(adapter, Agent), isinstance(adapter, Tools)
    return {
        "has_reward": adapter.has_reward,
        "has_tools": has_tools,
        "schemas": adapter.schemas() if has_tools and has_schemas else [],
        "is_agent": is_agent,
        "shares_workers": not is_agent or inspect.iscoroutinefunction(imported(name)),
    }
