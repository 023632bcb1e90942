# SPDX-License-Identifier: Apache-2.0
"""Episodes of one turn, or of several turns with an environment, over a decode session.

A turn is a request with one sample. When a turn ends, its slot becomes free and the environment
receives the turn. Caches of waiting conversations are kept while there is room.

Invariant: sampled tokens depend on prompt, key, turn and observations. The time of observations
changes only the rounding of log-probs. In `run` the order of all requests is fixed, too.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import queue
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tba_jax.decoding.engine import Decoder, Session
from tba_jax.decoding.requests import Response, SamplingSettings, Statistics
from tba_jax.environments.episode import Attempt, Episode
from tba_jax.environments.pool import EnvironmentPool
from tba_jax.flow.trajectory import Prompt
from tba_jax.models.transformer import Params
from tba_jax.serving.failures import Failure
from tba_jax.serving.vllm import InferenceServer, ServerSession
from tba_jax.workers import MOST_DEADLINES, START_TIMEOUT_S, WorkerFailed

MOST_EPISODES = 128
"""Maximum number of concurrent episodes of a session."""
_SLACK_S = 60.0  # of a deadline on a busy machine

Sessions = Decoder | InferenceServer
"""Source of decode sessions."""


class _Turn(NamedTuple):
    """A turn that an episode awaits."""

    prompt: np.ndarray
    key: np.ndarray
    settings: SamplingSettings
    future: "concurrent.futures.Future[Response]"


class EpisodeSession:
    """Session of episodes in the slots of a decode session; one thread calls it.

    Without environments, episodes have one turn. Methods and properties without a description are
    those of `decoding.engine.Session`.
    """

    def __init__(
        self, session: Session | ServerSession, environments: EnvironmentPool | None = None
    ) -> None:
        self._session, self._environments = session, environments
        self._most = min(2 * session.num_slots, MOST_EPISODES)
        self._num_submitted = 0
        self._queued: collections.deque[Attempt] = collections.deque()
        # Request and sample of unfinished episodes, and of those that wait for their environment.
        self._open: set[tuple[int, int]] = set()
        self._asked: set[tuple[int, int]] = set()
        # Turns, and ends of episodes as done futures.
        self._arrived: queue.SimpleQueue[tuple[Attempt, Any]] = queue.SimpleQueue()
        # By the decode session's number of the request.
        self._sampled: dict[int, tuple[Attempt, _Turn]] = {}
        self._ended: list[Episode] = []

    @property
    def version(self) -> int:
        return self._session.version

    @property
    def statistics(self) -> Statistics:
        return self._session.statistics

    @property
    def is_idle(self) -> bool:
        return self._session.is_idle and not (self._queued or self._open or self._ended)

    @property
    def room(self) -> int:
        """Return the number of free slots minus queued episodes; negative if more are queued."""
        if self._environments is None:
            return self._session.room
        return min(self._session.room, self._most - len(self._open)) - len(self._queued)

    @property
    def is_waiting(self) -> bool:
        """Send requests to environments; return whether sampling must wait for answers."""
        if self._environments is None:
            return False
        self._poll()
        return self._session.is_idle and not self._ended

    def swap(self, params: Params, version: int) -> None:
        self._session.swap(params, version)

    def submit(
        self,
        prompt: Prompt,
        keys: np.ndarray,
        settings: SamplingSettings,
        temperatures: np.ndarray,
    ) -> int:
        """Queue episodes of one prompt, whose `max_new_tokens` includes observations."""
        if self._environments is None:
            return self._session.submit(prompt.tokens, keys, settings, temperatures)
        index = self._num_submitted
        self._num_submitted += 1
        for j, key in enumerate(keys):
            own = dataclasses.replace(settings, temperature=float(temperatures[j]))
            self._queued.append(Attempt(index, j, prompt, key, own, self.version))
        return index

    def step(self) -> list[Episode]:
        """Continue answered episodes, run one chunk, and return the finished episodes."""
        if self._environments is None:
            return list(map(_episode_of, self._session.step()))
        self._poll()
        for response in self._session.step():
            self._answer(*self._sampled.pop(response.request), response)
        ended, self._ended = self._ended, []
        return ended

    def run(self) -> Iterator[Episode]:
        """Yield all episodes; wait for every answer, so that their order depends on no duration.

        Raises:
            RuntimeError: the environments were closed, or none has answered by its deadline.
        """
        if self._environments is None:
            yield from map(_episode_of, self._session.run())
        while self._environments is not None and not self.is_idle:
            self._begin_queued()
            while self._asked:
                arrived = [self._next_arrived(self._environments.timeout_s) for _ in self._asked]
                for each in sorted(arrived, key=lambda x: x[0][:2]):
                    self._take(*each)
                self._begin_queued()
            yield from self._ended
            self._ended = []
            for response in sorted(self._session.run(), key=lambda y: y.request):
                self._answer(*self._sampled.pop(response.request), response)

    def _next_arrived(self, timeout_s: float) -> tuple[Attempt, Any]:
        """Wait for a turn or an end: longer than a worker may take to start and call."""
        limit_s = START_TIMEOUT_S + MOST_DEADLINES * timeout_s + _SLACK_S
        try:
            return self._arrived.get(timeout=limit_s)
        except queue.Empty:
            raise RuntimeError(
                f"no environment answered within {limit_s:.0f} s (reward.timeout_s = "
                f"{timeout_s:g}): the machine is overloaded. Run the same command again to continue"
            ) from None

    def _poll(self) -> None:
        """Begin episodes, and continue episodes whose environments have answered."""
        self._begin_queued()
        with contextlib.suppress(queue.Empty):
            while True:
                self._take(*self._arrived.get_nowait())
        self._begin_queued()

    def _begin_queued(self) -> None:
        while self._queued and len(self._open) < self._most:
            assert self._environments is not None, "only these episodes are queued"
            attempt = self._queued.popleft()
            self._open.add(attempt[:2])
            self._asked.add(attempt[:2])
            future = self._environments.start(attempt, self._sample)
            future.add_done_callback(lambda end, who=attempt: self._arrived.put((who, end)))

    async def _sample(
        self, attempt: Attempt, prompt: np.ndarray, key: np.ndarray, settings: SamplingSettings
    ) -> Response:
        """Await a turn, on the loop of the environments; see `episode.Sample`."""
        turn = _Turn(prompt, key, settings, concurrent.futures.Future())
        self._arrived.put((attempt, turn))
        return await asyncio.wrap_future(turn.future)

    def _take(self, attempt: Attempt, arrived: Any) -> None:
        """Queue a turn in the decode session, or add a finished episode to the results."""
        self._asked.discard(attempt[:2])
        if isinstance(arrived, _Turn):
            prompt, key, settings, _ = arrived
            temperatures = np.array([settings.temperature], np.float32)
            try:
                number = self._session.submit(prompt, key[None], settings, temperatures)
            except ValueError as error:  # an agent may send invalid tokens
                self._answer(attempt, arrived, Failure("environment_request", str(error)))
            else:
                self._sampled[number] = attempt, arrived
            return
        self._open.discard(attempt[:2])
        try:
            episode = arrived.result()
        except (WorkerFailed, concurrent.futures.CancelledError):
            raise RuntimeError("the environments of this run were closed") from None
        for path in episode.paths:
            self._session.forget(np.concatenate([attempt.prompt.tokens, episode.tokens[path]]))
        self._ended.append(episode)

    def _answer(self, attempt: Attempt, turn: _Turn, result: Response | Failure) -> None:
        """Give an episode the result of a turn, unless the episode has ended meanwhile."""
        if attempt[:2] not in self._open:
            return
        self._asked.add(attempt[:2])
        if not turn.future.set_running_or_notify_cancel():
            return
        if isinstance(result, Failure):
            turn.future.set_exception(result)
        else:
            turn.future.set_result(result)


def _episode_of(y: Response) -> Episode:
    end = "eos" if y.has_eos else "length", y.version_min, y.version_max, y.temperature
    return Episode(*y[:4], None, *end, token_versions=y.token_versions)


def open_session(
    decoder: Sessions,
    params: Params,
    environments: EnvironmentPool | None,
    *,
    num_slots: int,
    version: int = 0,
) -> EpisodeSession:
    """Return an empty session of episodes; `params`, of this version, are on its devices."""
    keeps = environments is not None
    session = decoder.session(params, num_slots=num_slots, version=version, keeps_caches=keeps)
    return EpisodeSession(session, environments)
