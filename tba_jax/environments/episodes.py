# SPDX-License-Identifier: Apache-2.0
"""Episodes of several turns over a decode session.

A turn is a request with one sample. When a turn ends, its slot becomes free and the environment
receives the text. After the environment's response, the conversation (prompt, sampled tokens,
observations) is prefilled as a new request. No thread waits for an environment. Sampled IDs are
never converted to text and back. Caches of waiting conversations are kept while there is room.

Invariants: every token that is not an observation has the log-prob of the distribution it was
sampled from. Sampled tokens depend on prompt, key, turn and observations. The time of observations
changes only the rounding of log-probs. In `run` the order of all requests is fixed, too.
"""

import collections
import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from tba_jax.decoding.keys import fold_in
from tba_jax.decoding.requests import Response, SamplingSettings
from tba_jax.decoding.stop_strings import StopStrings
from tba_jax.environments.chat import ChatFormat, Messages
from tba_jax.environments.episode import Episode, Sessions, SingleTurnSession, TurnSession
from tba_jax.environments.pool import Answer, Environment, EnvironmentPool, Request
from tba_jax.flow.trajectory import FinishReason, Prompt
from tba_jax.models.transformer import Params
from tba_jax.rewards.source import Verdict

# Folded into the key of a sample with the number of a turn. Larger than the number of any token.
_TURNS = 2**30
_POLL_S = 0.001
MOST_EPISODES = 128
"""Maximum number of concurrent episodes of a session."""


class Texts(Protocol):
    """Interface of the tokenizer that episodes need."""

    def encode(self, text: str, add_bos: bool) -> np.ndarray:
        """Return the tokens of a text, int32 [s]."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        """Return the text of token IDs."""
        ...


class _Segment(NamedTuple):
    tokens: np.ndarray
    logprobs: np.ndarray
    is_sampled: bool
    versions: np.ndarray | None = None  # version of each token; None: that of the previous token


@dataclasses.dataclass(eq=False)
class _Attempt:
    """An unfinished episode."""

    request: int
    sample: int
    prompt: Prompt
    key: np.ndarray
    settings: SamplingSettings
    temperature: float
    environment: Environment | None = None
    paths: list[list[_Segment]] = dataclasses.field(default_factory=lambda: [[]])
    path: int = 0  # path of the newest turn
    messages: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)  # chats only
    calls: Sequence[Mapping[str, Any]] = ()  # tool calls of the newest turn of a chat
    versions: list[int] = dataclasses.field(default_factory=list)
    num_turns: int = 0
    has_begun: bool = False
    finish: FinishReason | None = None  # set when the end is decided and the reward is requested
    asked_s: float = 0.0  # time of the newest request to the environment
    environment_s: float = 0.0
    num_failed_calls: int = 0

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt.columns.get("prompt"), list)

    @property
    def num_tokens(self) -> int:
        return sum(len(s.tokens) for path in self.paths for s in path)

    @property
    def segments(self) -> list[_Segment]:
        return self.paths[self.path]

    @property
    def tokens(self) -> np.ndarray:
        parts = [np.zeros(0, np.int32), *(s.tokens for s in self.segments)]
        return np.concatenate(parts).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Episodes:
    """Settings and environments of episodes.

    Attributes:
        environments: pool of the environments.
        tokenizer: tokenizer of the policy.
        max_turns: maximum number of the policy's turns in an episode.
        chat: format of chats; None: prompts are plain text.
        is_agent: whether environments are agents, which write the context themselves.
        schemas: JSON schemas of the tools. If there are any, `chat` formats the whole context.
    """

    environments: EnvironmentPool
    tokenizer: Texts
    max_turns: int
    chat: ChatFormat | None = None
    is_agent: bool = False
    schemas: Messages = ()

    @property
    def first_token_only(self) -> bool:
        """Whether the stored prompt is only the first token of the actual prompt.

        The other tokens of the prompt are then stored as observations.
        """
        return self.is_agent or bool(self.schemas)

    def over(self, session: TurnSession) -> "EpisodeSession":
        """Return an episode session that decodes with this session."""
        return EpisodeSession(session, self, min(2 * session.num_slots, MOST_EPISODES))

    def check_template(self) -> None:
        """Refuse a chat format that changes sampled turns when the conversation continues.

        Raises:
            ValueError: the format changes sampled turns.
        """
        assert self.chat is not None
        user, turn = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        result = {"role": "tool", "content": "c", "tool_call_id": "call_0", "name": "d"}
        messages = [user, turn, result if self.schemas else user]
        prompt = self.chat.prompt([user], self.schemas)
        sampled = self.tokenizer.encode("b", add_bos=False)
        if self.chat.bridge(prompt, sampled, messages, self.schemas) is None:
            raise ValueError(
                "the chat template changes earlier turns when the conversation continues "
                "(templates that remove thinking do this); set a template that keeps sampled "
                "turns unchanged"
            )


class EpisodeSession(SingleTurnSession):
    """Session of multi-turn episodes in the slots of a decode session; one thread calls it."""

    def __init__(self, session: TurnSession, episodes: Episodes, most: int) -> None:
        super().__init__(session)
        self._episodes, self._most = episodes, most
        self._queued: collections.deque[_Attempt] = collections.deque()
        self._asked: list[_Attempt] = []  # episodes whose environments have not answered
        self._sampled: dict[int, _Attempt] = {}  # by the decode session's number of the request
        self._ended: list[Episode] = []
        self._num_submitted = 0

    @property
    def is_idle(self) -> bool:
        return not (self._queued or self._asked or self._sampled or self._ended)

    @property
    def room(self) -> int:
        under_way = len(self._asked) + len(self._sampled)
        return min(self._session.room, self._most - under_way) - len(self._queued)

    @property
    def is_waiting(self) -> bool:
        """Send requests to environments; return whether sampling must wait for answers."""
        self._ask()
        return self._session.is_idle and not self._ended

    def submit(
        self,
        prompt: Prompt,
        keys: np.ndarray,
        settings: SamplingSettings,
        temperatures: np.ndarray,
    ) -> int:
        """Queue episodes of one prompt; arguments and result are those of `Session.submit`.

        `max_new_tokens` of the settings limits the tokens of an episode, observations included.
        """
        index = self._num_submitted
        self._num_submitted += 1
        self._queued.extend(
            _Attempt(index, j, prompt, key, settings, float(temperatures[j]))
            for j, key in enumerate(keys)
        )
        return index

    def step(self) -> list[Episode]:
        """Process the answers of environments, run one chunk, and return the finished episodes."""
        self._ask()
        for response in self._session.step():
            self._turn_ended(response)
        ended, self._ended = self._ended, []
        return ended

    def run(self) -> Iterator[Episode]:
        """Yield all episodes; wait for every answer, so that their order depends on no duration."""
        while not self.is_idle:
            self._begin_queued()
            while self._asked:
                if all(self._answers_known()):
                    self._poll()
                    self._begin_queued()
                else:
                    time.sleep(_POLL_S)
            yield from self._ended
            self._ended = []
            responses = sorted(self._session.run(), key=lambda y: y.request)
            for response in responses:
                self._turn_ended(response)

    def _answers_known(self) -> Iterator[bool]:
        for attempt in self._asked:
            assert attempt.environment is not None
            yield attempt.environment.is_answered

    def _ask(self) -> None:
        """Begin episodes, and continue episodes whose environments have answered."""
        self._begin_queued()
        self._poll()

    def _poll(self) -> None:
        """Continue episodes whose environments have answered."""
        asked, self._asked = self._asked, []
        for attempt in asked:
            assert attempt.environment is not None
            answer = attempt.environment.poll()
            if answer is None:
                self._asked.append(attempt)
            else:
                self._take(attempt, attempt.environment, answer)

    def _begin_queued(self) -> None:
        while self._queued and len(self._asked) + len(self._sampled) < self._most:
            attempt = self._queued.popleft()
            environment = self._episodes.environments.open()
            environment.begin({**attempt.prompt.columns, "prompt": self._content(attempt)})
            attempt.environment = environment
            self._wait_for(attempt)

    def _take(self, attempt: _Attempt, environment: Environment, answer: Answer) -> None:
        attempt.environment_s += time.monotonic() - attempt.asked_s
        attempt.num_failed_calls += len(answer.failed_calls)
        self._answered(attempt, environment, answer)

    def _content(self, attempt: _Attempt) -> object:
        return attempt.prompt.columns.get("prompt", attempt.prompt.text)

    def _answered(self, attempt: _Attempt, environment: Environment, answer: Answer) -> None:
        if answer.failure:
            self._end(attempt, Verdict(None, answer.failure))
        elif answer.finish:
            environment.release()
            attempt.finish = attempt.finish or ("eos" if answer.finish == "eos" else "done")
            reason = "reward_none" if answer.reward is None else None
            has_reward = self._episodes.environments.has_reward
            self._end(attempt, Verdict(answer.reward, reason) if has_reward else None)
        elif attempt.has_begun and attempt.num_turns >= self._episodes.max_turns:
            self._stop(attempt, "turns")
        else:
            self._observe(attempt, environment, answer)

    def _observe(self, attempt: _Attempt, environment: Environment, answer: Answer) -> None:
        """Add an observation, and sample the next turn if no limit is reached."""
        request = None if answer.request is None else Request(*answer.request)
        failure = line = ""
        tokens = np.array([] if request is None else request.tokens, np.int32)
        is_fork = request is not None and request.path == len(attempt.paths)
        if request is not None:
            attempt.path = request.path
            if is_fork:
                attempt.paths.append([])
        else:
            try:
                tokens = self._observation(attempt, answer)
            except ValueError as error:
                failure, line = "environment_template", str(error)
        begins = is_fork or not attempt.has_begun
        if self._episodes.first_token_only and begins and not failure:
            first, tokens = tokens[0], tokens[1:]
            if first != attempt.prompt.tokens[0]:
                failure = "environment_first_token"
                line = (
                    f"a request begins with token {first}, prompts of the task with "
                    f"{attempt.prompt.tokens[0]}: use chat messages in both, or plain text in both"
                )
        is_full = attempt.num_tokens + len(tokens) >= attempt.settings.max_new_tokens
        if is_full and not (attempt.has_begun or failure):
            failure = "environment_no_room"
            most = attempt.settings.max_new_tokens
            line = f"the first text of the environment fills all {most} tokens"
        attempt.has_begun = True
        if not (failure or is_full):
            try:
                self._sample(attempt, tokens, request)
            except ValueError as error:  # an agent may send invalid tokens
                if request is None:
                    raise
                failure, line = "environment_request", str(error)
        if failure:
            self._reject(attempt, failure, line)
        elif is_full:
            self._stop(attempt, "length")
        elif len(tokens):
            attempt.segments.append(_Segment(tokens, np.zeros(len(tokens), np.float32), False))

    def _observation(self, attempt: _Attempt, answer: Answer) -> np.ndarray:
        """Return the tokens that an answer adds to the context.

        Raises:
            ValueError: the chat format cannot continue the sampled tokens.
        """
        episodes, text = self._episodes, answer.observation or ""
        chat = episodes.chat
        if chat is None or not attempt.is_chat:
            return episodes.tokenizer.encode(text, add_bos=False)
        messages = attempt.messages
        if not attempt.has_begun:
            messages += attempt.prompt.columns["prompt"]
        if not attempt.has_begun and episodes.schemas:
            if text:
                messages[-1] = {**messages[-1], "content": messages[-1]["content"] + text}
            return chat.prompt(messages, episodes.schemas)
        if not (text or answer.results):
            return np.zeros(0, np.int32)
        for call, result in zip(attempt.calls, answer.results, strict=True):
            named = {"tool_call_id": call["id"], "name": call["name"]}
            messages.append({"role": "tool", "content": result, **named})
        if text:
            messages.append({"role": "user", "content": text})
        before = np.concatenate([self._context(attempt), attempt.tokens])
        num = len(attempt.segments[-1].tokens) if attempt.segments else 0
        prompt, sampled = np.split(before, [len(before) - num])
        whole = chat.bridge(prompt, sampled, messages, episodes.schemas)
        if whole is None:
            raise ValueError("the chat template changes earlier turns")
        return whole[len(before) :]

    def _context(self, attempt: _Attempt) -> np.ndarray:
        return attempt.prompt.tokens[: 1 if self._episodes.first_token_only else None]

    def _sample(self, attempt: _Attempt, observed: np.ndarray, request: Request | None) -> None:
        """Queue the next turn, after an observation.

        Raises:
            ValueError: see `Session.submit`.
        """
        key = attempt.key
        if attempt.num_turns:
            key = fold_in(key, _TURNS + attempt.num_turns)
        settings = attempt.settings
        room = settings.max_new_tokens - attempt.num_tokens - len(observed)
        stop_strings = settings.stop_strings
        if request is not None:
            room = min(room, request.max_tokens)
            if request.stop:
                text_of = functools.partial(self._episodes.tokenizer.decode, skip_special=False)
                stop_strings = StopStrings(request.stop, text_of)
        number = self._session.submit(
            np.concatenate([self._context(attempt), attempt.tokens, observed]),
            key[None],
            dataclasses.replace(settings, max_new_tokens=room, stop_strings=stop_strings),
            np.array([attempt.temperature], np.float32),
        )
        self._sampled[number] = attempt

    def _turn_ended(self, response: Response) -> None:
        attempt = self._sampled.pop(response.request)
        attempt.num_turns += 1
        attempt.versions += [response.version_min, response.version_max]
        text = self._episodes.tokenizer.decode(response.tokens)
        before = np.concatenate([self._context(attempt), attempt.tokens])
        attempt.segments.append(
            _Segment(
                response.tokens,
                response.token_logprobs,
                True,
                response.token_versions,
            )
        )
        is_full = attempt.num_tokens >= attempt.settings.max_new_tokens
        if not response.has_eos and is_full:
            attempt.finish = "length"
            if not self._episodes.is_agent:
                self._stop(attempt, "length")
                return
        assert attempt.environment is not None
        chat, schemas = self._episodes.chat, self._episodes.schemas
        attempt.messages.append({"role": "assistant", "content": text})
        if chat is not None and schemas:
            try:
                attempt.calls = chat.calls(response.tokens, before, schemas)
            except ValueError as error:
                self._reject(attempt, "environment_template", str(error))
                return
            attempt.environment.call(attempt.calls)
        else:
            attempt.environment.turn(text, response)
        self._wait_for(attempt)

    def _reject(self, attempt: _Attempt, failure: str, line: str) -> None:
        """End an episode without a reward."""
        assert attempt.environment is not None
        self._episodes.environments.report(failure, line)
        attempt.environment.release()
        self._end(attempt, Verdict(None, failure))

    def _stop(self, attempt: _Attempt, finish: FinishReason) -> None:
        """End an episode at a limit and request its reward."""
        assert attempt.environment is not None
        attempt.finish = finish
        attempt.environment.end()
        self._wait_for(attempt)

    def _wait_for(self, attempt: _Attempt) -> None:
        attempt.asked_s = time.monotonic()
        self._asked.append(attempt)

    def _end(self, attempt: _Attempt, verdict: Verdict | None) -> None:
        for path in attempt.paths:
            parts = [self._context(attempt), *(s.tokens for s in path)]
            self._session.forget(np.concatenate(parts))
        paths = [path for path in attempt.paths if any(s.is_sampled for s in path)]
        if not paths:  # No token was sampled, but a rejected response still needs one.
            none = np.zeros(1, np.float32)
            paths = [[_Segment(attempt.prompt.tokens[-1:], none, True)]]
        segments = [s for path in paths for s in path]
        lengths = tuple(sum(len(s.tokens) for s in path) for path in paths)
        sizes = [len(s.tokens) for s in segments]
        versions = attempt.versions or [self.version]
        of_tokens, newest = [], min(versions)
        for s in segments:
            found = np.full(len(s.tokens), newest, np.int32) if s.versions is None else s.versions
            of_tokens.append(found)
            newest = int(found[-1])
        self._ended.append(
            Episode(
                attempt.request,
                attempt.sample,
                np.concatenate([s.tokens for s in segments]).astype(np.int32),
                np.concatenate([s.logprobs for s in segments]).astype(np.float32),
                np.repeat([s.is_sampled for s in segments], sizes),
                attempt.finish or "done",
                min(versions),
                max(versions),
                attempt.temperature,
                verdict,
                attempt.environment_s,
                lengths if len(paths) > 1 else (),
                attempt.num_failed_calls,
                np.concatenate(of_tokens),
            )
        )


def open_session(
    decoder: Sessions,
    params: Params,
    episodes: Episodes | None,
    *,
    num_slots: int,
    num_samples: int,
    version: int = 0,
) -> SingleTurnSession:
    """Return a session of episodes, without requests.

    Args:
        decoder: opens decode sessions.
        params: weights, on the devices to run on.
        episodes: settings of a task with an environment; None: episodes of one turn.
        num_slots: number of turns sampled at a time.
        num_samples: samples per prompt, which determine the number of prompts in a prefill call.
        version: version of the weights.
    """
    session = decoder.session(
        params,
        num_slots=num_slots,
        prefill_prompts=-(-num_slots // num_samples),
        version=version,
        keeps_caches=episodes is not None,
    )
    return SingleTurnSession(session) if episodes is None else episodes.over(session)
