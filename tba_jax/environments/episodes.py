# SPDX-License-Identifier: Apache-2.0
"""Episodes of several turns over a decode session.

A turn is a request of one sample. When it has ended its slot is free, and the environment is asked;
when the environment has answered, the conversation (prompt, sampled tokens, observations) is
prefilled again as another request. No thread waits for an environment. Sampled IDs are never made
from text: what was sampled is read by the environment as text and goes on as it was sampled.

Invariants: a token has the log-prob of the distribution it was sampled from, or is an observation;
what is sampled depends on prompt, key, turn and observations, not on when observations arrive; and
in `run` the order of all requests too.

Keys and values of a conversation are computed anew for every turn.
"""

import collections
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from tba_jax.decoding.keys import fold_in
from tba_jax.decoding.requests import Response, SamplingSettings, Statistics
from tba_jax.decoding.session import Session
from tba_jax.environments.pool import Answer, Environment, EnvironmentPool
from tba_jax.flow.trajectory import FinishReason, Prompt
from tba_jax.models.transformer import Params
from tba_jax.rewards.source import Verdict

_TURNS = 2**30  # folded with the number of a turn into the key of a sample; beyond any token's
_POLL_S = 0.001
MOST_PROCESSES = 64
"""Episodes under way at a time, unless settings say otherwise."""


class Texts(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str, add_bos: bool) -> np.ndarray:
        """int32 [s]."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        """Text of token IDs."""
        ...

    def format_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Chat messages as text."""
        ...


class Episode(NamedTuple):
    """A finished episode; host arrays, t tokens behind the prompt.

    Attributes:
        request: what `EpisodeSession.submit` returned.
        sample: which of the request's samples.
        tokens: int32 [t], sampled ones and observations.
        token_logprobs: float32 [t], 0 at observations.
        is_sampled: bool [t], False at observations.
        finish: why it ended.
        version_min, version_max: span of the weight versions that drew its tokens.
        verdict: its reward, or why it has none; None: reward functions are asked.
    """

    request: int
    sample: int
    tokens: np.ndarray
    token_logprobs: np.ndarray
    is_sampled: np.ndarray
    finish: FinishReason
    version_min: int
    version_max: int
    verdict: Verdict | None

    @property
    def has_eos(self) -> bool:
        """Whether no limit ended it."""
        return self.finish in ("eos", "done")


class _Segment(NamedTuple):
    tokens: np.ndarray
    logprobs: np.ndarray
    is_sampled: bool
    text: str


@dataclasses.dataclass(eq=False)
class _Attempt:
    """An episode under way."""

    request: int
    sample: int
    prompt: Prompt
    key: np.ndarray
    settings: SamplingSettings
    temperature: float
    environment: Environment | None = None
    segments: list[_Segment] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    num_turns: int = 0
    has_begun: bool = False
    finish: FinishReason | None = None  # decided, and the reward is asked for

    @property
    def num_tokens(self) -> int:
        return sum(len(s.tokens) for s in self.segments)

    @property
    def tokens(self) -> np.ndarray:
        parts = [np.zeros(0, np.int32), *(s.tokens for s in self.segments)]
        return np.concatenate(parts).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Episodes:
    """How episodes are made.

    Attributes:
        environments: one for each episode under way.
        tokenizer: of the policy.
        max_turns: of the policy in an episode.
        most: episodes under way in a session; 0: twice its slots, MOST_PROCESSES at most.
    """

    environments: EnvironmentPool
    tokenizer: Texts
    max_turns: int
    most: int = 0

    def over(self, session: Session) -> "EpisodeSession":
        """Return episodes over a decode session, which is fed."""
        most = self.most or min(2 * session.num_slots, MOST_PROCESSES)
        return EpisodeSession(session, self, most)

    def check_template(self) -> None:
        """Refuse a chat template that does not go on from a turn as it was sampled.

        Raises:
            ValueError: as `observation`.
        """
        messages = [{"role": "user", "content": "a"}]
        text = self.tokenizer.format_chat(messages)
        prompt = Prompt(0, text, np.zeros(0, np.int32), {"prompt": messages})
        ids = self.tokenizer.encode("b", add_bos=False)
        turn = _Segment(ids, np.zeros(len(ids), np.float32), True, "b")
        self.observation(prompt, [turn], "c")

    def observation(self, prompt: Prompt, segments: Sequence[_Segment], text: str) -> np.ndarray:
        """Return the tokens of an observation that follows these segments.

        Raises:
            ValueError: the chat template does not go on from what was sampled.
        """
        messages = prompt.columns.get("prompt")
        if not isinstance(messages, list):
            return self.tokenizer.encode(text, add_bos=False)
        said = [
            {"role": "assistant" if s.is_sampled else "user", "content": s.text} for s in segments
        ]
        whole = self.tokenizer.format_chat([*messages, *said, {"role": "user", "content": text}])
        ids = [np.zeros(0, np.int32), *(s.tokens for s in segments)]
        before = prompt.text + self.tokenizer.decode(np.concatenate(ids), skip_special=False)
        if not whole.startswith(before):
            raise ValueError(
                "the chat template does not extend the conversation: it writes earlier turns "
                "otherwise than they were sampled, as templates do that drop thinking"
            )
        return self.tokenizer.encode(whole[len(before) :], add_bos=False)


class EpisodeSession:
    """Episodes over the slots of a decode session; one thread drives it. As `Session`."""

    def __init__(self, session: Session, episodes: Episodes, most: int) -> None:
        self._session, self._episodes, self._most = session, episodes, most
        self._queued: collections.deque[_Attempt] = collections.deque()
        self._asked: list[_Attempt] = []  # whose environments have not answered
        self._sampled: dict[int, _Attempt] = {}  # by the session's number of the request
        self._ended: list[Episode] = []
        self._num_submitted = 0

    @property
    def version(self) -> int:
        """Of the weights."""
        return self._session.version

    @property
    def num_slots(self) -> int:
        """Turns that are sampled at a time."""
        return self._session.num_slots

    @property
    def statistics(self) -> Statistics:
        """Counts of the decode session; tokens are those that were sampled."""
        return self._session.statistics

    @property
    def is_idle(self) -> bool:
        """No episode is under way."""
        return not (self._queued or self._asked or self._sampled or self._ended)

    @property
    def room(self) -> int:
        """Episodes that could begin; negative where more are queued."""
        under_way = len(self._asked) + len(self._sampled)
        return min(self._session.room, self._most - under_way) - len(self._queued)

    @property
    def is_waiting(self) -> bool:
        """Whether there is nothing to sample until an environment answers; asks them."""
        self._ask()
        return self._session.is_idle and not self._ended

    def swap(self, params: Params, version: int) -> None:
        """Go on with other weights."""
        self._session.swap(params, version)

    def submit(
        self,
        prompt: Prompt,
        keys: np.ndarray,
        settings: SamplingSettings,
        temperatures: np.ndarray,
    ) -> int:
        """Queue episodes of one prompt; arguments and result as of `Session.submit`.

        `max_new_tokens` of the settings limits an episode, observations included.
        """
        index = self._num_submitted
        self._num_submitted += 1
        self._queued.extend(
            _Attempt(index, j, prompt, key, settings, float(temperatures[j]))
            for j, key in enumerate(keys)
        )
        return index

    def step(self) -> list[Episode]:
        """Take up what environments answered, run one chunk, and return the ended episodes."""
        self._ask()
        for response in self._session.step():
            self._turn_ended(response)
        ended, self._ended = self._ended, []
        return ended

    def run(self) -> Iterator[Episode]:
        """All episodes. Turns and answers alternate, so nothing depends on how long they take."""
        while not self.is_idle:
            self._ask()
            while self._asked:
                if all(self._answers_known()):
                    self._ask()
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
        """Begin episodes, and go on with those whose environments have answered."""
        while self._queued and len(self._asked) + len(self._sampled) < self._most:
            attempt = self._queued.popleft()
            attempt.environment = self._episodes.environments.open()
            attempt.environment.begin({**attempt.prompt.columns, "prompt": self._content(attempt)})
            self._asked.append(attempt)
        asked, self._asked = self._asked, []
        for attempt in asked:
            assert attempt.environment is not None
            answer = attempt.environment.poll()
            if answer is None:
                self._asked.append(attempt)
            else:
                self._answered(attempt, attempt.environment, answer)

    def _content(self, attempt: _Attempt) -> object:
        return attempt.prompt.columns.get("prompt", attempt.prompt.text)

    def _answered(self, attempt: _Attempt, environment: Environment, answer: Answer) -> None:
        if answer.failure:
            self._end(attempt, Verdict(None, answer.failure))
        elif answer.finish:
            environment.release()
            attempt.finish = attempt.finish or ("eos" if answer.finish == "eos" else "done")
            known = answer.reward is not None
            self._end(attempt, Verdict(answer.reward, None) if known else None)
        elif attempt.has_begun and attempt.num_turns >= self._episodes.max_turns:
            self._stop(attempt, "turns")
        else:
            self._observe(attempt, environment, answer.observation or "")

    def _observe(self, attempt: _Attempt, environment: Environment, text: str) -> None:
        """Add an observation, and sample the next turn where there is room for one."""
        tokens, failure = np.zeros(0, np.int32), ""
        if text:
            try:
                tokens = self._episodes.observation(attempt.prompt, attempt.segments, text)
            except ValueError as error:
                self._episodes.environments.report("environment_template", str(error))
                failure = "environment_template"
        is_full = attempt.num_tokens + len(tokens) >= attempt.settings.max_new_tokens
        if is_full and not attempt.has_begun:
            line = f"its first text leaves none of {attempt.settings.max_new_tokens} tokens"
            self._episodes.environments.report("environment_no_room", line)
            failure = "environment_no_room"
        attempt.has_begun = True
        if failure:
            environment.release()
            self._end(attempt, Verdict(None, failure))
        elif is_full:
            self._stop(attempt, "length")
        else:
            if len(tokens):
                zeros = np.zeros(len(tokens), np.float32)
                attempt.segments.append(_Segment(tokens, zeros, False, text))
            self._sample(attempt)

    def _sample(self, attempt: _Attempt) -> None:
        """Queue the next turn."""
        settings = attempt.settings
        key = attempt.key
        if attempt.num_turns:
            key = fold_in(key, _TURNS + attempt.num_turns)
        request = self._session.submit(
            np.concatenate([attempt.prompt.tokens, attempt.tokens]),
            key[None],
            dataclasses.replace(
                settings, max_new_tokens=settings.max_new_tokens - attempt.num_tokens
            ),
            np.array([attempt.temperature], np.float32),
        )
        self._sampled[request] = attempt

    def _turn_ended(self, response: Response) -> None:
        attempt = self._sampled.pop(response.request)
        attempt.num_turns += 1
        attempt.versions += [response.version_min, response.version_max]
        text = self._episodes.tokenizer.decode(response.tokens)
        attempt.segments.append(_Segment(response.tokens, response.token_logprobs, True, text))
        if not response.has_eos:
            self._stop(attempt, "length")
            return
        assert attempt.environment is not None
        attempt.environment.turn(text)
        self._asked.append(attempt)

    def _stop(self, attempt: _Attempt, finish: FinishReason) -> None:
        """End an episode at a limit and request its reward."""
        assert attempt.environment is not None
        attempt.finish = finish
        attempt.environment.end()
        self._asked.append(attempt)

    def _end(self, attempt: _Attempt, verdict: Verdict | None) -> None:
        segments = attempt.segments
        if not segments:  # nothing was sampled: a rejected response has a token all the same
            none = np.zeros(1, np.float32)
            segments = [_Segment(attempt.prompt.tokens[-1:], none, True, "")]
        sizes = [len(s.tokens) for s in segments]
        versions = attempt.versions or [self.version]
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
                verdict,
            )
        )
