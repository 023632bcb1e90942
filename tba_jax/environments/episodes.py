# SPDX-License-Identifier: Apache-2.0
"""Episodes of one turn, or of several turns with an environment, over a decode session.

A turn is a request with one sample. When a turn ends, its slot becomes free and the environment
receives the turn. Caches of waiting conversations are kept while there is room.

Invariants: sampled tokens depend on prompt, key, turn and observations only; the time of an
observation changes only the rounding of log-probs, and in `run` not even this. A call that hangs
or ends its process costs the episodes of its worker (`environment_lost`) and no other.
"""

import asyncio
import collections
import dataclasses
import itertools
import queue
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.requests import Response, SamplingSettings
from tba_jax.environments.adapters import make_handler
from tba_jax.environments.episode import Agent, Attempt, Environment, Episode, Turn
from tba_jax.flow.trajectory import Prompt
from tba_jax.models.transformer import Params
from tba_jax.remote.http_server import HttpServer, bind
from tba_jax.serving.chat import Served
from tba_jax.serving.failures import ApiError, Failure, FailureLines
from tba_jax.serving.vllm import InferenceServer
from tba_jax.workers import WorkerFailed, WorkerPool, most_wait_s

DEFAULT_WORKERS = 4  # which the episodes share
_MOST_EPISODES = 128  # unfinished episodes of a session

Sessions = Decoder | InferenceServer


@dataclasses.dataclass(eq=False)
class EnvironmentPool:
    """Thread-safe pool of environments, with the HTTP server of agents' requests."""

    name: str  # as in `adapters.load`
    served: Served  # the policy, with the sampling settings of the run
    _: dataclasses.KW_ONLY
    max_turns: int  # maximum number of the policy's turns in an episode
    timeout_s: float  # deadline of a call in seconds, and of an agent between two turns
    num_workers: int = DEFAULT_WORKERS
    logs: Path | None = None  # as of `WorkerPool`

    def __post_init__(self) -> None:
        options: Any = {"num_workers": self.num_workers, "logs": self.logs}
        self.workers = WorkerPool("environment", make_handler, (self.name,), **options)
        self.has_reward = self.is_agent = self.first_token_only = False
        self.schemas: list[dict[str, Any]] = []  # of the tools, in JSON
        self._is_checked = False
        self.failures = FailureLines(f"environment {self.name}")
        self.agents: dict[str, Agent] = {}  # those that may send requests, by ID
        self._server: HttpServer | None = None

    def check(self) -> None:
        """Create an environment, or raise ValueError; start the server of agents."""
        if self._is_checked:
            return
        try:
            asked = self.workers.ask(("describe", {}), self.timeout_s, "its creation")
            answer = self.workers.run(asked).result()
        except WorkerFailed as error:
            answer = {"reason": f"{error}; its output is in {self.logs or 'standard error'}"}
        if "reason" in answer:
            raise ValueError(
                f"task.environment = {self.name!r} cannot be used: {answer['reason']}. Give "
                "package.module:NAME or path/to/file.py:NAME, a class without constructor "
                "arguments that is made within reward.timeout_s, or a function run(base_url, row)"
            )
        vars(self).update(answer)
        if self.is_agent:
            from tba_jax.serving.server import make_application  # slow; others need no server

            application = make_application(self._sample, self.served, prefix="/{episode}")
            self._server = HttpServer(application, "agent-server", bind("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{self._server.port}"
        self._is_checked = True

    def start(self, attempt: Attempt, sample: Callable[[Turn], Any]) -> Future[Episode]:
        """Begin an episode; `sample` takes its turns on the pool's loop. `close` cancels it."""
        episode = (Agent if self.is_agent else Environment)(self, attempt, sample)
        return self.workers.run(episode.run())

    def close(self) -> None:
        """Kill all workers, and refuse all requests."""
        self.workers.close()
        if self._server is not None:
            self._server.close()

    def _sample(self, episode: str) -> Any:
        """Return the `server.Sample` of the turns of an agent, by the ID of its episode."""
        if (agent := self.agents.get(episode)) is None:
            text = "there is no such episode: it has ended, or the base URL is not the agent's own"
            raise ApiError(text, status=404, code="episode_ended")

        async def sample(kind: Any, body: Mapping[str, Any]) -> AsyncIterator[Any]:
            call, turn = await asyncio.wrap_future(self.workers.run(agent.request(kind, body)))
            yield call, 0, turn

        return sample


class EpisodeSession:
    """Session of episodes in the slots of a decode session; one thread calls it.

    Without environments, an episode has one turn. Methods and properties without a description are
    those of `decoding.engine.Session`.
    """

    def __init__(
        self, decoder: Sessions, params: Params, pool: EnvironmentPool | None, **options: Any
    ) -> None:
        options = {"keeps_caches": pool is not None} | options  # those of `Session`
        self._session, self._environments = decoder.session(params, **options), pool
        self.version, self.statistics = self._session.version, self._session.statistics
        self._most = min(2 * self._session.num_slots, _MOST_EPISODES)
        self._limit_s = most_wait_s(pool.timeout_s) if pool else 0.0
        self._numbers = itertools.count()
        self._queued = collections.deque[Attempt]()
        self._open = set[tuple[int, int]]()  # request and sample of unfinished episodes
        # Turns that episodes request, and the futures of ended episodes.
        self._arrived = queue.SimpleQueue[Turn | tuple[Attempt, Future[Episode]]]()
        self._sampled = dict[int, Turn]()  # by the decode session's number of the request
        self._ended: list[Episode] = []

    @property
    def is_idle(self) -> bool:
        return self._session.is_idle and not (self._queued or self._open or self._ended)

    @property
    def room(self) -> int:
        if self._environments is None:
            return self._session.room
        return min(self._session.room, self._most - len(self._open)) - len(self._queued)

    @property
    def is_waiting(self) -> bool:
        """Take in turns; return whether there is none to sample until an environment answers."""
        self._receive()
        return self._environments is not None and self._session.is_idle and not self._ended

    def swap(self, params: Params, version: int) -> None:
        self._session.swap(params, version)
        self.version = version

    def submit(
        self, prompt: Prompt, keys: np.ndarray, settings: SamplingSettings, temperatures: np.ndarray
    ) -> int:
        """Queue episodes of one prompt; `max_new_tokens` limits their observations, too."""
        if self._environments is None:
            return self._session.submit(prompt.tokens, keys, settings, temperatures)
        if self._environments.first_token_only:
            prompt = dataclasses.replace(prompt, tokens=prompt.tokens[:1])
        index = next(self._numbers)
        for j, key in enumerate(keys):
            own = dataclasses.replace(settings, temperature=float(temperatures[j]))
            self._queued.append(Attempt(index, j, prompt, key, own))
        return index

    def step(self) -> list[Episode]:
        """Receive turns, run one chunk, and return the finished episodes."""
        self._receive()
        return self._finished(self._session.step())

    def run(self) -> Iterator[Episode]:
        """Yield all episodes; wait for all answers before sampling, so that no duration matters.

        Raises RuntimeError if the environments were closed, or do not answer.
        """
        while not self.is_idle:
            self._receive(waits=True)
            yield from self._finished(sorted(self._session.run(), key=lambda y: y.request))

    def _finished(self, responses: Iterable[Response]) -> list[Episode]:
        """Give turns to their episodes; return the episodes that have ended."""
        for y in responses:
            if self._environments is not None:
                self._sampled.pop(y.request).response.set_result(y)
                continue
            end = "eos" if y.has_eos else "length", y.version_min, y.version_max, y.temperature
            self._ended.append(Episode(*y[:4], None, *end))
        ended, self._ended = self._ended, []
        return ended

    def _receive(self, *, waits: bool = False) -> None:
        """Begin episodes; receive turns and ended episodes, in the order of the episodes.

        With `waits`, wait until each unfinished episode has a turn to sample.
        """
        self._begin()
        while num := self._num_owed if waits else self._arrived.qsize():
            try:
                arrived = [self._arrived.get(timeout=self._limit_s) for _ in range(num)]
            except queue.Empty:
                text = f"no environment has answered for {self._limit_s:g} s, longer than every "
                text += "deadline (reward.timeout_s). Run the same command again to continue"
                raise RuntimeError(text) from None
            for each in sorted(arrived, key=lambda x: x[0][:2]):
                if isinstance(each, Turn):
                    self._sample(each)
                else:
                    self._end(*each)
            self._begin()

    @property
    def _num_owed(self) -> int:
        """Return the number of unfinished episodes without a turn to sample."""
        return len(self._open.difference(x.attempt[:2] for x in self._sampled.values()))

    def _begin(self) -> None:
        while self._environments and self._queued and len(self._open) < self._most:
            attempt = self._queued.popleft()
            self._open.add(attempt[:2])
            end = self._environments.start(attempt, self._arrived.put)
            end.add_done_callback(lambda end, who=attempt: self._arrived.put((who, end)))

    def _sample(self, turn: Turn) -> None:
        """Queue a turn in the decode session, unless its episode has ended."""
        if not turn.response.set_running_or_notify_cancel():
            return
        temperatures = np.array([turn.settings.temperature], np.float32)
        wanted = turn.prompt, turn.key[None], turn.settings, temperatures
        try:
            self._sampled[self._session.submit(*wanted)] = turn
        except ValueError as error:  # an agent may send invalid tokens
            turn.response.set_exception(Failure("environment_request", str(error)))

    def _end(self, attempt: Attempt, end: Future[Episode]) -> None:
        """Add a finished episode to the results, and free its caches."""
        self._open.discard(attempt[:2])
        try:
            episode = end.result()
        except (WorkerFailed, CancelledError):
            raise RuntimeError("the environments of this run were closed") from None
        for path in episode.paths:
            self._session.forget(np.concatenate([attempt.prompt.tokens, episode.tokens[path]]))
        self._ended.append(episode)
