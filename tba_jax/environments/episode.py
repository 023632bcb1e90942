# SPDX-License-Identifier: Apache-2.0
"""One episode with its environment: a coroutine on the loop of the environments' pool.

The text or tool results of a class become the prompt of the policy's next turn. An `Agent` is a
program with an OpenAI client, whose requests go to its own base URL. Sampled tokens are never
encoded again: a prompt begins with all tokens of an earlier turn of its path, or it begins a new
path: the episode forks.

Invariants: a failure of the user's code has a name and gives no reward. Every token that is not an
observation has the log-prob of the distribution it was sampled from. A request that is open when
its episode ends receives an error.
"""

import asyncio
import contextlib
import dataclasses
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tba_jax.decoding.keys import fold_in
from tba_jax.decoding.requests import Response, SamplingSettings
from tba_jax.environments.adapters import BASE_URL, ERROR
from tba_jax.flow.trajectory import FinishReason, Prompt, paths_of
from tba_jax.rewards.scores import Score
from tba_jax.serving.chat import Chat, Messages, extended
from tba_jax.serving.failures import Failure
from tba_jax.serving.protocol import ApiError, Call, Kind, Update, parse
from tba_jax.workers import WorkerFailed

# Folded into the key of a sample with the number of a turn. Larger than the number of any token.
_TURNS = 2**30


class Episode(NamedTuple):
    """A finished episode as host arrays, with t tokens after the prompt.

    Fields without a description are those of `decoding.requests.Response`.

    Attributes:
        tokens: int32 [t], sampled tokens and observations.
        token_logprobs: float32 [t], log-probs under the sampling distribution; 0 at observations.
        is_sampled: bool [t], False at observations; None: the policy sampled every token.
        finish: reason of the end.
        verdict: reward of the environment, or the reason for a missing one; None: it gives none.
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


class Attempt(NamedTuple):
    """What an episode begins with; fields as of `Episode` and `Session.submit`."""

    request: int
    sample: int
    prompt: Prompt
    key: np.ndarray
    settings: SamplingSettings
    version: int


Sample = Callable[[Attempt, np.ndarray, np.ndarray, SamplingSettings], Awaitable[Response]]
"""Samples a turn: (attempt, prompt, int32 [s], key, settings) -> response; raises `Failure`."""

# Columns of `Episode`, for each token of a path.
_TOKENS = [("id", np.int32), ("logprob", np.float32), ("is_sampled", bool), ("version", np.int32)]


def _table(ids: Any, logprob: Any = 0.0, is_sampled: bool = False, version: Any = 0) -> np.ndarray:
    """Return tokens as a structured array [s], whose columns are those of `_TOKENS`."""
    table = np.empty(len(ids), _TOKENS)
    columns = ids, logprob, is_sampled, version
    for (name, _), value in zip(_TOKENS, columns, strict=True):
        table[name] = value
    return table


class _Path(NamedTuple):
    """One path of an episode.

    Attributes:
        tokens: all tokens as of `_table`, with those of the task's prompt.
        num_before: number of tokens before the newest turn.
        messages: of a chat, with the answer of the newest turn.
    """

    tokens: np.ndarray
    num_before: int = 0
    messages: Messages = ()


class Environment:
    """An episode of an `EnvironmentPool`, whose worker has an adapter of the environment."""

    def __init__(self, pool: Any, attempt: Attempt, sample: Sample) -> None:
        self.pool, self.attempt, self.sample = pool, attempt, sample
        self.job = pool.workers.open()
        self.row = {"prompt": attempt.prompt.text, **attempt.prompt.columns}
        self.limit: FinishReason | None = None  # the limit that the episode has reached
        self.paths: list[_Path] = []
        self._versions = [attempt.version] * 2  # oldest and newest, of the turns
        self._num_turns = self._num_failed_calls = 0
        self._sampling_s = 0.0
        self._messages: list[Mapping[str, Any]] = []  # of a chat whose environment is no agent

    async def run(self) -> Episode:
        """Run the episode; a failure is printed and named, a closed pool raises WorkerFailed."""
        start_s, finish, verdict = time.monotonic(), "done", None
        try:
            finish, reward = await self.play()
            if not self._num_turns:
                limit = f"search.max_new_tokens = {self.attempt.settings.max_new_tokens}"
                text = f"no turn was sampled: none was requested, or the first text fills {limit}"
                raise Failure("environment_no_turn", text)
            if self.pool.has_reward:
                verdict = Score(reward, "reward_none" if reward is None else None)
        except Failure as error:
            self.pool.failures.report(error.name, str(error), "episode(s) rejected as")
            verdict = Score(None, error.name)
        finally:
            self.job.leave()
        waited_s = time.monotonic() - start_s - self._sampling_s
        return self._episode(self.limit or finish, verdict, waited_s)

    async def play(self) -> tuple[FinishReason, float | None]:
        """Return finish, unless a limit is reached, and reward; raise Failure or WorkerFailed."""
        answer = await self.ask(("begin", self.row), "reset")
        while "finish" not in answer:
            try:
                number, prompt = self._continued_by(answer["added"])
                response = await self.turn(number, prompt)
                # An environment receives no turn that the limit of tokens has cut.
                message = None if response is None or self.limit else self._read(number, response)
            except ValueError as error:
                raise Failure("environment_template", str(error)) from error
            answer = await self.ask(message, "the reward" if message is None else "a turn")
        return answer["finish"], answer["reward"]

    async def ask(self, message: Any, doing: str) -> dict[str, Any]:
        """Return the worker's answer to a message; `doing` names the call."""
        try:
            answer = await self.job.ask(message, self.pool.timeout_s, doing)
        except WorkerFailed as error:
            if error.name == "closed":
                raise
            name = error.name if error.name in ("timeout", "lost") else "crash"
            hint = " (reward.timeout_s)" if name == "timeout" else ""
            raise Failure(f"environment_{name}", f"{error}{hint}") from error
        if "failure" in answer:
            raise Failure(answer["failure"], answer["reason"])
        return answer

    async def turn(
        self, number: int, prompt: np.ndarray, wanted: SamplingSettings | None = None
    ) -> Response | None:
        """Sample a turn of a path; return None at a limit, or raise Failure for invalid tokens.

        Args:
            number: index of the path; the number of paths begins a new one.
            prompt: int32 [s], all tokens before the turn, which begin with those of the path.
            wanted: settings of a request: maximum number of tokens, and texts that end the turn.
        """
        start, settings = self.attempt.prompt.tokens, self.attempt.settings
        if self._num_turns >= self.pool.max_turns:
            self.limit = "turns"
            return None
        if number == len(self.paths):
            if not np.array_equal(prompt[: len(start)], start):
                text = f"a request begins with token {prompt[0]}, and not with the prompt of the "
                text += f"task, {start[:4].tolist()}: use chat messages or plain text in both"
                raise Failure("environment_first_token", text)
            self.paths.append(_Path(_table(start)))
        before = self.paths[number].tokens
        observed = _table(prompt[len(before) :], version=self._versions[1])
        num_tokens = sum(len(x.tokens) - len(start) for x in self.paths) + len(observed)
        room = settings.max_new_tokens - num_tokens
        if room <= 0:
            self.limit = "length"
            return None
        wanted = wanted or settings
        stops = wanted.stop_strings or settings.stop_strings
        most = min(room, wanted.max_new_tokens)
        own = dataclasses.replace(settings, max_new_tokens=most, stop_strings=stops)
        key, begun_s = self.attempt.key, time.monotonic()
        if self._num_turns:
            key = fold_in(key, _TURNS + self._num_turns)
        y = await self.sample(self.attempt, prompt, key, own)
        self._sampling_s += time.monotonic() - begun_s
        sampled = _table(y.tokens, y.token_logprobs, True, y.token_versions)
        self.paths[number] = _Path(np.concatenate([before, observed, sampled]), len(prompt))
        oldest = self._versions[0] if self._num_turns else y.version_min
        self._versions = [oldest, y.version_max]
        self._num_turns += 1
        if not y.has_eos and len(y.tokens) >= room:
            self.limit = "length"
        return y

    def continued_chat(self, chat: Chat) -> tuple[int, np.ndarray]:
        """Return path and prompt of a chat, which continues a path or begins a new one.

        Raises ValueError if the chat format cannot express the messages or tools.
        """
        chat_format = self.pool.served.chat
        for i, path in reversed(list(enumerate(self.paths))):
            if path.messages and continues(chat.messages, path.messages):
                found = chat_format.bridge(*np.split(path.tokens["id"], [path.num_before]), chat)
                if found is not None:
                    return i, found
        return len(self.paths), chat_format.prompt(chat)

    def _continued_by(self, added: str | Messages) -> tuple[int, np.ndarray]:
        """Return path and prompt of the turn after a text, or after new messages of a chat."""
        start, schemas = self.attempt.prompt.tokens, self.pool.schemas
        if isinstance(added, str):
            before = self.paths[0].tokens["id"] if self.paths else start
            tokens = self.pool.served.tokenizer.encode(added, add_bos=False)
            return 0, np.concatenate([before, tokens])
        self._messages += added
        results = [x["content"] for x in added if x["role"] == "tool" and self.paths]
        if failed := [result for result in results if result.startswith(ERROR)]:
            self._num_failed_calls += len(failed)
            self.pool.failures.report("failed_tool_call", failed[0], "times")
        if not (self.paths or schemas):  # the whole prompt is stored
            return 0, start
        return self.continued_chat(Chat(self._messages, schemas))

    def _read(self, number: int, response: Response) -> tuple[str, Any]:
        """Return text and tool calls of a path's newest turn, and add it to the messages."""
        served, schemas, path = self.pool.served, self.pool.schemas, self.paths[number]
        text = served.tokenizer.decode(response.tokens)
        if not self._messages:
            return text, ()
        prompt = path.tokens["id"][: path.num_before]
        message, calls = served.chat.read(response.tokens, text, prompt, schemas)
        self._messages.append(message)
        self.paths[number] = path._replace(messages=list(self._messages))
        return text, calls if schemas else ()

    def _episode(
        self, finish: FinishReason, verdict: Score | None, environment_s: float
    ) -> Episode:
        attempt, (oldest, newest) = self.attempt, self._versions
        start = attempt.prompt.tokens
        paths = [x.tokens[len(start) :] for x in self.paths if x.tokens["is_sampled"].any()]
        # No token was sampled, but a rejected response still needs one.
        paths = paths or [_table(start[-1:], is_sampled=True, version=oldest)]
        tokens = np.concatenate(paths)
        return Episode(
            attempt.request,
            attempt.sample,
            tokens["id"].copy(),
            tokens["logprob"].copy(),
            tokens["is_sampled"].copy(),
            finish,
            oldest,
            newest,
            attempt.settings.temperature,
            verdict,
            environment_s,
            tuple(map(len, paths)) if len(paths) > 1 else (),
            self._num_failed_calls,
            tokens["version"].copy(),
        )


class Agent(Environment):
    """An episode whose program requests its turns over HTTP, one after another."""

    def __init__(self, pool: Any, attempt: Attempt, sample: Sample) -> None:
        super().__init__(pool, attempt, sample)
        self.id = secrets.token_hex(16)  # part of its base URL
        self.request: asyncio.Task[Any] | None = None  # the open one
        self._free = asyncio.Lock()  # held while a request is open
        self._failed: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()
        self._refusal = ""  # reason why further requests are refused

    async def play(self) -> tuple[FinishReason, float | None]:
        begin = ("begin", {**self.row, BASE_URL: self.pool.url_of(self)})
        running = asyncio.ensure_future(self.ask(begin, "run()"))
        try:
            await asyncio.wait([running, self._failed], return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                raise self._failed.result()
            return "done", running.result()["reward"]
        finally:
            running.cancel()
            del self.pool.agents[self.id]
            self._refusal = "this episode has ended"
            if self.request is not None:
                self.request.cancel()

    async def answer(self, kind: Kind, body: Mapping[str, Any]) -> tuple[Call, Update]:
        """Return the call of a request for one turn, and the turn, or raise ApiError."""
        async with self._free:
            self._check_open()
            call = parse(kind, body, self.pool.served, 0)
            number, prompt = self._continued(call)
            self.request = asyncio.current_task()
            self.job.suspend_deadline()
            try:
                response = await self.turn(number, prompt, call.settings)
            except asyncio.CancelledError:
                self._check_open()
                text = "the agent's client disconnected before the answer to its request"
                self._failed.set_result(Failure("environment_disconnect", text))
                raise
            except Failure as error:
                self._failed.set_result(error)
                raise ApiError(str(error)) from error
            finally:
                self.request = None
                self.job.restart_deadline()
            if response is None:
                limits = "search.max_turns or search.max_new_tokens"
                self._refusal = f"this episode has reached {limits}"
            self._check_open()
            assert response is not None
            call = dataclasses.replace(call, prompt=prompt)
            finish = "stop" if response.has_eos else "length"
            update = Update(response.tokens, response.token_logprobs, finish)
            if kind == "chat":
                messages = [*call.chat.messages, call.message(update)]
                self.paths[number] = self.paths[number]._replace(messages=messages)
            return call, update

    def _check_open(self) -> None:
        if self._refusal or self._failed.done():
            raise ApiError(self._refusal or "this episode has failed", code="episode_ended")

    def _continued(self, call: Call) -> tuple[int, np.ndarray]:
        """Return path and prompt of a request; the prompt begins with all tokens of the path."""
        if call.kind == "chat":
            return self.continued_chat(call.chat)
        is_text = call.kind == "completions" and isinstance(call.request.prompt, str)
        for i, path in reversed(list(enumerate(self.paths))):
            before, found = path.tokens["id"], None
            if is_text:
                tokenizer = self.pool.served.tokenizer
                found = extended(tokenizer, before, call.prompt, skip_special=True)
            elif np.array_equal(call.prompt[: len(before)], before):
                found = call.prompt
            if found is not None:
                return i, found
        return len(self.paths), call.prompt


def continues(messages: Messages, history: Messages) -> bool:
    """Return whether `messages` are `history`, which ends with an answer, and new messages."""
    size = len(history)
    is_new = all(message["role"] != "assistant" for message in messages[size:])
    return is_new and list(map(_key, messages[:size])) == list(map(_key, history))


def _key(message: Mapping[str, Any]) -> tuple[str, str, list[Any]]:
    """Return role, text and tool calls (without their IDs) of a message, to compare it."""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"].get("arguments")
        with contextlib.suppress(ValueError):  # not JSON: compared as text
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        calls.append((call["function"].get("name"), arguments))
    return message["role"], message.get("content") or "", calls
