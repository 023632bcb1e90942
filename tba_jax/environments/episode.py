# SPDX-License-Identifier: Apache-2.0
"""Finished episodes, and a session whose episodes have one turn and no environment.

A response of one turn is an episode without observations. Searchers and evaluations can therefore
use one interface: `SingleTurnSession`, or its subclass `EpisodeSession` for a task with an
environment. Invariant: an episode has the log-prob of each sampled token under the distribution
from which the token was drawn.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from tba_jax.decoding.requests import Response, SamplingSettings, Statistics
from tba_jax.flow.trajectory import FinishReason, Prompt, paths_of
from tba_jax.models.transformer import Params
from tba_jax.rewards.source import Verdict


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


class TurnSession(Protocol):
    """Interface of a decode session; `decoding.session.Session` documents it."""

    num_slots: int
    version: int
    statistics: Statistics

    @property
    def is_idle(self) -> bool: ...

    @property
    def room(self) -> int: ...

    def swap(self, params: Any, version: int) -> None: ...

    def submit(
        self,
        prompt: np.ndarray,
        keys: np.ndarray,
        settings: SamplingSettings,
        temperatures: np.ndarray | None = None,
    ) -> int: ...

    def forget(self, conversation: np.ndarray) -> None: ...

    def step(self) -> list[Response]: ...

    def run(self) -> Iterator[Response]: ...


class Sessions(Protocol):
    """Source of decode sessions: a `Decoder`, or a client of an inference server."""

    def session(
        self,
        params: Any,
        *,
        num_slots: int,
        prefill_prompts: int = 1,
        version: int = 0,
        keeps_caches: bool = False,
    ) -> TurnSession:
        """Return an empty session; arguments as of `Decoder.session`."""
        ...


class SingleTurnSession:
    """Session of one-turn episodes in the slots of a decode session; one thread calls it."""

    def __init__(self, session: TurnSession) -> None:
        self._session = session

    @property
    def version(self) -> int:
        return self._session.version

    @property
    def num_slots(self) -> int:
        """Return the number of turns that are sampled concurrently."""
        return self._session.num_slots

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
        return [_of_one_turn(response) for response in self._session.step()]

    def run(self) -> Iterator[Episode]:
        """Yield episodes as they finish, until the session is idle."""
        while not self.is_idle:
            yield from self.step()


def _of_one_turn(y: Response) -> Episode:
    return Episode(
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
