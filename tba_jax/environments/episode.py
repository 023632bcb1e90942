# SPDX-License-Identifier: Apache-2.0
"""One episode with its environment, as a coroutine on the loop of the environments' pool.

Text or tool results from the environment become the prompt of the policy's next turn. An `Agent` is
a program with an OpenAI client, which sends its requests to the base URL of its episode. A prompt
that begins with all tokens of an earlier turn continues the path of that turn. Any other prompt
begins a new path: the episode forks.

Invariants: no sampled token is encoded again. A failure of the user's code has a name and no
reward. Each sampled token has its log-prob under the distribution that it was sampled from. A
request that is open when its episode ends receives an error.
"""

import asyncio
import contextlib
import dataclasses
import json
import math
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tba_jax.decoding.requests import Response, SamplingSettings
from tba_jax.decoding.sampling import fold_in
from tba_jax.environments.adapters import BASE_URL, ERROR
from tba_jax.flow.trajectory import FinishReason, Prompt, paths_of
from tba_jax.rewards.scores import Score
from tba_jax.serving.chat import Chat, Messages, extended
from tba_jax.serving.failures import ApiError, Failure
from tba_jax.workers import Job, WorkerFailed

if TYPE_CHECKING:
    from tba_jax.serving.protocol import Call, Kind, Update

# Added to the number of a turn in the turn's key. Larger than the number of any token.
_TURNS = 2**30
_TEMPLATE = "environment_template"  # the chat format cannot express or read a message


class Episode(NamedTuple):
    """A finished episode as host arrays, with t tokens after the prompt.

    Fields without a comment are those of `decoding.requests.Response`.
    """

    request: int
    sample: int
    tokens: np.ndarray  # int32 [t], sampled tokens and observations
    token_logprobs: np.ndarray  # float32 [t], as sampled; 0 at observations
    is_sampled: np.ndarray | None  # bool [t], False at observations; None: all were sampled
    finish: FinishReason
    version_min: int
    version_max: int
    temperature: float
    verdict: Score | None = None  # of the environment; None: it gives no rewards
    environment_s: float | None = None  # seconds of waiting for the environment; None without one
    path_lengths: tuple[int, ...] = ()  # as in `Trajectory`
    num_failed_calls: int = 0  # tool calls that could not be parsed or executed, or that failed

    @property
    def has_eos(self) -> bool:
        return self.finish in ("eos", "done")

    @property
    def paths(self) -> list[slice]:
        return paths_of(len(self.tokens), self.path_lengths)

    @property
    def graded_tokens(self) -> np.ndarray:
        """Return the tokens that reward functions grade: all from the first sampled one."""
        return self.tokens[0 if self.is_sampled is None else int(self.is_sampled.argmax()) :]

    @property
    def num_sampled(self) -> int:
        return len(self.tokens) if self.is_sampled is None else int(self.is_sampled.sum())


class Attempt(NamedTuple):
    """Input of an episode; fields as of `Episode` and `Session.submit`."""

    request: int
    sample: int
    prompt: Prompt
    key: np.ndarray
    settings: SamplingSettings


class Turn(NamedTuple):
    """Request for one turn of an episode."""

    attempt: Attempt
    prompt: np.ndarray  # int32 [s], all tokens before the turn
    key: np.ndarray
    settings: SamplingSettings
    response: Future[Response]  # the turn, or a `Failure` as the exception


_COLUMNS = np.dtype([("id", np.int32), ("logprob", np.float32), ("is_sampled", bool)])


def _table(ids: Any, logprob: Any = 0.0, is_sampled: bool = False) -> np.ndarray:
    """Return tokens as an array [s] with the columns `_COLUMNS`."""
    return np.rec.fromarrays(np.broadcast_arrays(ids, logprob, is_sampled), _COLUMNS)


@dataclasses.dataclass(eq=False)
class Path:
    """One path of an episode."""

    tokens: np.ndarray  # result of `_table` [s], all tokens with those of the task's prompt
    prompt: np.ndarray  # int32 [s], all tokens before the newest turn
    messages: Messages = ()  # of a chat, with the message of the newest turn


class Environment:
    """An episode of an `EnvironmentPool`, with an adapter in a worker; `sample` takes its turns."""

    def __init__(self, pool: Any, attempt: Attempt, sample: Callable[[Turn], Any]) -> None:
        self.pool, self.attempt, self._sample = pool, attempt, sample
        self.row = {"prompt": attempt.prompt.text, **attempt.prompt.columns}
        self.limit: FinishReason | None = None  # the limit that the episode has reached
        self.paths: list[Path] = []
        self._turns: list[Response] = []
        self._num_failed_calls, self._sampling_s = 0, 0.0

    async def run(self) -> Episode:
        """Run the episode. A failure becomes its verdict; a closed pool raises WorkerFailed."""
        start_s, attempt, verdict = time.monotonic(), self.attempt, None
        self.job = Job(self.pool.workers)
        try:
            reward = await self.play()
            if not self._turns:
                limit = f"search.max_new_tokens = {attempt.settings.max_new_tokens}"
                text = f"no turn was sampled: none was requested, or the first text fills {limit}"
                raise Failure("environment_no_turn", text)
            if self.pool.has_reward:
                verdict = Score(reward, "reward_none" if reward is None else None)
        except Failure as error:
            self.pool.failures.report(error.name, str(error), "episode(s) rejected as")
            verdict = Score(None, error.name)
        finally:
            self.job.leave()
        start = attempt.prompt.tokens
        # Without a turn the episode is rejected, but it still needs a token.
        paths = [x.tokens[len(start) :] for x in self.paths] or [_table(start[-1:], 0.0, True)]
        tokens = np.concatenate(paths)
        versions = [x for y in self._turns for x in (y.version_min, y.version_max)]
        return Episode(
            *attempt[:2],
            *(tokens[name].copy() for name in ("id", "logprob", "is_sampled")),
            finish=self.limit or ("eos" if self.pool.schemas else "done"),
            version_min=min(versions, default=0),
            version_max=max(versions, default=0),
            temperature=attempt.settings.temperature,
            verdict=verdict,
            environment_s=time.monotonic() - start_s - self._sampling_s,
            path_lengths=tuple(map(len, paths)) if len(paths) > 1 else (),
            num_failed_calls=self._num_failed_calls,
        )

    async def play(self) -> float | None:
        """Return the reward of the environment, or raise Failure or WorkerFailed."""
        answer = await self.ask(("begin", self.row), "reset")
        while "reward" not in answer:
            try:
                message = await self._answer_to(answer["added"])
            except ValueError as error:
                raise Failure(_TEMPLATE, str(error)) from error
            answer = await self.ask(message, "the reward" if message is None else "a turn")
        return answer["reward"]

    async def _answer_to(self, added: str | Messages) -> tuple[str, Any] | None:
        """Sample a turn, and return its text and tool calls; None if a limit has cut it.

        `added` is the text, or the new messages of a chat, before the turn.
        """
        served, start, chat = self.pool.served, self.attempt.prompt.tokens, Chat(())
        is_prompt = self.pool.first_token_only and not self._turns  # else it follows the task's
        if isinstance(added, str):
            tokens = served.tokenizer.encode(added, add_bos=is_prompt)
            before = self.paths[0].tokens["id"] if self.paths else start
            prompt = tokens if is_prompt else np.concatenate([before, tokens])
        else:
            messages = [*self.paths[-1].messages, *added] if self.paths else added
            results = [x["content"] for x in added if x["role"] == "tool"]
            if failed := [result for result in results if result.startswith(ERROR)]:
                self._num_failed_calls += len(failed)
                self.pool.failures.report("failed_tool_call", failed[0], "times")
            chat = Chat(messages, self.pool.schemas)
            prompt = None if self._turns or is_prompt else start
        path, y = await self.turn(chat, prompt)
        if y is None or self.limit:
            return None
        text = served.tokenizer.decode(y.tokens)
        if not chat.messages:
            return text, ()
        message, calls = served.chat.read(y.tokens, text, path.prompt, chat.tools)
        path.messages = [*chat.messages, message]
        return text, calls if chat.tools else ()

    async def ask(self, message: Any, doing: str) -> dict[str, Any]:
        """Return the worker's answer to a message; `doing` names the call in a failure's text."""
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
        self, chat: Chat, prompt: np.ndarray | None, call: "Call | None" = None
    ) -> tuple[Path, Response | None]:
        """Sample a turn; return its path and the turn, or None if the episode reached a limit.

        Args:
            chat: all messages before the turn; no messages if the turn has only a prompt.
            prompt: int32 [s], all tokens before the turn; None: those of the chat.
            call: request of an agent, with a maximum number of tokens and texts that end the turn.

        Raises:
            Failure: the tokens are not valid.
            ValueError: the chat format cannot express the messages or tools.
        """
        start, settings = self.attempt.prompt.tokens, self.attempt.settings
        path, prompt = self._continued(chat, prompt, call)
        if len(self._turns) >= self.pool.max_turns:
            self.limit = "turns"
            return path, None
        if not np.array_equal(prompt[: len(start)], start):
            text = f"a request begins with token {prompt[0]}, and not with the prompt of the task, "
            text += f"{start[:4].tolist()}: use chat messages or plain text in both"
            raise Failure("environment_first_token", text)
        observed = _table(prompt[len(path.tokens) :])
        used = [prompt, *(x.tokens for x in self.paths if x is not path)]
        room = settings.max_new_tokens - sum(len(tokens) - len(start) for tokens in used)
        if room <= 0:
            self.limit = "length"
            return path, None
        wanted = settings if call is None else call.settings
        stops = wanted.stop_strings or settings.stop_strings
        most = min(room, wanted.max_new_tokens)
        own = dataclasses.replace(settings, max_new_tokens=most, stop_strings=stops)
        key, begun_s = self.attempt.key, time.monotonic()
        if self._turns:
            key = fold_in(key, _TURNS + len(self._turns))
        turn = Turn(self.attempt, prompt, key, own, Future())
        self._sample(turn)
        y = await asyncio.wrap_future(turn.response)
        self._sampling_s += time.monotonic() - begun_s
        sampled = _table(y.tokens, y.token_logprobs, True)
        path.tokens = np.concatenate([path.tokens, observed, sampled])
        path.prompt, path.messages = prompt, ()  # the caller of a chat sets its messages
        if path not in self.paths:
            self.paths.append(path)
        self._turns.append(y)
        if not y.has_eos and len(y.tokens) >= room:
            self.limit = "length"
        return path, y

    def _continued(self, chat: Chat, prompt: Any, call: "Call | None") -> tuple[Path, np.ndarray]:
        """Return the path of a turn and all tokens before the turn; arguments as of `turn`.

        The path is the newest that the turn continues, or a new one.
        """
        served, start = self.pool.served, self.attempt.prompt.tokens
        for path in reversed(self.paths):
            before, found = path.tokens["id"], None
            if chat.messages:
                if path.messages and continues(chat.messages, path.messages):
                    found = served.chat.bridge(path.prompt, before[len(path.prompt) :], chat)
            elif call and call.kind == "completions" and isinstance(call.request.prompt, str):
                found = extended(served.tokenizer, before, prompt, skip_special=True)
            elif np.array_equal(prompt[: len(before)], before):
                found = prompt
            if found is not None:
                return path, found
        return Path(_table(start), start), served.chat.prompt(chat) if prompt is None else prompt


class Agent(Environment):
    """An episode whose program requests its turns over HTTP, one after another."""

    _open: asyncio.Task[Any] | None = None  # the request that holds `_free`

    async def play(self) -> float | None:
        self.id = secrets.token_hex(16)  # part of the base URL
        self._free, self._failed = asyncio.Lock(), asyncio.Future[Failure]()
        self.pool.agents[self.id] = self
        begin = ("begin", {**self.row, BASE_URL: f"{self.pool.url}/{self.id}/v1"})
        running = asyncio.ensure_future(self.ask(begin, "run()"))
        try:
            await asyncio.wait([running, self._failed], return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                raise self._failed.result()
            return running.result()["reward"]
        finally:
            del self.pool.agents[self.id]
            for each in filter(None, (running, self._open)):
                each.cancel()

    async def request(self, kind: "Kind", body: Mapping[str, Any]) -> "tuple[Call, Update]":
        """Return the call of a request and its turn, or raise ApiError."""
        from tba_jax.serving.protocol import Update, parse  # slow; only agents need it

        async with self._free:
            if self._failed.done() or self.id not in self.pool.agents:
                raise ApiError("this episode has ended", code="episode_ended")
            try:
                call = parse(kind, body, self.pool.served, 0)
            except ApiError as error:
                if error.code == "chat_format":
                    self._failed.set_result(Failure(_TEMPLATE, str(error)))
                raise
            self._open = asyncio.current_task()
            self.job.since_s = math.inf  # it waits for this answer
            try:
                path, y = await self.turn(call.chat, call.prompt, call)
                if y is None:
                    limits = "search.max_turns or search.max_new_tokens"
                    raise ApiError(f"this episode has reached {limits}", code="episode_ended")
                call = dataclasses.replace(call, prompt=path.prompt)
                update = Update(y.tokens, y.token_logprobs, "stop" if y.has_eos else "length")
                if kind == "chat":
                    path.messages = [*call.chat.messages, call.message(update)]
                return call, update
            except (Failure, ValueError) as error:
                is_named = isinstance(error, Failure)
                self._failed.set_result(error if is_named else Failure(_TEMPLATE, str(error)))
                raise ApiError(str(error), code="episode_ended") from error
            except asyncio.CancelledError:
                if self.id not in self.pool.agents:
                    raise ApiError("this episode has ended", code="episode_ended") from None
                text = "the agent's client disconnected before the answer to its request"
                self._failed.set_result(Failure("environment_disconnect", text))
                raise
            finally:
                self._open = None
                self.job.since_s = time.monotonic()


def continues(messages: Messages, history: Messages) -> bool:
    """Return whether `messages` are `history`, which ends with an answer, and new messages."""
    size = len(history)
    is_new = all(message["role"] != "assistant" for message in messages[size:])
    return is_new and list(map(_key, messages[:size])) == list(map(_key, history))


def _key(message: Mapping[str, Any]) -> tuple[str, str, list[Any]]:
    """Return role, text and tool calls (without their IDs) of a message, to compare it."""
    calls = [dict(call["function"]) for call in message.get("tool_calls") or ()]
    for call in calls:
        with contextlib.suppress(LookupError, TypeError, ValueError):  # no text, or not JSON
            call["arguments"] = json.loads(call["arguments"])
    return message["role"], message.get("content") or "", calls
