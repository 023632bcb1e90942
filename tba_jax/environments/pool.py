# SPDX-License-Identifier: Apache-2.0
"""The processes of a run's environments, and the HTTP server of its agents.

Invariant: a call that hangs or ends its process costs the episodes of its worker
(`environment_lost`), and no other episode.
"""

import asyncio
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

    Args:
        name: as in `adapters.load`.
        served: the policy, with the sampling settings of the run.
        max_turns: maximum number of the policy's turns in an episode.
        timeout_s: deadline of a call in seconds, and of an agent between two turns.
        has_schemas: whether `check` sets `schemas`, the JSON schemas of the tools.
        options: further arguments of `WorkerPool`.
    """

    def __init__(
        self,
        name: str,
        served: Served,
        *,
        max_turns: int,
        timeout_s: float,
        has_schemas: bool = False,
        **options: Any,
    ) -> None:
        self.name, self.served, self.max_turns = name, served, max_turns
        self.timeout_s, self._has_schemas, self._logs = timeout_s, has_schemas, options.get("logs")
        options = {"num_workers": DEFAULT_WORKERS, **options}
        self.workers = WorkerPool("environment", make_handler, (name,), **options)
        self.has_reward = self.has_tools = self.is_agent = self._is_checked = False
        self.schemas: list[dict[str, Any]] = []
        self.failures = FailureLines(f"environment {name}")
        self.agents: dict[str, Agent] = {}  # those that may send requests, by ID
        self._server: HttpServer | None = None

    @property
    def first_token_only(self) -> bool:
        """Return whether all tokens of a prompt but the first are stored as observations."""
        return self.is_agent or bool(self.schemas)

    def check(self) -> None:
        """Create an environment, or raise ValueError; start the server of agents."""
        if self._is_checked:
            return
        subject = f"task.environment = {self.name!r}"
        message = ("describe", self._has_schemas)
        try:
            answer = self.workers.call(message, self.timeout_s, "its creation").result()
        except WorkerFailed as error:
            remedy = f"Its output is in {self._logs or 'standard error'}"
            if error.name == "timeout":
                remedy = "Move slow work out of its constructor, or raise --config.reward.timeout_s"
            raise ValueError(f"{subject}: {error}. {remedy}") from None
        if "failure" in answer:
            raise ValueError(
                f"{subject} cannot be used: {answer['reason']}. Give package.module:NAME or "
                "path/to/file.py:NAME, a class without constructor arguments or a function "
                "run(base_url, row)"
            )
        vars(self).update(answer)
        if self._has_schemas:  # describing tools has imported transformers there
            self.workers.run(self.workers.end_idle())
        if self.is_agent:
            application = make_application(self._scope, self.served, prefix="/{episode}")
            self._server = HttpServer(application, "agent-server", bind("127.0.0.1", 0))
        self._is_checked = True

    def start(self, attempt: Attempt, sample: Sample) -> "Future[Episode]":
        """Begin an episode, which awaits `sample` on the loop of the pool.

        The result of the future is `WorkerFailed` after `close`.
        """

        async def run() -> Episode:
            return await (Agent if self.is_agent else Environment)(self, attempt, sample).run()

        return self.workers.run(run())

    def url_of(self, agent: Agent) -> str:
        """Accept requests of an agent; return its base URL."""
        assert self._server is not None
        self.agents[agent.id] = agent
        return f"http://127.0.0.1:{self._server.port}/{agent.id}/v1"

    def close(self) -> None:
        """Kill all workers, and refuse all requests."""
        self.workers.close()
        if self._server is not None:
            self._server.close()
            self._server = None

    def _scope(self, episode: str) -> Scope:
        """Return the scope of an agent's requests, or raise ApiError if its episode has ended."""
        if (agent := self.agents.get(episode)) is None:
            text = "there is no such episode: it has ended, or the base URL is not the agent's own"
            raise ApiError(text, status=404, code="episode_ended")

        async def scope(kind: Kind, body: Mapping[str, Any]) -> tuple[Call, Updates]:
            call, turn = await asyncio.wrap_future(self.workers.run(agent.answer(kind, body)))
            return call, _only(turn)

        return scope


async def _only(turn: Update) -> Updates:
    yield 0, turn
