# SPDX-License-Identifier: Apache-2.0
"""Sampling of a searcher: from a ticket's prompt and number to a group of episodes.

A `GroupSession` receives prompts while it runs, and returns a group when its last episode has
ended. It also samples the continuations for estimates of state values. Invariant: tokens depend on
prompt, weights, settings and the number of the ticket, not on the other prompts of the session.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tba_jax.decoding.requests import SamplingSettings
from tba_jax.decoding.sampling import fold_in
from tba_jax.environments.episode import Episode
from tba_jax.environments.episodes import EnvironmentPool, EpisodeSession, Sessions
from tba_jax.flow.trajectory import Prompt
from tba_jax.search.config import SearchSettings
from tba_jax.search.state_values import states_of
from tba_jax.weights.publication import Published

# First fold of the root key: separates searcher draws from other uses of the seed.
SEARCHER_ROLE = 1
# Folded into the key of a ticket to get the key of continuations. It is larger than any sample's
# index.
_CONTINUED = 2**31 - 1


class SampledGroup(NamedTuple):
    """A prompt and its finished episodes.

    Attributes:
        episodes: episodes in the order of the samples.
        continuations: tokens of a state -> sampled responses that continue the state; their tokens
            include those of the state.
    """

    prompt: Prompt
    episodes: tuple[Episode, ...]
    continuations: Mapping[bytes, Sequence[Episode]] = {}


@dataclasses.dataclass
class _Open:
    """A group in progress; `left` is the number of unfinished episodes and continuations."""

    number: int  # of the ticket
    prompt: Prompt
    episodes: list[Episode | None]
    left: int
    continuations: dict[bytes, list[Episode]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Sampling settings of a run, and the decoder of one searcher.

    Args:
        key: uint32 [2], the root key of the run with `SEARCHER_ROLE` folded in.
        environments: processes with the environments of a task that has one.
        state_tokens: number of tokens between two states of a response whose values are estimated
            by sampled continuations; 0: no estimates.
        num_continuations: number of continuations per state.
    """

    decoder: Sessions
    settings: SearchSettings
    key: np.ndarray
    environments: EnvironmentPool | None = None
    state_tokens: int = 0
    num_continuations: int = 4

    def open(self, published: Published) -> "GroupSession":
        """Return an empty session."""
        session = EpisodeSession(
            self.decoder,
            published.params,
            self.environments,
            num_slots=self.settings.slots,
            version=published.version,
        )
        return GroupSession(self, session)

    def key_of(self, number: int) -> np.ndarray:
        """Return the random key of a ticket, uint32 [2]."""
        return fold_in(self.key, number)

    def temperatures(self, key: np.ndarray) -> np.ndarray:
        """Return float64 [S]: the sampling temperature of each response of a ticket."""
        settings, size = self.settings, self.settings.samples_per_prompt
        out = np.full(size, settings.sampling_temperature)
        if settings.explore:
            share, low, high = settings.explore
            rng = np.random.default_rng(key.tolist())
            explores = rng.random(size) < share
            # Rounded to hundredths, because the buffer stores each distinct temperature once.
            own = np.round(rng.uniform(low, high, size), 2)
            out = np.where(explores, own, out)
        return out


class GroupSession:
    """Groups of episodes in a session of the decode engine; one thread drives it."""

    def __init__(self, sampler: Sampler, session: EpisodeSession) -> None:
        self.session = session
        self._sampler = sampler
        self._sampling = sampling_settings(sampler.settings)
        # Of each request its group, and the tokens that a continuation begins with.
        self._requests: dict[int, tuple[_Open, np.ndarray | None]] = {}

    def submit(self, number: int, prompt: Prompt) -> None:
        """Queue S episodes of a prompt.

        Args:
            number: number of the ticket; it selects the random numbers.
        """
        environments, key = self._sampler.environments, self._sampler.key_of(number)
        if environments is not None and environments.first_token_only:  # agents write the others
            prompt = dataclasses.replace(prompt, tokens=prompt.tokens[:1])
        temperatures = self._sampler.temperatures(key)
        size = len(temperatures)
        keys = fold_in(key, np.arange(size))
        request = self.session.submit(prompt, keys, self._sampling, temperatures)
        self._requests[request] = _Open(number, prompt, [None] * size, size), None

    def step(self) -> dict[int, SampledGroup]:
        """Run one chunk; return the groups that ended in it, by ticket number."""
        return self._completed(self.session.step())

    def run(self) -> dict[int, SampledGroup]:
        """Run until all groups have ended; return them by ticket number."""
        found: dict[int, SampledGroup] = {}
        for episode in self.session.run():
            found |= self._completed([episode])
        return found

    def _completed(self, episodes: Sequence[Episode]) -> dict[int, SampledGroup]:
        """Add episodes to their groups; return the groups that are complete."""
        complete = {}
        for y in episodes:
            group, state = self._requests[y.request]
            group.left -= 1
            if state is None:
                group.episodes[y.sample] = y
            else:
                whole = y._replace(tokens=np.concatenate([state, y.tokens]))
                group.continuations.setdefault(state.tobytes(), []).append(whole)
            if group.left or (state is None and self._continue(group)):
                continue
            for request in [r for r, (other, _) in self._requests.items() if other is group]:
                del self._requests[request]
            ended = tuple(episode for episode in group.episodes if episode is not None)
            complete[group.number] = SampledGroup(group.prompt, ended, group.continuations)
        return complete

    def _continue(self, group: _Open) -> bool:
        """Queue continuations of the states of all responses; return whether any were queued."""
        sampling, every = self._sampling, self._sampler.state_tokens
        if not every:
            return False
        key = fold_in(self._sampler.key_of(group.number), _CONTINUED)
        states = states_of([y.tokens for y in group.episodes if y is not None], every)
        for i, state in enumerate(states):
            prompt = dataclasses.replace(
                group.prompt, tokens=np.concatenate([group.prompt.tokens, state])
            )
            limits = dataclasses.replace(
                sampling,
                max_new_tokens=sampling.max_new_tokens - len(state),
                min_new_tokens=max(0, sampling.min_new_tokens - len(state)),
            )
            keys = fold_in(fold_in(key, i), np.arange(self._sampler.num_continuations))
            temperatures = np.full(len(keys), sampling.temperature)
            request = self.session.submit(prompt, keys, limits, temperatures)
            self._requests[request] = group, state
            group.left += len(keys)
        return bool(states)


def sampling_settings(settings: SearchSettings) -> SamplingSettings:
    """Return the sampling settings of searchers."""
    return SamplingSettings(
        settings.max_new_tokens,
        temperature=settings.sampling_temperature,
        top_p=settings.top_p,
        min_new_tokens=settings.min_new_tokens,
    )
