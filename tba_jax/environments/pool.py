# SPDX-License-Identifier: Apache-2.0
"""Environments of episodes, whose processes are those of a pool.

An environment is user code: it may hang, raise, end its process, or return invalid values. No call
blocks: the driver of the episodes polls for requests. `Environment` converts the texts and tool
results of a class to tokens. `Agent` is a program with an OpenAI client, whose requests go to its
own base URL on this machine's loopback interface. Sampled tokens are never encoded again: a prompt
begins with all tokens of an earlier turn of its path, or it begins a new path: the episode forks.

Invariants: a failure has a name and gives no reward. A call that hangs or ends its process costs
the episodes of its worker (`environment_lost`), and no other episode. A request that is open when
its episode ends receives an error.
"""

import contextlib
import functools
import json
import secrets
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from tba_jax.decoding.requests import Response
from tba_jax.environments.adapters import BASE_URL, ERROR, make_handler
from tba_jax.flow.trajectory import Prompt
from tba_jax.remote.http_server import HttpServer, bind
from tba_jax.serving.chat import Messages, extended, text_of
from tba_jax.serving.failures import FailureLines
from tba_jax.serving.protocol import ApiError, Call, Generation, Kind, Served, Update, parse
from tba_jax.serving.server import Application
from tba_jax.workers import WorkerFailed, WorkerPool

DEFAULT_WORKERS = 4
"""Number of workers; episodes share them."""


class Request(NamedTuple):
    """Request for a turn of the policy.

    Attributes:
        prompt: int32 [s], all tokens before the turn.
        path: index of the path that the turn continues; the number of paths: a new path.
        max_tokens: maximum number of tokens of the turn.
        stop: texts that end the turn; empty: search.stop_strings.
    """

    prompt: np.ndarray
    path: int = 0
    max_tokens: int = sys.maxsize
    stop: Sequence[str] = ()


class Ended(NamedTuple):
    """End of an episode.

    Attributes:
        finish: "eos" if the policy ended the episode by a turn without a call, else "done".
        reward: reward of the environment; None if it gives no reward.
        failure: name of the failure; "" on success.
    """

    finish: str = ""
    reward: float | None = None
    failure: str = ""


class _Turn(NamedTuple):
    """The newest turn of a path: prompt and sampled tokens, and the messages before the turn."""

    prompt: np.ndarray
    completion: np.ndarray
    messages: Messages

    @property
    def tokens(self) -> np.ndarray:
        """Return int32 [s]: all tokens up to the end of the turn."""
        return np.concatenate([self.prompt, self.completion])


class Environment:
    """Environment of one episode; one thread calls it.

    Args:
        pool: the pool.
        prompt: prompt of the episode, with the columns of its row.
    """

    def __init__(self, pool: "EnvironmentPool", prompt: Prompt) -> None:
        self.num_failed_calls = 0
        self._pool, self._row_prompt = pool, prompt
        self._job = pool.workers.open()
        self._future: Future[Any] = Future()
        self._failure: tuple[str, str] | None = None  # name and description
        self._turns: list[_Turn] = []  # newest turn of each path
        self._path, self._prompt = 0, prompt.tokens  # of the request
        chat = prompt.columns.get("prompt")
        self._messages: Messages | None = list(chat) if isinstance(chat, list) else None
        self._calls: Sequence[Mapping[str, Any]] = ()

    def begin(self) -> None:
        """Begin the episode."""
        self._begin({})

    def turn(self, response: Response) -> None:
        """Send the turn that the policy sampled for the newest request."""
        served, schemas = self._pool.served, self._pool.schemas
        tokens, prompt = response.tokens, self._prompt
        text = served.tokenizer.decode(tokens)
        self._turns[self._path :] = [_Turn(prompt, tokens, ())]
        try:
            if self._messages is not None:
                message = served.chat.message(tokens, text, prompt, schemas)
                self._messages = [*self._messages, message]
            self._calls = served.chat.calls(tokens, prompt, schemas) if schemas else ()
        except ValueError as error:
            self._failure = "environment_template", str(error)
        self._send("a turn", (text, self._calls))

    def end(self) -> None:
        """Request the reward, because the episode has reached a limit."""
        self._send("the reward", None)

    @property
    def is_answered(self) -> bool:
        """Return whether `poll` would return a request, a reward or a failure."""
        return self._failure is not None or self._future.done()

    def poll(self) -> Request | Ended | None:
        """Return the next request, or the end of the episode; None if neither has arrived.

        Raises:
            RuntimeError: the pool was closed.
        """
        if self._failure is not None:
            return self.reject(*self._failure)
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
            return self.reject(answer["failure"], answer["reason"])
        if "finish" in answer:
            self.release()
            return Ended(answer["finish"], answer["reward"])
        failed = [result for result in answer["results"] if result.startswith(ERROR)]
        self.num_failed_calls += len(failed)
        if failed:
            self._pool.report("failed_tool_call", failed[0], "times")
        try:
            self._prompt = self._prompt_after(answer["text"], answer["results"])
        except ValueError as error:
            return self.reject("environment_template", str(error))
        return Request(self._prompt, self._path)

    def release(self) -> None:
        """End the episode in the worker."""
        self._job.close()

    def reject(self, name: str, text: str) -> Ended:
        """End the episode, report a failure and return it."""
        self.release()
        self._pool.report(name, text)
        return Ended(failure=name)

    def _begin(self, more: Mapping[str, Any]) -> None:
        row = {"prompt": self._row_prompt.text, **self._row_prompt.columns, **more}
        self._send("run()" if self._pool.is_agent else "reset", ("begin", row))

    def _send(self, doing: str, message: Any) -> None:
        self._future = self._job.send(message, self._pool.timeout_s, doing)

    def _prompt_after(self, text: str, results: Sequence[str]) -> np.ndarray:
        """Return the prompt of the next turn, which follows a text or results of tool calls.

        Raises:
            ValueError: the chat format cannot express them.
        """
        served, schemas = self._pool.served, self._pool.schemas
        if self._messages is None or not (self._turns or schemas):
            before = self._turns[-1].tokens if self._turns else self._prompt
            return np.concatenate([before, served.tokenizer.encode(text, add_bos=False)])
        messages = list(self._messages)
        if not self._turns:
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + text}
            self._messages = messages
            return served.chat.prompt(messages, schemas)
        for call, result in zip(self._calls, results, strict=True):
            named = {"tool_call_id": call["id"], "name": call["name"]}
            messages.append({"role": "tool", "content": result, **named})
        if text or not results:
            messages.append({"role": "user", "content": text})
        self._messages, before = messages, self._turns[-1]
        whole = served.chat.bridge(before.prompt, before.completion, messages, schemas)
        if whole is None:
            self._path = len(self._turns)
            whole = served.chat.prompt(messages, schemas)
        return whole


class Agent(Environment):
    """Environment that requests its turns over HTTP; also the scope of its requests.

    The thread of the HTTP server calls `parse`, `submit` and `cancel`, another thread the others.
    """

    def __init__(self, pool: "EnvironmentPool", prompt: Prompt) -> None:
        super().__init__(pool, prompt)
        self.id = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._sent: Messages = ()  # messages of the open request
        self._generation: Generation | None = None  # requested, and not sampled
        self._is_taken = False  # the session has received `_generation`
        self._refusal = ""  # reason why further requests are refused

    def begin(self) -> None:
        self._begin({BASE_URL: self._pool.add(self)})

    def turn(self, response: Response) -> None:
        with self._lock:
            generation, self._generation, self._is_taken = self._generation, None, False
            assert generation is not None, "the session samples requested turns only"
            turn = _Turn(generation.prompt, response.tokens, self._sent)
            self._turns[self._path : self._path + 1] = [turn]
            self._job.restart_deadline()
        finish = "stop" if response.has_eos else "length"
        _notify(generation, Update(0, response.tokens, response.token_logprobs, finish))

    def end(self) -> None:
        self._refuse("this episode has reached search.max_turns or search.max_new_tokens")
        self._job.restart_deadline()

    @property
    def is_answered(self) -> bool:
        return (self._generation is not None and not self._is_taken) or super().is_answered

    def poll(self) -> Request | Ended | None:
        with self._lock:
            generation = self._generation
            if self._failure is None and generation is not None and not self._is_taken:
                self._is_taken = True
                stops = generation.settings.stop_strings
                return Request(
                    generation.prompt,
                    self._path,
                    generation.settings.max_new_tokens,
                    stops.strings if stops else (),
                )
        ended = super().poll()
        if isinstance(ended, Ended) and not (ended.failure or self._turns):
            text = "the agent returned without a sampled turn"
            return self.reject("environment_no_turn", text)
        return ended

    def release(self) -> None:
        super().release()
        self._pool.remove(self)
        self._refuse("this episode has ended")

    def _refuse(self, reason: str) -> None:
        with self._lock:
            self._refusal = reason
            generation, self._generation, self._is_taken = self._generation, None, False
        if generation is not None:
            _notify(generation, ApiError(reason, code="episode_ended"))

    def parse(self, kind: Kind, body: Mapping[str, Any]) -> Call:
        """Return the call of a request for one turn.

        Raises:
            ApiError: the request is refused.
        """
        with self._lock:
            if self._refusal:
                raise ApiError(self._refusal, code="episode_ended")
            if self._generation is not None:
                text = (
                    "the agent sent a request before its previous request was answered. Send one "
                    "request at a time"
                )
                self._failure = "environment_fork", text
                raise ApiError(text, code="environment_fork")
            continued = functools.partial(self._continued, kind, body)
            return parse(kind, body, self._pool.served, 0, continued)

    def submit(self, generation: Generation) -> None:
        """Open a request; the thread of the session answers it."""
        with self._lock:
            self._generation = generation
        self._job.suspend_deadline()  # until the request is answered
        if self._refusal:
            self._refuse(self._refusal)

    def cancel(self, generation: Generation) -> None:
        """End the episode if the request is open: its client has disconnected."""
        with self._lock:
            if self._generation is generation:
                text = "the agent's client disconnected before the answer to its request"
                self._failure = "environment_disconnect", text

    def _continued(self, kind: Kind, body: Mapping[str, Any], prompt: np.ndarray) -> np.ndarray:
        """Return the prompt of a request; a continuation begins with the tokens of its path."""
        self._sent = tuple(body["messages"]) if kind == "chat" else ()
        for path in reversed(range(len(self._turns))):
            turn = self._turns[path]
            if kind == "chat":
                found = self._bridged(body, turn)
            elif isinstance(body.get("prompt"), str):
                tokenizer = self._pool.served.tokenizer
                found = extended(tokenizer, turn.tokens, prompt, skip_special=True)
            else:
                is_same = np.array_equal(prompt[: len(turn.tokens)], turn.tokens)
                found = prompt if is_same else None
            if found is not None:
                self._path = path
                return found
        self._path = len(self._turns)
        return prompt

    def _bridged(self, body: Mapping[str, Any], turn: _Turn) -> np.ndarray | None:
        """Return the prompt of a chat that continues a turn; None if it does not."""
        if turn.messages and not continues(self._sent, turn.messages):
            return None
        chat, tools = self._pool.served.chat, body.get("tools") or []
        # Compare the answer here: a renderer reads only the messages after the answer.
        _, text, calls = _key(chat.message(turn.completion, "", turn.prompt, tools))
        given = [_key(m) for m in body["messages"] if m["role"] == "assistant"][-1:]
        if (text, calls) not in [(text and own[1], calls and own[2]) for own in given]:
            return None
        variables = body.get("chat_template_kwargs") or {}
        return chat.bridge(turn.prompt, turn.completion, body["messages"], tools, variables)


def _key(message: Mapping[str, Any]) -> tuple[str, str, list[Any]]:
    """Return role, text and tool calls (without their IDs) of a message, to compare it."""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        with contextlib.suppress(ValueError):  # not JSON: compared as text
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        calls.append((call["function"]["name"], arguments))
    return message["role"], text_of(message), calls


def continues(messages: Messages, history: Messages) -> bool:
    """Return whether `messages` are `history`, the answer to it, and new messages of the agent."""
    roles = [message["role"] for message in messages[len(history) :]]
    is_answered = roles[:1] == ["assistant"] and "assistant" not in roles[1:]
    start = messages[: len(history)]
    return is_answered and all(map(lambda a, b: _key(a) == _key(b), start, history))


def _notify(generation: Generation, update: Update | Exception) -> None:
    with contextlib.suppress(RuntimeError):  # the server has stopped, its clients are disconnected
        generation.notify(update)


class EnvironmentPool:
    """Thread-safe pool of environments; for agents also the server of their requests.

    An agent that is not a coroutine function has a worker for itself, because it blocks the worker
    for a whole episode.

    Args:
        name: as in `adapters.load`.
        served: the policy, with the sampling settings of the run.
        max_turns: maximum number of the policy's turns in an episode.
        timeout_s: deadline of a call in seconds, and of an agent between two turns.
        has_schemas: whether the policy reads JSON schemas of the tools.
        num_workers: number of workers that episodes share.
        options: further arguments of `WorkerPool`.

    Attributes:
        has_reward, has_tools, is_agent: properties of the environment, set by `check`.
        schemas: JSON schemas of the tools, set by `check` if `has_schemas`.
    """

    def __init__(
        self,
        name: str,
        served: Served,
        *,
        max_turns: int,
        timeout_s: float,
        has_schemas: bool = False,
        num_workers: int = DEFAULT_WORKERS,
        **options: Any,
    ) -> None:
        self.name, self.served = name, served
        self.max_turns, self.timeout_s = max_turns, timeout_s
        self.workers = WorkerPool(
            "environment", make_handler, (name,), num_workers=num_workers, **options
        )
        self.has_reward = self.has_tools = self.is_agent = False
        self.schemas: list[dict[str, Any]] = []
        self._has_schemas, self._is_checked = has_schemas, False
        self._logs = options.get("logs") or "standard error"
        self._failures = FailureLines(f"environment {name}")
        self._agents: dict[str, Agent] = {}
        self._server: HttpServer | None = None

    @property
    def first_token_only(self) -> bool:
        """Return whether the stored prompt is only the first token of the actual prompt.

        The other tokens of the prompt are then stored as observations.
        """
        return self.is_agent or bool(self.schemas)

    def check(self) -> None:
        """Wait until the environment can be created, and start the server of agents.

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
            remedy = f"Its output is in {self._logs}"
            if error.name == "timeout":
                remedy = "Move slow work out of its constructor, or raise --config.reward.timeout_s"
            raise ValueError(f"{subject}: {error}. {remedy}") from None
        if "failure" in answer:
            raise ValueError(
                f"{subject} cannot be used: {answer['reason']}. Give package.module:NAME or "
                "path/to/file.py:NAME, a class without constructor arguments or a function "
                "run(base_url, row)"
            )
        job.close()
        self.has_reward, self.has_tools = answer["has_reward"], answer["has_tools"]
        self.is_agent, self.schemas = answer["is_agent"], answer["schemas"]
        if not answer["shares_workers"]:
            self.workers.num_workers = sys.maxsize
        if self._has_schemas:
            self.workers.run(
                self.workers.end_idle()
            )  # describing tools has imported transformers there
        if self.is_agent:
            application = Application(self._scope, self.served, prefix="/{episode}")
            self._server = HttpServer(application, "agent-server", bind("127.0.0.1", 0))
        self._is_checked = True

    def open(self, prompt: Prompt) -> Environment:
        """Return the environment of a new episode."""
        return Agent(self, prompt) if self.is_agent else Environment(self, prompt)

    def report(self, name: str, text: str, what: str = "episode(s) rejected as") -> None:
        """Print a line about a failure; repeated failures of one name are printed at intervals."""
        self._failures.report(name, text, what)

    def add(self, agent: Agent) -> str:
        """Accept requests of an agent; return its base URL."""
        assert self._server is not None
        self._agents[agent.id] = agent
        return f"http://127.0.0.1:{self._server.port}/{agent.id}/v1"

    def remove(self, agent: Agent) -> None:
        """Refuse requests of an agent."""
        self._agents.pop(agent.id, None)

    def close(self) -> None:
        """Kill all workers, and refuse all requests."""
        for agent in list(self._agents.values()):
            agent.release()
        self.workers.close()
        if self._server is not None:
            self._server.close()
            self._server = None

    def _scope(self, episode: str) -> Agent:
        agent = self._agents.get(episode)
        if agent is None:
            raise ApiError(
                "there is no such episode: it has ended, or the base URL is not the agent's own",
                status=404,
                code="episode_ended",
            )
        return agent
