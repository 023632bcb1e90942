# SPDX-License-Identifier: Apache-2.0
"""The processes of a run's environments, and the HTTP server of its agents.

Invariant: a call that hangs or ends its process costs the episodes of its worker
(`environment_lost`), and no other episode.
"""

import asyncio
import secrets
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from tba_jax.environments.adapters import make_handler
from tba_jax.environments.episode import Agent, Attempt, Environment, Episode, Sample
from tba_jax.remote.http_server import HttpServer, bind
from tba_jax.serving.failures import FailureLines
from tba_jax.serving.protocol import ApiError, Call, Kind, Served, Update
from tba_jax.serving.server import Scope, Updates, make_application
from tba_jax.workers import WorkerFailed, WorkerPool

DEFAULT_WORKERS = 4
"""Number of workers; episodes share them."""


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
        message = ("describe", self._has_schemas)
        try:
            answer = self.workers.call(message, self.timeout_s, "its creation").result()
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
        self.has_reward, self.has_tools = answer["has_reward"], answer["has_tools"]
        self.is_agent, self.schemas = answer["is_agent"], answer["schemas"]
        if not answer["shares_workers"]:
            self.workers.num_workers = sys.maxsize
        if self._has_schemas:  # describing tools has imported transformers there
            self.workers.run(self.workers.end_idle())
        if self.is_agent:
            application = make_application(self._scope, self.served, prefix="/{episode}")
            self._server = HttpServer(application, "agent-server", bind("127.0.0.1", 0))
        self._is_checked = True

    def start(self, attempt: Attempt, sample: Sample) -> "Future[Episode]":
        """Begin an episode; the result of the future is `WorkerFailed` after `close`.

        Args:
            attempt: what the episode begins with.
            sample: samples the turns; the loop of the pool awaits it.
        """

        async def run() -> Episode:
            return await (Agent if self.is_agent else Environment)(self, attempt, sample).run()

        return self.workers.run(run())

    def report(self, name: str, text: str, what: str = "episode(s) rejected as") -> None:
        """Print a line about a failure; repeated failures of one name are printed at intervals."""
        self._failures.report(name, text, what)

    def add(self, agent: Agent) -> str:
        """Accept requests of an agent; return its base URL."""
        assert self._server is not None
        agent.id = secrets.token_hex(16)
        self._agents[agent.id] = agent
        return f"http://127.0.0.1:{self._server.port}/{agent.id}/v1"

    def remove(self, agent: Agent) -> None:
        """Refuse requests of an agent."""
        del self._agents[agent.id]

    def close(self) -> None:
        """Kill all workers, and refuse all requests."""
        self.workers.close()
        if self._server is not None:
            self._server.close()
            self._server = None

    def _scope(self, episode: str) -> Scope:
        """Return the scope of an agent's requests.

        Raises:
            ApiError: the agent's episode has ended.
        """
        agent = self._agents.get(episode)
        if agent is None:
            raise ApiError(
                "there is no such episode: it has ended, or the base URL is not the agent's own",
                status=404,
                code="episode_ended",
            )

        async def scope(kind: Kind, body: Mapping[str, Any]) -> tuple[Call, Updates]:
            call, turn = await asyncio.wrap_future(self.workers.run(agent.answer(kind, body)))
            return call, _only(turn)

        return scope


async def _only(turn: Update) -> Updates:
    yield 0, turn
