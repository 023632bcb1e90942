# SPDX-License-Identifier: Apache-2.0
"""Pool of environments, whose episodes share a few workers.

An environment is user code: it may hang, raise, end its process, or return invalid values. No call
blocks: the driver of the episodes polls for answers. An agent that is not a coroutine function
has a worker for itself, because it blocks the worker for a whole episode.

Invariant: a failure has a name and gives no reward. A call that hangs or ends its process costs
the episodes of its worker (`environment_lost`), and no other episode.
"""

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from tba_jax import workers
from tba_jax.decoding.requests import Response
from tba_jax.environments.adapters import Turn, make_handler
from tba_jax.environments.failures import FailureLines
from tba_jax.workers import Job, WorkerFailed, WorkerPool

DEFAULT_WORKERS = 4
"""Number of workers; episodes share them."""


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
        reward: reward of a finished episode; None if the environment gives no reward.
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


class Environment:
    """Handle of one episode's environment; one thread calls it."""

    def __init__(self, pool: "EnvironmentPool", job: Job) -> None:
        self._pool, self.job = pool, job
        self._future: Future[Any] = Future()

    def begin(self, row: Mapping[str, Any]) -> None:
        """Send the request to begin an episode with a row of the data, including the prompt."""
        self._send("run()" if self._pool.is_agent else "reset", ("begin", dict(row)))

    def turn(self, text: str, response: Response | None = None) -> None:
        """Send the text of a turn of the policy; `response` has the tokens."""
        self._send("a turn", Turn(text))

    def call(self, calls: Sequence[Mapping[str, Any]]) -> None:
        """Send the tool calls of a turn; an empty list ends the episode."""
        self._send("a turn", Turn("", calls))

    def end(self) -> None:
        """Send the request for the reward of an episode that reached a limit."""
        self._send("the reward", workers.NOTHING)

    @property
    def is_answered(self) -> bool:
        """Return whether `poll` would return an answer or a failure."""
        return self._future.done()

    def poll(self) -> Answer | None:
        """Return the answer to the newest request, or a failure; None if none has arrived.

        Raises:
            RuntimeError: the pool was closed.
        """
        if not self._future.done():
            return None
        try:
            answer = self._future.result()
        except WorkerFailed as error:
            if error.name == "closed":
                raise RuntimeError(f"the environments of {self._pool.name} were closed") from None
            name = {"timeout": "environment_timeout", "lost": "environment_lost"}.get(error.name)
            hint = " (reward.timeout_s)" if error.name == "timeout" else ""
            return self.reject(name or "environment_crash", f"{error}{hint}")
        if "failure" in answer:
            return self.reject(answer["failure"], answer["text"])
        if answer.get("failed_calls"):
            self._pool.report("failed_tool_call", answer["failed_calls"][0], "times")
        return Answer(**answer)

    def release(self) -> None:
        """End the episode in the worker."""
        self.job.close()

    def reject(self, name: str, text: str) -> Answer:
        """End the episode, report a failure and return it as an answer."""
        self.release()
        self._pool.report(name, text)
        return Answer(failure=name)

    def _send(self, doing: str, message: Any) -> None:
        self._future = self.job.send(message, self._pool.timeout_s, doing)


class EnvironmentPool:
    """Thread-safe pool of environments.

    Args:
        name: as in `adapters.load`.
        timeout_s: deadline of a call in seconds.
        num_workers: number of workers that episodes share.
        max_memory_bytes: memory limit of each worker; 0: none.
        has_schemas: whether the policy reads JSON schemas of the tools.
        logs: folder of the workers' log files; None: their output is that of this process.

    Attributes:
        has_reward, has_tools, is_agent: properties of the environment, set by `check`.
        schemas: JSON schemas of the tools, set by `check` if `has_schemas`.
    """

    def __init__(
        self,
        name: str,
        *,
        timeout_s: float,
        num_workers: int = DEFAULT_WORKERS,
        max_memory_bytes: int = 0,
        has_schemas: bool = False,
        logs: Path | None = None,
    ) -> None:
        self.name, self.timeout_s = name, timeout_s
        self.workers = WorkerPool(
            "environment",
            make_handler,
            (name,),
            num_workers=num_workers,
            max_memory_bytes=max_memory_bytes,
            logs=logs,
        )
        self._has_schemas, self._logs = has_schemas, logs
        self._failures = FailureLines(f"environment {name}")
        self._is_checked = False
        self.has_reward = self.has_tools = self.is_agent = False
        self.schemas: list[dict[str, Any]] = []

    def check(self) -> None:
        """Wait until the environment can be created.

        Raises:
            ValueError: the environment cannot be created; the message has the reason.
        """
        if self._is_checked:
            return
        subject = f"task.environment = {self.name!r}"
        job = self.workers.open()
        try:
            message = ("describe", self._has_schemas)
            answer = job.send(message, self.timeout_s, "its creation").result()
        except WorkerFailed as error:
            remedy = "Move slow work out of its constructor, or raise --config.reward.timeout_s"
            where = f"Its output is in {self._logs or 'standard error'}"
            raise ValueError(
                f"{subject}: {error}. {remedy if error.name == 'timeout' else where}"
            ) from None
        if "failure" in answer:
            raise ValueError(
                f"{subject} cannot be used: {answer['text']}. Give package.module:NAME or "
                "path/to/file.py:NAME, a class without constructor arguments or a function "
                "run(base_url, row)"
            )
        job.close()
        self.has_reward, self.has_tools = answer["has_reward"], answer["has_tools"]
        self.is_agent, self.schemas = answer["is_agent"], answer["schemas"]
        if not answer["shares_workers"]:
            self.workers.num_workers = sys.maxsize
        if self._has_schemas:
            self.workers.end_idle()  # describing tools has imported transformers there
        self._is_checked = True

    def open(self) -> Environment:
        """Return a new episode's environment.

        Raises:
            RuntimeError: the pool was closed.
        """
        try:
            return Environment(self, self.workers.open())
        except WorkerFailed:
            raise RuntimeError(f"the environments of {self.name} were closed") from None

    def report(self, name: str, text: str, what: str = "episode(s) rejected as") -> None:
        """Print a line about a failure; repeated failures of one name are printed at intervals."""
        self._failures.report(name, text, what)

    def close(self) -> None:
        """Kill all workers."""
        self.workers.close()
