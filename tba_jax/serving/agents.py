# SPDX-License-Identifier: Apache-2.0
"""Agents: programs with an OpenAI client that act as environments of a training run.

An agent is a function `run(base_url, row)` in an environment process. It, or a program that it
starts, sends requests to its base URL on this machine's loopback interface. Each request is a turn
of one episode, sampled by the searcher's decode session; the return value is the reward.

The prompt of a request begins with all tokens of an earlier turn as they were sampled, or it begins
a new path of the episode: the episode forks. Invariant: a request that is open when its episode
ends receives an error.
"""

import contextlib
import functools
import json
import secrets
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from tba_jax.decoding.requests import Response
from tba_jax.environments.adapters import BASE_URL
from tba_jax.environments.chat import Messages, extended, is_same, plain_text
from tba_jax.environments.pool import Answer, Environment, EnvironmentPool, Request
from tba_jax.remote.http_server import HttpServer, bind
from tba_jax.serving.protocol import ApiError, Call, Kind, Served, parse
from tba_jax.serving.queue import Generation, Update
from tba_jax.serving.server import Application, Scope

_MAX_REQUESTS = 1024
_NO_TURN = "environment_no_turn", "the agent returned without a sampled turn"


class Agent:
    """One agent: the environment of its episode and the scope of its requests.

    The thread of the episode session calls the methods of an environment; the thread of the HTTP
    server calls those of a scope.
    """

    def __init__(self, pool: "AgentPool", process: Environment) -> None:
        self.id = secrets.token_hex(16)
        self._pool, self._process = pool, process
        self._lock = threading.Lock()
        # Prompt, sampled tokens and messages of the newest turn of each path.
        self._turns: list[tuple[np.ndarray, np.ndarray, Messages]] = []
        self._path, self._messages = 0, ()  # path and messages of the open request
        self._generation: Generation | None = None  # requested, and not sampled
        self._is_taken = False  # the session has received `_generation`
        self._refusal = ""  # reason why further requests are refused
        self._failure: tuple[str, str] | None = None  # name and description
        self._has_returned = False

    # Methods of an environment.

    def begin(self, row: Mapping[str, Any]) -> None:
        """Start the agent with a row of the data."""
        self._process.begin({**row, BASE_URL: self._pool.add(self)})

    def turn(self, text: str, response: Response) -> None:
        """Answer the agent's open request with the sampled turn."""
        with self._lock:
            generation, self._generation, self._is_taken = self._generation, None, False
            assert generation is not None, "the session samples requested turns only"
            self._turns[self._path :] = [
                (generation.prompt, response.tokens, self._messages),
                *self._turns[self._path + 1 :],
            ]
            self._process.job.restart_deadline()
        finish = "stop" if response.has_eos else "length"
        _notify(generation, Update(0, response.tokens, response.token_logprobs, finish))

    def end(self) -> None:
        """Refuse all further requests because of a limit; the agent may still return a reward."""
        self._refuse("this episode has reached search.max_turns or search.max_new_tokens")
        self._process.job.restart_deadline()

    @property
    def is_answered(self) -> bool:
        """Return whether `poll` would return a request, a reward or a failure."""
        is_requested = self._generation is not None and not self._is_taken
        return is_requested or self._failure is not None or self._process.is_answered

    def poll(self) -> Answer | None:
        """Return the next request, the reward or a failure; None if none has arrived.

        After a reward or a failure further requests are refused.
        """
        with self._lock:
            generation, failure = self._generation, self._failure
            if failure is None and generation is not None and not self._is_taken:
                self._is_taken = True
                return Answer(request=self._request(generation))
        answer = self._process.poll()
        if answer is None and failure is None:
            return None
        if answer is None:
            assert failure is not None
            answer = self._process.reject(*failure)
        elif not answer.failure:
            self._has_returned = True
            failure = failure or (None if self._turns else _NO_TURN)
            if failure is not None:
                self.release()
                self._pool.report(*failure)
                answer = Answer(failure=failure[0])
        self.close()
        return answer

    def release(self) -> None:
        """Return the process to the pool, or end it if the agent still runs."""
        self._process.release()
        if not self._has_returned:
            self.close()

    def close(self) -> None:
        """Refuse the open request and all later requests."""
        self._pool.remove(self)
        self._refuse("this episode has ended")

    def _refuse(self, reason: str) -> None:
        with self._lock:
            self._refusal = reason
            generation, self._generation, self._is_taken = self._generation, None, False
        if generation is not None:
            _notify(generation, ApiError(reason, code="episode_ended"))

    def _request(self, generation: Generation) -> Request:
        start = 0
        if self._path < len(self._turns):
            start = sum(map(len, self._turns[self._path][:2]))
        strings = generation.settings.stop_strings
        return Request(
            generation.prompt[start:].tolist(),
            generation.settings.max_new_tokens,
            list(strings.strings) if strings else [],
            self._path,
        )

    # Methods of a scope.

    def parse(self, kind: Kind, body: Mapping[str, Any]) -> Call:
        served = self._pool.served
        with self._lock:
            if self._refusal:
                raise ApiError(self._refusal, code="episode_ended")
            if self._generation is not None:
                raise self._failed(
                    "the agent sent a request before its previous request was answered. Send one "
                    "request at a time"
                )
            call = parse(kind, body, served, 0, functools.partial(self._extended, kind, body))
        if len(call.prompts) * call.num_samples > 1:
            raise ApiError("n: a turn of an episode has one sample. Set 1", param="n")
        if body.get("seed") is not None:
            raise ApiError("seed: the seed is that of the training run. Leave it out", param="seed")
        if set(call.settings[0].stop_ids or ()) != set(served.eos_ids):
            raise ApiError(
                "stop_token_ids and ignore_eos: --config.search.stop_ids of the training run sets "
                "the end tokens. Leave them out",
                param="stop_token_ids",
            )
        return call

    def submit(self, generation: Generation) -> None:
        with self._lock:
            self._generation = generation
        self._process.job.suspend_deadline()  # until the request is answered
        if self._refusal:
            self._refuse(self._refusal)

    def cancel(self, generation: Generation) -> None:
        with self._lock:
            if self._generation is generation:
                text = "the agent's client disconnected before the answer to its request"
                self._failure = "environment_disconnect", text

    def _extended(self, kind: Kind, body: Mapping[str, Any], prompt: np.ndarray) -> np.ndarray:
        """Return the prompt of a request; a continuation begins with the tokens of its path.

        Raises:
            ApiError: the request continues no path, and the run does not allow forks.
        """
        self._messages = tuple(body["messages"]) if kind == "chat" else ()
        for path in reversed(range(len(self._turns))):
            previous, completion, history = self._turns[path]
            if history and not continues(self._messages, history):
                continue
            found = self._continued(kind, body, prompt, previous, completion)
            if found is not None:
                self._path = path
                return found
        if self._turns and not self._pool.allows_forks:
            raise self._failed(
                "a request of the agent does not continue the conversation. Begin each request "
                "with all earlier messages or tokens, unchanged"
            )
        self._path = len(self._turns)
        return prompt

    def _continued(
        self,
        kind: Kind,
        body: Mapping[str, Any],
        prompt: np.ndarray,
        previous: np.ndarray,
        completion: np.ndarray,
    ) -> np.ndarray | None:
        """Return the prompt of the next turn, which begins with the tokens of the turn before.

        None if the request does not continue that turn.
        """
        before = np.concatenate([previous, completion])
        if kind == "chat":
            chat, tools = self._pool.served.chat, body.get("tools") or []
            # Compare the answer here: a renderer reads only the messages after the answer.
            answer = chat.message(completion, "", previous, tools)
            given = [m for m in body["messages"] if m["role"] == "assistant"][-1:]
            if answer["content"] and answer["content"] not in map(plain_text, given):
                return None
            if (calls := calls_of(answer)) and calls not in map(calls_of, given):
                return None
            variables = body.get("chat_template_kwargs") or {}
            return chat.bridge(previous, completion, body["messages"], tools, variables)
        if isinstance(body.get("prompt"), str):
            return extended(self._pool.served.tokenizer, before, prompt, skip_special=True)
        return prompt if np.array_equal(prompt[: len(before)], before) else None

    def _failed(self, text: str) -> ApiError:
        self._failure = "environment_fork", text
        return ApiError(text, code="environment_fork")


def calls_of(message: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return names and arguments of the tool calls of a message, without their IDs."""
    found = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        with contextlib.suppress(ValueError):  # not JSON: compared as text
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        found.append((call["function"]["name"], arguments))
    return found


def continues(messages: Messages, history: Messages) -> bool:
    """Return whether `messages` are `history`, the answer to it, and new messages of the agent."""
    if len(messages) <= len(history):
        return False
    added = [message["role"] for message in messages[len(history) :]]
    is_answered = added[0] == "assistant" and "assistant" not in added[1:]
    return is_answered and all(map(is_same, messages, history))


def _notify(generation: Generation, update: Update | Exception) -> None:
    try:
        generation.notify(update)
    except RuntimeError:
        """The server has stopped, and its clients are disconnected."""


class AgentPool(EnvironmentPool):
    """Pool of environment processes; if they run agents, also the server of their requests.

    Args:
        name: as in `EnvironmentPool`.
        served: the policy, with the sampling settings of the run.
        allows_forks: whether a request that continues no earlier turn begins a new path of its
            episode; if not, the episode is rejected.
        options: further arguments of `EnvironmentPool`; `timeout_s` is also the deadline of an
            agent between two turns.
    """

    def __init__(
        self, name: str, served: Served, *, allows_forks: bool = False, **options: Any
    ) -> None:
        super().__init__(name, **options)
        self.allows_forks = allows_forks
        self.served = served
        self._agents: dict[str, Agent] = {}
        self._server: HttpServer | None = None

    def check(self) -> None:
        super().check()
        if self.is_agent and self._server is None:
            application = Application(
                self._scope, self.served, prefix="/{episode}", max_requests=_MAX_REQUESTS
            )
            self._server = HttpServer(application, "agent-server", bind("127.0.0.1", 0))
            self._server.start()

    def open(self) -> Environment | Agent:
        process = super().open()
        return Agent(self, process) if self.is_agent else process

    def add(self, agent: Agent) -> str:
        """Accept requests of an agent; return its base URL."""
        assert self._server is not None
        self._agents[agent.id] = agent
        return f"http://127.0.0.1:{self._server.port}/{agent.id}/v1"

    def remove(self, agent: Agent) -> None:
        """Refuse requests of an agent."""
        self._agents.pop(agent.id, None)

    def close(self) -> None:
        for agent in list(self._agents.values()):
            agent.close()
        super().close()
        if self._server is not None:
            self._server.close()
            self._server = None

    def _scope(self, episode: str) -> Scope:
        agent = self._agents.get(episode)
        if agent is None:
            raise ApiError(
                "there is no such episode: it has ended, or the base URL is not the agent's own",
                status=404,
                code="episode_ended",
            )
        return agent
