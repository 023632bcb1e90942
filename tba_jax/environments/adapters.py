# SPDX-License-Identifier: Apache-2.0
"""Users' environments in a worker: an adapter runs an episode as a coroutine.

The coroutine calls `await turn(added)` with a text, or with messages for a chat. It receives the
text and the tool calls of the policy's next turn, or None if the episode has reached a limit.
Coroutines of users and agents run concurrently; a worker runs other calls one after another. This
module imports no JAX, and transformers only to describe tools.

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
import subprocess
import sys
import threading
import traceback
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from tba_jax.environments import verifiers_bridge
from tba_jax.rewards.functions import accepted, as_number, imported
from tba_jax.serving.failures import Failure
from tba_jax.workers import Handler, Reply

BASE_URL = "base_url"  # first argument of an agent, and column of the row with its value
ERROR = "error: "  # start of the result of a failed tool call
_THREADS = ThreadPoolExecutor(1024, "agent")  # more than the episodes of a worker

Turn = Callable[[Any], Awaitable[Any]]
Row = Mapping[str, Any]


class Adapter(NamedTuple):
    """An environment, which plays one episode after another."""

    run: Callable[[Turn, Row], Awaitable[Any]]  # returns the reward of an episode: a number or None
    tools: Sequence[Callable[..., Any]] = ()  # functions that the policy may call
    has_reward: bool = True  # whether `run` returns rewards
    is_agent: bool = False  # whether `run` requests its turns over HTTP, at the row's `BASE_URL`
    first_token_only: bool = False  # whether `run` writes the prompt, except its first token


def _tools(environment: Any, functions: Sequence[Callable[..., Any]] = ()) -> Adapter:
    """Return the adapter of an object for TRL's `environment_factory`, or of tool functions."""
    methods = inspect.getmembers(environment, inspect.ismethod)
    own = [tool for name, tool in methods if name[0] != "_" and name not in ("reset", "get_reward")]
    found: list[Callable[..., Any]] = [*own, *functions]
    tools = {tool.__name__: tool for tool in found}
    if len(tools) < len(found):
        names = ", ".join(tool.__name__ for tool in found)
        raise TypeError(f"two of the tools {names} have one name. Rename one of them")
    reset = getattr(environment, "reset", lambda: None)
    get_reward = getattr(environment, "get_reward", None)

    async def called(call: Mapping[str, Any]) -> dict[str, Any]:
        """Return the message with the result of a call."""
        name = call["name"]
        try:
            if "error" in call:
                result = f"{ERROR}{call['error']}"
            elif name not in tools:
                result = f"{ERROR}no tool {name!r}; there are {', '.join(tools)}"
            else:
                result = str(await _result(tools[name](**call.get("arguments") or {})))
        except Exception as error:  # as in TRL, the policy sees the error
            result = f"{ERROR}{type(error).__name__}: {error!s:.200}"
        return {"role": "tool", "content": result, "tool_call_id": call["id"], "name": name}

    async def run(turn: Turn, row: Row) -> Any:
        text = _text(await _result(reset(**accepted(reset, row))))
        answer = await turn(_continued(row["prompt"], text))
        while answer is not None and answer[1]:
            answer = await turn([await called(call) for call in answer[1]])
        return await _result(get_reward()) if get_reward else None

    return Adapter(run, found, has_reward=get_reward is not None, first_token_only=True)


def _steps(environment: Any) -> Adapter:
    """Return the adapter of an object with `init(prompt)` and gym's `step(text)`."""

    async def run(turn: Turn, row: Row) -> Any:
        await _result(environment.init(row["prompt"]))
        begun = row["prompt"] if isinstance(row["prompt"], list) else ""
        return await _sum_of_rewards(turn, begun, environment.step)

    return Adapter(run)


async def _sum_of_rewards(turn: Turn, added: Any, step: Callable[[str], Any]) -> float | None:
    """Call `step` with the text of each turn until it is done; return the sum of its rewards.

    `step` returns (observation, reward, done, ...); the observation is a text or None.
    """
    is_chat, rewards = isinstance(added, list), list[float | None]()
    answer = await turn(added)
    while answer is not None:
        observation, reward, done, *_ = await _result(step(answer[0]))
        rewards.append(_number(reward))
        text = _text(observation)
        added = [{"role": "user", "content": text}] if is_chat else text
        answer = None if done else await turn(added)
    known = [reward for reward in rewards if reward is not None]
    return sum(known) if known or not rewards else None


def _agent(function: Callable[[str, Row], Any]) -> Adapter:
    """Return the adapter of `function(base_url, row)`, called in a thread unless it is async."""

    async def run(turn: Turn, row: Row) -> Any:
        own = {name: value for name, value in row.items() if name != BASE_URL}
        call = functools.partial(function, row[BASE_URL], own)
        if inspect.iscoroutinefunction(function):
            return await call()
        return await _result(await asyncio.get_running_loop().run_in_executor(_THREADS, call))

    return Adapter(run, is_agent=True, first_token_only=True)


def _taskset(name: str) -> Adapter:
    """Return an agent that plays a taskset of verifiers in a process, or raise TypeError."""
    socket = f"tba_jax-{secrets.token_hex(16)}"
    command = [sys.executable, "-P", verifiers_bridge.__file__, name, socket]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    if not process.stdout or not process.stdout.readline():
        raise TypeError(f"verifiers cannot load the taskset {name}; its log has the reason")

    def end_with_it() -> None:  # a later job starts another worker with another process
        process.communicate()  # reads its output, because a full pipe would stop it
        os._exit(1)

    threading.Thread(target=end_with_it, daemon=True).start()

    async def run(base_url: str, row: Row) -> Any:
        reader, writer = await asyncio.open_unix_connection(f"\0{socket}")
        with contextlib.closing(writer):
            writer.write(json.dumps([base_url, row["task"]]).encode() + b"\n")
            answer = json.loads(await reader.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["reward"]

    return _agent(run)


def _openenv(url: str) -> Adapter:
    """Return the adapter of an OpenEnv server; an episode is a session of its WebSocket.

    A turn is the text of the action, or JSON of an action that has not exactly one text.
    """
    try:
        client = importlib.import_module("websockets.asyncio.client")
    except ImportError:
        raise ImportError("openenv:URL needs websockets. Run pip install websockets") from None
    with urllib.request.urlopen(f"{url}/schema", timeout=10.0) as response:
        fields = json.load(response)["action"]["properties"].items()
    texts = [name for name, schema in fields if schema.get("type") == "string"]

    async def run(turn: Turn, row: Row) -> Any:
        async def ask(kind: str, data: Any) -> tuple[str, Any, bool]:
            await session.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(await session.recv())
            found = answer["data"]
            if answer["type"] != "error":
                shown = {k: v for k, v in found["observation"].items() if k != "metadata"}
                return json.dumps(shown), found["reward"], found["done"]
            if found["code"] != "VALIDATION_ERROR":  # else the policy sees it
                raise RuntimeError(f"the OpenEnv server refuses {kind}: {found['message']}")
            return ERROR + found["message"], None, False

        async def step(text: str) -> tuple[str, Any, bool]:
            action: Any = text  # which the server refuses
            with contextlib.suppress(ValueError):
                action = {texts[0]: text} if len(texts) == 1 else json.loads(text)
            return await ask("step", action)

        async with client.connect(f"ws{url.removeprefix('http')}/ws", max_size=None) as session:
            text, *_ = await ask("reset", dict(row))
            return await _sum_of_rewards(turn, _continued(row["prompt"], f"\n{text}"), step)

    return Adapter(run, first_token_only=True)


def _continued(prompt: Any, text: str) -> Any:
    """Return a prompt, a text or messages, with another text at its end."""
    if isinstance(prompt, str):
        return prompt + text
    *before, last = prompt
    return [*before, {**last, "content": last["content"] + text}]


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _text(observation: Any) -> str:
    if not isinstance(observation, str | None):
        kind = type(observation).__name__
        raise Failure("environment_type", f"the observation is a {kind}; return a text or None")
    return observation or ""


def _number(value: Any) -> float | None:
    """Return a reward as a finite float; None: the environment gives no reward."""
    try:
        found = as_number(value)
    except TypeError as error:
        text = f"the reward is {error}; return a number or None"
        raise Failure("environment_type", text) from None
    if found is not None and not math.isfinite(found):
        raise Failure("environment_nan", f"the reward is {found}; return a finite number")
    return found


@functools.cache
def load(name: str) -> Callable[[], Adapter]:
    """Return a function that makes an environment.

    `name` is package.module:NAME or path/to/file.py:NAME of a class or an agent function; names of
    tool functions, separated by commas; verifiers:TASKSET; or openenv:URL. Raises AttributeError or
    TypeError for others. An import or a server may raise any exception.
    """
    for kind, make in (("verifiers:", _taskset), ("openenv:", _openenv)):
        if name.startswith(kind):
            adapter = make(name.removeprefix(kind))
            return lambda: adapter
    found = [imported(each) for each in name.split(",")]
    factory = found[0]
    is_function = inspect.isfunction(factory) or inspect.ismethod(factory)
    first = list(inspect.signature(factory).parameters)[:1] if is_function else []
    if first == [BASE_URL]:
        return lambda: _agent(factory)
    if len(found) > 1 or first:
        return lambda: _tools(None, found)
    if hasattr(factory, "init") and hasattr(factory, "step"):
        return lambda: _steps(factory())
    if not callable(factory) or (isinstance(factory, type) and not hasattr(factory, "reset")):
        raise TypeError(
            f"{name} has neither reset() and tools, nor init() and step(); add the "
            "methods of one kind, or give a function run(base_url, row)"
        )
    return lambda: _tools(factory())


def make_handler(name: str) -> Handler:
    """Return the handler of a worker; a job begins with ("describe", {}) or ("begin", row)."""
    free: list[Adapter] = []  # without an episode
    with contextlib.suppress(BaseException):  # the answer to the first message has the reason
        load(name)  # now, because the start of a worker has a longer deadline than a message

    async def handle(message: Any, reply: Reply) -> Any:
        kind, row = message
        try:
            adapter = free.pop() if free else load(name)()
            if kind == "describe":
                described = ("has_reward", "is_agent", "first_token_only")
                answer = {name: getattr(adapter, name) for name in described}
                if adapter.tools:  # as TRL describes them
                    library = importlib.import_module("transformers.utils.chat_template_utils")
                    answer["schemas"] = [library.get_json_schema(tool) for tool in adapter.tools]
            else:
                run = adapter.run(lambda added: reply({"added": added}), row)
                answer = {"reward": _number(await run)}
            free.append(adapter)
            return answer
        except asyncio.CancelledError:
            raise
        except Failure as failure:
            return {"failure": failure.name, "reason": str(failure)}
        except BaseException as error:  # users' code may raise anything, even SystemExit
            traceback.print_exception(error)  # into the log file of the worker
            *_, last = traceback.format_exception_only(error)
            return {"failure": "environment_error", "reason": last.strip()[:4000]}

    return handle
