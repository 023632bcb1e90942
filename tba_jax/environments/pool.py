# SPDX-License-Identifier: Apache-2.0
"""Pool of processes that run environments; each concurrent episode has its own process.

An environment is user code with a state: it may hang, raise, end its process, or return invalid
values. So each episode has a process of its own, which is killed if a call exceeds its deadline. No
call blocks: the driver of the episodes polls for answers.

Invariant: a failure has a name, gives no reward, and does not affect other episodes.
"""

import itertools
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tba_jax import workers as processes
from tba_jax.decoding.requests import Response
from tba_jax.environments.failures import FailureLines
from tba_jax.environments.host import serve

START_TIMEOUT_S = 60.0
"""Maximum time for the start of a process and the import of its module, in seconds."""
_MOST_BYTES = 2**22  # maximum size of an answer


class Request(NamedTuple):
    """Request of an agent for a turn of the policy.

    Attributes:
        tokens: tokens that follow the present tokens of a path; for a new path, all its tokens.
        max_tokens: maximum number of tokens of the turn.
        stop: texts that end the turn; empty: search.stop_strings.
        path: index of the path; the current number of paths means a new path.
    """

    tokens: list[int]
    max_tokens: int
    stop: list[str]
    path: int = 0


class Answer(NamedTuple):
    """Answer of an environment.

    Attributes:
        observation: text for the policy; None if there is no text.
        finish: reason of the episode's end; "" while the episode continues.
        reward: reward of a finished episode; None if the environment computes no reward.
        failure: name of the failure; "" on success.
        request: request of an agent for the next turn, instead of an observation.
        results: results of the tool calls of a chat, instead of an observation.
        failed_calls: results of the failed tool calls of the turn.
    """

    observation: str | None = None
    finish: str = ""
    reward: float | None = None
    failure: str = ""
    request: Request | None = None
    results: Sequence[str] = ()
    failed_calls: Sequence[str] = ()


class _Process:
    """An environment process and the connection to it.

    Attributes:
        number: number of the process, in the name of its log file.
        is_started: whether the process has answered a request, so that its imports are done.
    """

    def __init__(self, pool: "EnvironmentPool", number: int) -> None:
        self.number = number
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tba_jax.environments.host"])
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=serve,
            args=(
                theirs,
                pool.name,
                os.getcwd(),
                pool.max_memory_bytes,
                processes.log_file(pool.logs, "environment", number),
            ),
            daemon=True,
        )
        self.process.start()
        theirs.close()
        self.is_started = False

    def kill(self) -> None:
        self.connection.close()
        processes.kill(self.process)


class Environment:
    """Handle of one episode's environment; one thread calls it."""

    def __init__(self, pool: "EnvironmentPool", process: _Process) -> None:
        self._pool, self._process = pool, process
        self._doing, self._deadline_s = "", 0.0

    def begin(self, row: Mapping[str, Any]) -> None:
        """Send the request to begin an episode with a row of the data, including the prompt."""
        doing = "run()" if self._pool.is_agent else "reset"
        self._send(doing, {"do": "begin", "row": dict(row)})

    def turn(self, text: str, response: Response | None = None) -> None:
        """Send the text of a turn of the policy; `response` has the tokens."""
        self._send("a turn", {"do": "turn", "text": text})

    def call(self, calls: Sequence[Mapping[str, Any]]) -> None:
        """Send the tool calls of a turn; an empty list ends the episode."""
        self._send("a turn", {"do": "calls", "calls": calls})

    def end(self) -> None:
        """Send the request for the reward of an episode that reached a limit."""
        self._send("the reward", {"do": "end"})

    @property
    def is_answered(self) -> bool:
        """Return whether `poll` would return an answer or a failure."""
        connection = self._process.connection
        try:
            return connection.poll() or time.monotonic() >= self._deadline_s
        except OSError:
            return True

    def poll(self) -> Answer | None:
        """Return the answer to the newest request; None if it has not arrived.

        After a failure the environment's process is closed.
        """
        process, pool = self._process, self._pool
        try:
            if process.connection.poll():
                answer = json.loads(process.connection.recv_bytes(_MOST_BYTES))
                process.is_started = True
                if "failure" in answer:
                    pool.report(answer["failure"], answer["text"])
                    pool.give_back(process)
                    return Answer(failure=answer["failure"])
                if answer.get("failed_calls"):
                    pool.report("failed_tool_call", answer["failed_calls"][0], "times")
                return Answer(**answer)
        except (EOFError, OSError):
            return self.reject("environment_crash", f"its process ended during {self._doing}")
        if time.monotonic() < self._deadline_s:
            return None
        text = f"{self._doing} took longer than {pool.timeout_s:g} s (reward.timeout_s)"
        return self.reject("environment_timeout", text)

    def release(self) -> None:
        """Return the process to the pool."""
        self._pool.give_back(self._process)

    def reject(self, name: str, text: str) -> Answer:
        """End the process, report a failure and return it as an answer."""
        self.kill()
        self._pool.report(name, text)
        return Answer(failure=name)

    def kill(self) -> None:
        """Kill the process."""
        self._pool.kill(self._process)

    def restart_deadline(self) -> None:
        """Restart the deadline of the call in progress."""
        self._process.is_started = True
        self._deadline_s = time.monotonic() + self._pool.timeout_s

    def _send(self, doing: str, request: Mapping[str, Any]) -> None:
        self._doing = doing
        start_s = 0.0 if self._process.is_started else START_TIMEOUT_S
        self._deadline_s = time.monotonic() + self._pool.timeout_s + start_s
        try:
            self._process.connection.send_bytes(json.dumps(request).encode())
        except OSError:
            self._deadline_s = 0.0  # `poll` then finds that the process has ended


class EnvironmentPool:
    """Thread-safe pool of environment processes.

    Args:
        name: as in `host.load`.
        timeout_s: deadline of a call in seconds.
        max_memory_bytes: memory limit of each process; 0: none.
        has_schemas: whether the policy reads JSON schemas of the tools.
        logs: folder of the processes' log files; None: their output is that of this process.

    Attributes:
        has_reward, has_tools, is_agent: properties of the environment, set by `check`.
        schemas: JSON schemas of the tools, set by `check` if `has_schemas`.
    """

    def __init__(
        self,
        name: str,
        *,
        timeout_s: float,
        max_memory_bytes: int = 0,
        has_schemas: bool = False,
        logs: Path | None = None,
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.max_memory_bytes = max_memory_bytes
        self.logs = logs
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._is_closed = False
        self._failures = FailureLines(f"environment {name}")
        self._is_checked = False
        self.has_reward = self.has_tools = self.is_agent = False
        self.schemas: list[dict[str, Any]] = []
        self._has_schemas = has_schemas

    def check(self) -> None:
        """Wait until the environment can be created.

        Raises:
            ValueError: the environment cannot be created; the message has the reason.
        """
        if self._is_checked:
            return
        process = self._take()
        request = {"do": "describe", "schemas": self._has_schemas}
        process.connection.send_bytes(json.dumps(request).encode())
        try:
            if not process.connection.poll(START_TIMEOUT_S + self.timeout_s):
                raise ValueError(
                    f"task.environment = {self.name!r} was not created within "
                    f"{START_TIMEOUT_S + self.timeout_s:.0f} s; move slow work out of its "
                    "constructor, or raise --config.reward.timeout_s"
                )
            answer = json.loads(process.connection.recv_bytes(_MOST_BYTES))
        except (EOFError, OSError):
            raise ValueError(
                f"task.environment = {self.name!r}: its process ended during creation; its "
                f"output is in {self.logs or 'standard error'}"
            ) from None
        if "failure" in answer:
            raise ValueError(
                f"task.environment = {self.name!r} cannot be used: {answer['text']}. Give "
                "package.module:NAME or path/to/file.py:NAME, a class without constructor "
                "arguments or a function run(base_url, row)"
            )
        process.is_started = True
        self.has_reward, self.has_tools = answer["has_reward"], answer["has_tools"]
        self.is_agent, self.schemas = answer["is_agent"], answer["schemas"]
        self._is_checked = True
        self.give_back(process)

    def open(self) -> Environment:
        return Environment(self, self._take())

    def _take(self) -> _Process:
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"the environments of {self.name} were closed")
            while self._idle:
                process = self._idle.pop()
                if process.process.is_alive():
                    return process
                self._all.discard(process)
                process.kill()  # closes the connection
            used = {process.number for process in self._all}
            process = _Process(self, next(i for i in itertools.count() if i not in used))
            self._all.add(process)
            return process

    def give_back(self, process: _Process) -> None:
        """Keep a process for another episode."""
        with self._lock:
            self._idle.append(process)

    def kill(self, process: _Process) -> None:
        """Kill a process that is in use, and the processes that it started."""
        with self._lock:
            self._all.discard(process)
        process.kill()

    def report(self, name: str, text: str, what: str = "episode(s) rejected as") -> None:
        """Print a line about a failure; repeated failures of one name are printed at intervals."""
        self._failures.report(name, text, what)

    def close(self) -> None:
        """Kill all processes."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            left, self._all = self._all, set()
        for process in left:
            process.kill()
