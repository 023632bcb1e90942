# SPDX-License-Identifier: Apache-2.0
"""One episode with its environment: a coroutine on the loop of the environments' pool.

An environment is user code: it may hang, raise, end its process, or return invalid values. The text
or tool results of a class become the prompt of the policy's next turn. An `Agent` is a program with
an OpenAI client, whose requests go to its own base URL on this machine's loopback interface.
Sampled tokens are never encoded again: a prompt begins with all tokens of an earlier turn of its
path, or it begins a new path: the episode forks.

Invariants: a failure has a name and gives no reward. Every token that is not an observation has the
log-prob of the distribution it was sampled from. A request that is open when its episode ends
receives an error.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tba_jax.decoding.keys import fold_in
from tba_jax.decoding.requests import Response, SamplingSettings
from tba_jax.decoding.stop_strings import StopStrings
from tba_jax.environments.adapters import BASE_URL, ERROR
from tba_jax.flow.trajectory import FinishReason, Prompt, paths_of
from tba_jax.rewards.scores import Score
from tba_jax.serving.chat import Messages, extended, text_of
from tba_jax.serving.protocol import ApiError, Call, Kind, Update, parse
from tba_jax.workers import WorkerFailed

# Folded into the key of a sample with the number of a turn. Larger than the number of any token.
_TURNS = 2**30


class Episode(NamedTuple):
    """A finished episode as host arrays, with t tokens after the prompt.

    Attributes:
        request: number that `submit` of the session returned.
        sample: index of the episode among the samples of the request.
        tokens: int32 [t], sampled tokens and observations.
        token_logprobs: float32 [t], log-probs under the sampling distribution; 0 at observations.
        is_sampled: bool [t], False at observations; None: the policy sampled every token.
        finish: reason of the end.
        version_min, version_max: oldest and newest weight version that read the prompt or drew a
            token.
        temperature: sampling temperature.
        verdict: result of the environment: a reward, or the reason for a missing reward. None:
            reward functions compute the reward.
        environment_s: seconds that the episode waited for its environment; None without one.
        path_lengths: as in `Trajectory`.
        num_failed_calls: number of tool calls that could not be parsed or executed, or that failed.
        token_versions: int32 [t], weight version that drew each token; an observation has the
            version of the previous turn. None: `version_max` drew every token.
    """

    request: int
    sample: int
    tokens: np.ndarray
    token_logprobs: np.ndarray
    is_sampled: np.ndarray | None
    finish: FinishReason
    version_min: int
    version_max: int
    temperature: float
    verdict: Score | None = None
    environment_s: float | None = None
    path_lengths: tuple[int, ...] = ()
    num_failed_calls: int = 0
    token_versions: np.ndarray | None = None

    @property
    def has_eos(self) -> bool:
        """Return whether the episode ended by itself, before a limit."""
        return self.finish in ("eos", "done")

    @property
    def paths(self) -> list[slice]:
        """Return the range of tokens of each path."""
        return paths_of(len(self.tokens), self.path_lengths)

    @property
    def graded_tokens(self) -> np.ndarray:
        """Return the tokens that reward functions grade: all from the first sampled token."""
        return self.tokens[0 if self.is_sampled is None else int(self.is_sampled.argmax()) :]

    @property
    def num_sampled(self) -> int:
        """Return the number of tokens that the policy sampled."""
        return len(self.tokens) if self.is_sampled is None else int(self.is_sampled.sum())


class Rejected(Exception):
    """An episode failed.

    Attributes:
        name: name of the failure.
    """

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


class Attempt(NamedTuple):
    """What an episode begins with; the fields are those of `Episode` and `Session.submit`."""

    request: int
    sample: int
    prompt: Prompt
    key: np.ndarray
    settings: SamplingSettings
    version: int


Sample = Callable[[Attempt, np.ndarray, np.ndarray, SamplingSettings], Awaitable[Response]]
"""Samples a turn: (attempt, prompt, int32 [s], key, settings) -> response; raises `Rejected`."""


class _Path(NamedTuple):
    """Tokens of a path after the prompt, as arrays [t] with the names of `Episode`."""

    tokens: np.ndarray = np.empty(0, np.int32)
    token_logprobs: np.ndarray = np.empty(0, np.float32)
    is_sampled: np.ndarray = np.empty(0, bool)
    token_versions: np.ndarray = np.empty(0, np.int32)


class Environment:
    """An episode with an environment of which the worker has an adapter.

    Args:
        pool: the `EnvironmentPool`.
    """

    def __init__(self, pool: Any, attempt: Attempt, sample: Sample) -> None:
        self.pool, self.attempt, self.sample = pool, attempt, sample
        self.job = pool.workers.open()
        self.row = {"prompt": attempt.prompt.text, **attempt.prompt.columns}
        self.path = 0  # path of the next turn
        self._paths: list[_Path] = []
        self._versions = [attempt.version] * 2  # oldest and newest, of the turns
        self._num_turns = self._num_failed_calls = 0
        self.limit: FinishReason | None = None  # the limit that the episode has reached
        self._sampling_s = 0.0
        chat = self.row["prompt"]
        self._messages: Messages | None = list(chat) if isinstance(chat, list) else None
        # Prompt, tokens and tool calls of the newest turn.
        self._before = self._turn = attempt.prompt.tokens
        self._calls: Sequence[Mapping[str, Any]] = ()

    async def run(self) -> Episode:
        """Run the episode; a failure is printed and named in the result.

        Raises:
            WorkerFailed: the pool was closed.
        """
        start_s, finish, verdict = time.monotonic(), "done", None
        try:
            finish, reward = await self.play()
            if not self._num_turns:
                text = (
                    "no turn was sampled: the agent requested none, or the first text fills "
                    f"search.max_new_tokens = {self.attempt.settings.max_new_tokens}"
                )
                raise Rejected("environment_no_turn", text)
            if self.pool.has_reward:
                verdict = Score(reward, "reward_none" if reward is None else None)
        except Rejected as error:
            self.pool.report(error.name, str(error))
            verdict = Score(None, error.name)
        finally:
            self.job.leave()
        waited_s = time.monotonic() - start_s - self._sampling_s
        return self._episode(self.limit or finish, verdict, waited_s)

    async def play(self) -> tuple[FinishReason, float | None]:
        """Run the episode; return its finish, if it reached no limit, and its reward.

        Raises:
            Rejected: the episode failed. WorkerFailed: the pool was closed.
        """
        answer = await self.ask(("begin", self.row), "reset")
        while "finish" not in answer:
            try:
                prompt = self._prompt_after(answer["text"], answer["results"])
                response = await self.turn(prompt)
                # An environment receives no turn that the limit of tokens has cut.
                message = None if response is None or self.limit else self._read(prompt, response)
            except ValueError as error:
                raise Rejected("environment_template", str(error)) from error
            answer = await self.ask(message, "the reward" if message is None else "a turn")
        return answer["finish"], answer["reward"]

    async def ask(self, message: Any, doing: str) -> dict[str, Any]:
        """Return the worker's answer to a message; `doing` names the call."""
        try:
            answer = await self.job.ask(message, self.pool.timeout_s, doing)
        except WorkerFailed as error:
            if error.name == "closed":
                raise
            name = {"timeout": "environment_timeout", "lost": "environment_lost"}.get(error.name)
            hint = " (reward.timeout_s)" if error.name == "timeout" else ""
            raise Rejected(name or "environment_crash", f"{error}{hint}") from error
        if "failure" in answer:
            raise Rejected(answer["failure"], answer["reason"])
        return answer

    async def turn(
        self, prompt: np.ndarray, max_tokens: int | None = None, stops: StopStrings | None = None
    ) -> Response | None:
        """Sample a turn of `self.path`; return None at a limit of the episode.

        Args:
            prompt: int32 [s], all tokens before the turn.
            max_tokens: maximum number of tokens of the turn; None: those left.
            stops: texts that end the turn; None: search.stop_strings.

        Raises:
            Rejected: the tokens are not valid.
        """
        start, settings = self.attempt.prompt.tokens, self.attempt.settings
        if self._num_turns >= self.pool.max_turns:
            self.limit = "turns"
            return None
        if self.path == len(self._paths):
            self._paths.append(_Path())
            if not np.array_equal(prompt[: len(start)], start):
                text = (
                    f"a request begins with token {prompt[0]}, and not with the prompt of "
                    f"the task, {start[:4].tolist()}: use chat messages in both, "
                    "or plain text in both"
                )
                raise Rejected("environment_first_token", text)
        num_tokens = sum(len(path.tokens) for path in self._paths)
        observed = prompt[len(start) + len(self._paths[self.path].tokens) :]
        room = settings.max_new_tokens - num_tokens - len(observed)
        if room <= 0:
            self.limit = "length"
            return None
        own = dataclasses.replace(
            settings,
            max_new_tokens=room if max_tokens is None else min(room, max_tokens),
            stop_strings=stops or settings.stop_strings,
        )
        key, begun_s = self.attempt.key, time.monotonic()
        if self._num_turns:
            key = fold_in(key, _TURNS + self._num_turns)
        y = await self.sample(self.attempt, prompt, key, own)
        self._sampling_s += time.monotonic() - begun_s
        drawn = y.token_versions
        if drawn is None:
            drawn = np.full(len(y.tokens), y.version_max)
        if not self._num_turns:
            self._versions = [y.version_min] * 2
        size = len(observed)
        added = _Path(
            np.concatenate([observed, y.tokens]),
            np.concatenate([np.zeros(size), y.token_logprobs]),
            np.arange(size + len(y.tokens)) >= size,
            np.concatenate([np.full(size, self._versions[1]), drawn]),
        )
        columns = zip(self._paths[self.path], added, strict=True)
        self._paths[self.path] = _Path(*map(np.concatenate, columns))
        self._versions[1] = y.version_max
        self._num_turns += 1
        if not y.has_eos and len(y.tokens) >= room:
            self.limit = "length"
        return y

    def _read(self, prompt: np.ndarray, response: Response) -> tuple[str, Any]:
        """Return text and tool calls of a turn, and append the turn to the conversation."""
        served, schemas, tokens = self.pool.served, self.pool.schemas, response.tokens
        text = served.tokenizer.decode(tokens)
        self._before, self._turn = prompt, tokens
        if self._messages is not None:
            message, calls = served.chat.read(tokens, text, prompt, schemas)
            self._messages = [*self._messages, message]
            self._calls = calls if schemas else ()
        return text, self._calls

    def _prompt_after(self, text: str, results: Sequence[str]) -> np.ndarray:
        """Return the prompt of the next turn, which follows a text or results of tool calls.

        Raises:
            ValueError: the chat format cannot express them.
        """
        served, schemas = self.pool.served, self.pool.schemas
        failed = [result for result in results if result.startswith(ERROR)]
        self._num_failed_calls += len(failed)
        if failed:
            self.pool.report("failed_tool_call", failed[0], "times")
        is_first = not self._num_turns
        if self._messages is None or (is_first and not schemas):
            added = served.tokenizer.encode(text, add_bos=False)
            before = [self.attempt.prompt.tokens] if is_first else [self._before, self._turn]
            return np.concatenate([*before, added])
        messages = list(self._messages)
        if is_first:
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + text}
            self._messages = messages
            return served.chat.prompt(messages, schemas)
        for call, result in zip(self._calls, results, strict=True):
            named = {"tool_call_id": call["id"], "name": call["name"]}
            messages.append({"role": "tool", "content": result, **named})
        if text or not results:
            messages.append({"role": "user", "content": text})
        self._messages = messages
        whole = served.chat.bridge(self._before, self._turn, messages, schemas)
        if whole is None:
            self.path += 1
            whole = served.chat.prompt(messages, schemas)
        return whole

    def _episode(
        self, finish: FinishReason, verdict: Score | None, environment_s: float
    ) -> Episode:
        paths = [path for path in self._paths if path.is_sampled.any()]
        if not paths:  # No token was sampled, but a rejected response still needs one.
            last, version = self.attempt.prompt.tokens[-1:], np.array(self._versions[:1])
            paths = [_Path(last, np.zeros(1), np.ones(1, bool), version)]
        tokens, logprobs, is_sampled, versions = map(np.concatenate, zip(*paths, strict=True))
        oldest, newest = self._versions
        return Episode(
            self.attempt.request,
            self.attempt.sample,
            tokens.astype(np.int32),
            logprobs.astype(np.float32),
            is_sampled,
            finish,
            oldest,
            newest,
            self.attempt.settings.temperature,
            verdict,
            environment_s,
            tuple(len(path.tokens) for path in paths) if len(paths) > 1 else (),
            self._num_failed_calls,
            versions.astype(np.int32),
        )


class _Turn(NamedTuple):
    """The newest turn of a path: prompt and sampled tokens; messages of a chat, with the turn's."""

    prompt: np.ndarray
    completion: np.ndarray
    messages: Messages

    @property
    def tokens(self) -> np.ndarray:
        """Return int32 [s]: all tokens up to the end of the turn."""
        return np.concatenate([self.prompt, self.completion])


class Agent(Environment):
    """An episode whose program requests its turns over HTTP, one after another."""

    def __init__(self, pool: Any, attempt: Attempt, sample: Sample) -> None:
        super().__init__(pool, attempt, sample)
        self.id = ""  # part of its base URL, given by the pool
        self._turns: list[_Turn] = []  # newest turn of each path
        self._free = asyncio.Lock()  # held while a request is open
        self._open: asyncio.Task[Any] | None = None  # the open request
        self._failed: asyncio.Future[Rejected] = asyncio.get_running_loop().create_future()
        self._refusal = ""  # reason why further requests are refused

    async def play(self) -> tuple[FinishReason, float | None]:
        begin = ("begin", {**self.row, BASE_URL: self.pool.add(self)})
        running = asyncio.ensure_future(self.ask(begin, "run()"))
        try:
            await asyncio.wait([running, self._failed], return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                raise self._failed.result()
            reward = running.result()["reward"]
        finally:
            running.cancel()
            self.pool.remove(self)
            self._refuse("this episode has ended")
            if self._open is not None:
                self._open.cancel()
        return "done", reward

    def _refuse(self, reason: str) -> ApiError:
        self._refusal = reason
        return ApiError(reason, code="episode_ended")

    async def answer(self, kind: Kind, body: Mapping[str, Any]) -> tuple[Call, Update]:
        """Return the call of a request for one turn, and the turn.

        Raises:
            ApiError: the request is refused.
        """
        async with self._free:
            if self._refusal:
                raise self._refuse(self._refusal)
            continued = functools.partial(self._continued, kind, body)
            call = parse(kind, body, self.pool.served, 0, continued)
            prompt, settings = call.prompt, call.settings
            self._open = asyncio.current_task()
            self.job.suspend_deadline()
            try:
                response = await self.turn(prompt, settings.max_new_tokens, settings.stop_strings)
            except asyncio.CancelledError:
                if self._refusal:
                    raise self._refuse(self._refusal) from None
                text = "the agent's client disconnected before the answer to its request"
                self._fail(Rejected("environment_disconnect", text))
                raise
            except Rejected as error:
                self._fail(error)
                raise ApiError(str(error)) from error
            finally:
                self._open = None
                self.job.restart_deadline()
            if response is None:
                limits = "search.max_turns or search.max_new_tokens"
                raise self._refuse(f"this episode has reached {limits}")
            finish = "stop" if response.has_eos else "length"
            update = Update(response.tokens, response.token_logprobs, finish)
            messages: Messages = ()
            if kind == "chat":
                messages = [*body["messages"], call.message(update)]
            turn = _Turn(prompt, response.tokens, messages)
            self._turns[self.path : self.path + 1] = [turn]
            return call, update

    def _fail(self, error: Rejected) -> None:
        if not self._failed.done():
            self._failed.set_result(error)

    def _continued(self, kind: Kind, body: Mapping[str, Any], prompt: np.ndarray) -> np.ndarray:
        """Return the prompt of a request; a continuation begins with the tokens of its path."""
        served = self.pool.served
        for path, turn in reversed(list(enumerate(self._turns))):
            found = None
            if kind == "chat":
                messages, tools = body["messages"], body.get("tools") or []
                if turn.messages and continues(messages, turn.messages):
                    variables = body.get("chat_template_kwargs") or {}
                    before = turn.prompt, turn.completion
                    found = served.chat.bridge(*before, messages, tools, variables)
            elif isinstance(body.get("prompt"), str):
                found = extended(served.tokenizer, turn.tokens, prompt, skip_special=True)
            elif np.array_equal(prompt[: len(turn.tokens)], turn.tokens):
                found = prompt
            if found is not None:
                self.path = path
                return found
        self.path = len(self._turns)
        return prompt


def continues(messages: Messages, history: Messages) -> bool:
    """Return whether `messages` are `history`, which ends with an answer, and new messages."""
    size = len(history)
    is_new = all(message["role"] != "assistant" for message in messages[size:])
    return is_new and list(map(_key, messages[:size])) == list(map(_key, history))


def _key(message: Mapping[str, Any]) -> tuple[str, str, list[Any]]:
    """Return role, text and tool calls (without their IDs) of a message, to compare it."""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        with contextlib.suppress(ValueError):  # not JSON: compared as text
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        calls.append((call["function"]["name"], arguments))
    return message["role"], text_of(message), calls
