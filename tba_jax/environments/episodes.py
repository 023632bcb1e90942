# SPDX-License-Identifier: Apache-2.0
"""Episodes of one turn, or of several turns with an environment, over a decode session.

Searchers and evaluations use one interface: `SingleTurnSession`, or its subclass `EpisodeSession`
for a task with an environment. A turn is a request with one sample. When a turn ends, its slot
becomes free and the environment receives the turn. No thread waits for an environment. Caches of
waiting conversations are kept while there is room.

Invariants: every token that is not an observation has the log-prob of the distribution it was
sampled from. Sampled tokens depend on prompt, key, turn and observations. The time of observations
changes only the rounding of log-probs. In `run` the order of all requests is fixed, too.
"""

import collections
import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tba_jax.decoding.engine import Decoder, Session
from tba_jax.decoding.keys import fold_in
from tba_jax.decoding.requests import Response, SamplingSettings, Statistics
from tba_jax.decoding.stop_strings import StopStrings
from tba_jax.environments.pool import Ended, Environment, EnvironmentPool, Request
from tba_jax.flow.trajectory import FinishReason, Prompt, paths_of
from tba_jax.models.transformer import Params
from tba_jax.rewards.scores import Verdict
from tba_jax.serving.vllm import InferenceServer, ServerSession

# Folded into the key of a sample with the number of a turn. Larger than the number of any token.
_TURNS = 2**30
_POLL_S = 0.001
MOST_EPISODES = 128
"""Maximum number of concurrent episodes of a session."""

TurnSession = Session | ServerSession
Sessions = Decoder | InferenceServer
"""Source of decode sessions."""


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
    verdict: Verdict | None = None
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


class SingleTurnSession:
    """Session of one-turn episodes in the slots of a decode session; one thread calls it."""

    def __init__(self, session: TurnSession) -> None:
        self._session = session

    @property
    def version(self) -> int:
        """Return the version of the weights."""
        return self._session.version

    @property
    def statistics(self) -> Statistics:
        """Return the statistics of the decode session; `tokens` counts sampled tokens."""
        return self._session.statistics

    @property
    def is_idle(self) -> bool:
        """Return whether there is no unfinished episode."""
        return self._session.is_idle

    @property
    def room(self) -> int:
        """Return the number of free slots minus queued episodes; negative if more are queued."""
        return self._session.room

    @property
    def is_waiting(self) -> bool:
        """Return whether sampling must wait for an environment."""
        return False

    def swap(self, params: Params, version: int) -> None:
        """Continue with other weights."""
        self._session.swap(params, version)

    def submit(
        self,
        prompt: Prompt,
        keys: np.ndarray,
        settings: SamplingSettings,
        temperatures: np.ndarray,
    ) -> int:
        """Queue episodes of one prompt; arguments and result are those of `Session.submit`."""
        return self._session.submit(prompt.tokens, keys, settings, temperatures)

    def step(self) -> list[Episode]:
        """Run one chunk, and return the finished episodes."""
        return [
            Episode(
                y.request,
                y.sample,
                y.tokens,
                y.token_logprobs,
                None,
                "eos" if y.has_eos else "length",
                y.version_min,
                y.version_max,
                y.temperature,
                token_versions=y.token_versions,
            )
            for y in self._session.step()
        ]

    def run(self) -> Iterator[Episode]:
        """Yield episodes as they finish, until the session is idle."""
        while not self.is_idle:
            yield from self.step()


class _Segment(NamedTuple):
    """Consecutive tokens of a path, all sampled or all of an observation.

    Attributes:
        tokens: int32 [t].
        logprobs: float32 [t].
        versions: int32 [t], weight version of each token; None: that of the previous token.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    is_sampled: bool
    versions: np.ndarray | None = None


@dataclasses.dataclass(eq=False)
class _Attempt:
    """An unfinished episode."""

    request: int
    sample: int
    prompt: Prompt
    key: np.ndarray
    settings: SamplingSettings
    temperature: float
    environment: Environment = None  # pyright: ignore[reportAssignmentType]  # set at the begin
    paths: list[list[_Segment]] = dataclasses.field(default_factory=list)
    path: int = 0  # path of the newest turn
    versions: list[int] = dataclasses.field(default_factory=list)
    num_turns: int = 0
    finish: FinishReason | None = None  # set when the end is decided and the reward is requested
    asked_s: float = 0.0  # time of the newest request to the environment
    environment_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(len(s.tokens) for path in self.paths for s in path)

    def tokens_of(self, path: list[_Segment]) -> np.ndarray:
        """Return int32 [s]: the prompt and all tokens of a path."""
        return np.concatenate([self.prompt.tokens, *(s.tokens for s in path)])


class EpisodeSession(SingleTurnSession):
    """Session of multi-turn episodes in the slots of a decode session; one thread calls it."""

    def __init__(self, session: TurnSession, environments: EnvironmentPool) -> None:
        super().__init__(session)
        self._environments = environments
        self._most = min(2 * session.num_slots, MOST_EPISODES)
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
        self._poll()
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
        self._poll()
        for response in self._session.step():
            self._turn_ended(response)
        ended, self._ended = self._ended, []
        return ended

    def run(self) -> Iterator[Episode]:
        """Yield all episodes; wait for every answer, so that their order depends on no duration."""
        while not self.is_idle:
            self._begin_queued()
            while self._asked:
                if all(attempt.environment.is_answered for attempt in self._asked):
                    self._poll()
                else:
                    time.sleep(_POLL_S)
            yield from self._ended
            self._ended = []
            for response in sorted(self._session.run(), key=lambda y: y.request):
                self._turn_ended(response)

    def _begin_queued(self) -> None:
        while self._queued and len(self._asked) + len(self._sampled) < self._most:
            attempt = self._queued.popleft()
            attempt.environment = self._environments.open(attempt.prompt)
            attempt.environment.begin()
            self._wait_for(attempt)

    def _poll(self) -> None:
        """Begin episodes, and continue episodes whose environments have answered."""
        self._begin_queued()
        asked, self._asked = self._asked, []
        for attempt in asked:
            answer = attempt.environment.poll()
            if answer is None:
                self._asked.append(attempt)
                continue
            attempt.environment_s += time.monotonic() - attempt.asked_s
            if isinstance(answer, Request):
                self._sample(attempt, answer)
            else:
                self._end(attempt, answer)
        self._begin_queued()

    def _sample(self, attempt: _Attempt, request: Request) -> None:
        """Queue the requested turn, or end the episode at a limit."""
        environment, size = attempt.environment, len(attempt.prompt.tokens)
        if attempt.num_turns >= self._environments.max_turns:
            self._stop(attempt, "turns")
            return
        attempt.path = request.path
        if request.path == len(attempt.paths):
            attempt.paths.append([])
            if not np.array_equal(request.prompt[:size], attempt.prompt.tokens):
                text = (
                    f"a request begins with token {request.prompt[0]}, and not with the prompt of "
                    f"the task, {attempt.prompt.tokens[:4].tolist()}: use chat messages in both, "
                    "or plain text in both"
                )
                self._end(attempt, environment.reject("environment_first_token", text))
                return
        path = attempt.paths[request.path]
        observed = request.prompt[size + sum(len(s.tokens) for s in path) :]
        settings = attempt.settings
        room = settings.max_new_tokens - attempt.num_tokens - len(observed)
        if room <= 0 and attempt.num_turns:
            self._stop(attempt, "length")
            return
        if room <= 0:
            most = settings.max_new_tokens
            text = f"the first text of the environment fills all {most} tokens"
            self._end(attempt, environment.reject("environment_no_room", text))
            return
        stops = settings.stop_strings
        if request.stop:
            decode = self._environments.served.tokenizer.decode
            stops = StopStrings(request.stop, functools.partial(decode, skip_special=False))
        turn = _TURNS + attempt.num_turns
        try:
            number = self._session.submit(
                request.prompt,
                (fold_in(attempt.key, turn) if attempt.num_turns else attempt.key)[None],
                dataclasses.replace(
                    settings, max_new_tokens=min(room, request.max_tokens), stop_strings=stops
                ),
                np.array([attempt.temperature], np.float32),
            )
        except ValueError as error:  # an agent may send invalid tokens
            self._end(attempt, environment.reject("environment_request", str(error)))
            return
        self._sampled[number] = attempt
        if len(observed):
            path.append(_Segment(observed, np.zeros(len(observed), np.float32), False))

    def _turn_ended(self, response: Response) -> None:
        attempt = self._sampled.pop(response.request)
        attempt.num_turns += 1
        attempt.versions += [response.version_min, response.version_max]
        attempt.paths[attempt.path].append(
            _Segment(response.tokens, response.token_logprobs, True, response.token_versions)
        )
        if not response.has_eos and attempt.num_tokens >= attempt.settings.max_new_tokens:
            attempt.finish = "length"
            if not self._environments.is_agent:
                self._stop(attempt, "length")
                return
        attempt.environment.turn(response)
        self._wait_for(attempt)

    def _stop(self, attempt: _Attempt, finish: FinishReason) -> None:
        """End an episode at a limit and request its reward."""
        attempt.finish = finish
        attempt.environment.end()
        self._wait_for(attempt)

    def _wait_for(self, attempt: _Attempt) -> None:
        attempt.asked_s = time.monotonic()
        self._asked.append(attempt)

    def _end(self, attempt: _Attempt, end: Ended) -> None:
        """Add a finished episode to the results."""
        for path in attempt.paths:
            self._session.forget(attempt.tokens_of(path))
        verdict = None
        if end.failure:
            verdict = Verdict(None, end.failure)
        elif self._environments.has_reward:
            verdict = Verdict(end.reward, "reward_none" if end.reward is None else None)
        paths = [path for path in attempt.paths if any(s.is_sampled for s in path)]
        if not paths:  # No token was sampled, but a rejected response still needs one.
            none = np.zeros(1, np.float32)
            paths = [[_Segment(attempt.prompt.tokens[-1:], none, True)]]
        segments = [s for path in paths for s in path]
        versions = attempt.versions or [self.version]
        token_versions, newest = [], min(versions)
        for s in segments:
            own = np.full(len(s.tokens), newest, np.int32) if s.versions is None else s.versions
            token_versions.append(own)
            newest = int(own[-1])
        lengths = tuple(sum(len(s.tokens) for s in path) for path in paths)
        self._ended.append(
            Episode(
                attempt.request,
                attempt.sample,
                np.concatenate([s.tokens for s in segments]).astype(np.int32),
                np.concatenate([s.logprobs for s in segments]).astype(np.float32),
                np.concatenate([np.full(len(s.tokens), s.is_sampled) for s in segments]),
                attempt.finish or ("eos" if end.finish == "eos" else "done"),
                min(versions),
                max(versions),
                attempt.temperature,
                verdict,
                attempt.environment_s,
                lengths if len(paths) > 1 else (),
                attempt.environment.num_failed_calls,
                np.concatenate(token_versions),
            )
        )


def open_session(
    decoder: Sessions,
    params: Params,
    environments: EnvironmentPool | None,
    *,
    num_slots: int,
    version: int = 0,
) -> SingleTurnSession:
    """Return a session of episodes, without requests.

    Args:
        decoder: opens decode sessions.
        params: weights, on the devices to run on.
        environments: environments of the task; None: episodes of one turn.
        num_slots: number of turns sampled at a time.
        version: version of the weights.
    """
    session = decoder.session(
        params,
        num_slots=num_slots,
        version=version,
        keeps_caches=environments is not None,
    )
    return (
        SingleTurnSession(session)
        if environments is None
        else EpisodeSession(session, environments)
    )
