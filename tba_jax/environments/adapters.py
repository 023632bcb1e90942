# SPDX-License-Identifier: Apache-2.0
"""Users' environments in a worker, each as a coroutine of an episode: `run(turn, row)` -> reward.

`await turn(added)` gives the policy a text, or messages for a chat, and returns (text, tool calls)
of its next turn; None if the episode has reached a limit. Agents and coroutines of users run
concurrently; other calls of a worker run one after another. This module does not import JAX; it
imports transformers only to describe tools.

Invariant: every message gets an answer, or the process ends.
"""

import asyncio
import contextlib
import functools
import importlib
import inspect
import json
import math
import os
import secrets
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tba_jax.environments import verifiers_bridge
from tba_jax.rewards.functions import accepted, as_number, imported
from tba_jax.serving.failures import Failure
from tba_jax.workers import Handler, Reply

BASE_URL = "base_url"
"""First argument of an agent, and name of the row's column that has its value."""
ERROR = "error: "
"""Start of the result of a failed tool call."""
VERIFIERS = "verifiers:"
_THREADS = ThreadPoolExecutor(1024, "agent")  # more than the episodes of a worker

Turn = Callable[[Any], Awaitable[Any]]


class Tools:
    """Adapter of an object as TRL's `environment_factory` makes it, or of functions.

    Raises TypeError if a tool lacks annotations or a docstring, or two tools have one name.
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
        """Return the JSON schema of each tool, as TRL does, or raise an error of transformers."""
        library = importlib.import_module("transformers.utils.chat_template_utils")
        return [library.get_json_schema(tool) for tool in self._tools.values()]

    async def run(self, turn: Turn, row: Mapping[str, Any]) -> Any:
        *before, last = row["prompt"]
        if reset := getattr(self._environment, "reset", None):
            text = _text(await _result(reset(**accepted(reset, row))))
            last = {**last, "content": last["content"] + text}
        answer = await turn([*before, last])
        while answer is not None and answer[1]:
            answer = await turn([await self._called(call) for call in answer[1]])
        return await _result(self._environment.get_reward()) if self.has_reward else None

    async def _called(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return the message with the result of a call."""
        name = call["name"]
        try:
            if "error" in call:
                result = f"{ERROR}{call['error']}"
            elif name not in self._tools:
                result = f"{ERROR}no tool {name!r}; there are {', '.join(self._tools)}"
            else:
                result = str(await _result(self._tools[name](**call.get("arguments") or {})))
        except Exception as error:  # as in TRL, the policy sees the error
            result = f"{ERROR}{type(error).__name__}: {error!s:.200}"
        return {"role": "tool", "content": result, "tool_call_id": call["id"], "name": name}


class Steps:
    """Adapter of a class with `init(prompt)` and gym's `step(text)`.

    `step` returns (observation, reward, done, ...); an observation is a text or None. The reward of
    an episode is the sum over its steps.
    """

    has_reward, finish = True, "done"

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    async def run(self, turn: Turn, row: Mapping[str, Any]) -> Any:
        is_chat, rewards = isinstance(row["prompt"], list), list[float | None]()
        await _result(self._environment.init(row["prompt"]))
        answer = await turn(row["prompt"] if is_chat else "")
        while answer is not None:
            observation, reward, done, *_ = await _result(self._environment.step(answer[0]))
            rewards.append(_number(reward))
            text = _text(observation)
            added = [{"role": "user", "content": text}] if is_chat else text
            answer = None if done else await turn(added)
        known = [reward for reward in rewards if reward is not None]
        return sum(known) if known or not rewards else None


class Agent:
    """Adapter of an agent `run(base_url, row)`, in a thread unless it is a coroutine function."""

    has_reward, finish = True, "done"

    def __init__(self, function: Callable[[str, Mapping[str, Any]], Any]) -> None:
        self._function = function

    async def run(self, turn: Turn, row: Mapping[str, Any]) -> Any:
        own = {name: value for name, value in row.items() if name != BASE_URL}
        call = functools.partial(self._function, row[BASE_URL], own)
        if inspect.iscoroutinefunction(self._function):
            return await call()
        return await _result(await asyncio.get_running_loop().run_in_executor(_THREADS, call))


def _taskset(name: str) -> Callable[[str, Mapping[str, Any]], Any]:
    """Return an agent that plays a taskset of verifiers in a process, or raise TypeError."""
    path = f"\0tba_jax-{secrets.token_hex(16)}"  # of Linux: it leaves no file
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(1024)
        number = listening.fileno()
        command = [sys.executable, "-P", verifiers_bridge.__file__, name, str(number)]
        process = subprocess.Popen(command, pass_fds=[number], stdout=subprocess.PIPE)
    if not process.stdout or not process.stdout.readline():
        raise TypeError(f"verifiers cannot load the taskset {name}; the log has its reason")

    def end_with_it() -> None:  # a later job starts another worker, and with it the process
        process.communicate()  # reads what it prints, or a full pipe would stop it
        os._exit(1)

    threading.Thread(target=end_with_it, daemon=True).start()

    async def run(base_url: str, row: Mapping[str, Any]) -> Any:
        reader, writer = await asyncio.open_unix_connection(path)
        with contextlib.closing(writer):
            writer.write(json.dumps([base_url, row["task"]]).encode() + b"\n")
            answer = json.loads(await reader.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["reward"]

    return run


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _text(observation: Any) -> str:
    if not isinstance(observation, str | None):
        text = f"the observation is a {type(observation).__name__}; return a text or None"
        raise Failure("environment_type", text)
    return observation or ""


def _number(value: Any) -> float | None:
    """Return a reward as a finite float; None: the environment gives no reward."""
    try:
        found = as_number(value)
    except TypeError:
        text = f"the reward is a {type(value).__name__}; return a number or None"
        raise Failure("environment_type", text) from None
    if found is not None and not math.isfinite(found):
        raise Failure("environment_nan", f"the reward is {found}; return a finite number")
    return found


@functools.cache
def load(name: str) -> Callable[[], Any]:
    """Return a function that makes an environment: an object of an adapter class above.

    `name` is package.module:NAME or path/to/file.py:NAME of a class, or of an agent function; or
    names of tool functions, separated by commas; or verifiers:TASKSET. Raises AttributeError or
    TypeError if that is not an environment; the import may raise any exception.
    """
    if name.startswith(VERIFIERS):
        taskset = _taskset(name.removeprefix(VERIFIERS))
        return lambda: Agent(taskset)
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

    The first message of a job is ("describe", whether schemas are wanted) or ("begin", row).
    """
    free: list[Any] = []
    with contextlib.suppress(BaseException):  # the answer to the first message has the reason
        load(name)  # now, because the start of a worker has a longer deadline than a message

    async def handle(message: Any, reply: Reply) -> Any:
        kind, value = message
        try:
            adapter = free.pop() if free else load(name)()
            if kind == "describe":
                has_tools = isinstance(adapter, Tools)
                answer = {"has_reward": adapter.has_reward, "has_tools": has_tools}
                answer["schemas"] = adapter.schemas() if has_tools and value else []
                answer["is_agent"] = isinstance(adapter, Agent)
            else:
                run = adapter.run(lambda added: reply({"added": added}), value)
                answer = {"finish": adapter.finish, "reward": _number(await run)}
            free.append(adapter)
        except asyncio.CancelledError:
            raise
        except Failure as failure:
            answer = {"failure": failure.name, "reason": str(failure)}
        except BaseException as error:  # users' code may raise anything, even SystemExit
            traceback.print_exception(error)  # into the log file of the worker
            *_, last = traceback.format_exception_only(error)
            answer = {"failure": "environment_error", "reason": last.strip()[:4000]}
        return answer

    return handle
