# SPDX-License-Identifier: Apache-2.0
"""Sampling of a searcher: from prompts, weights and random keys to groups of episodes.

The synchronous driver submits the prompts of a round and waits for all groups. The asynchronous
driver submits prompts while the session runs, and receives a group when its last episode ends. Both
use a `GroupSession`, which also samples the continuations for estimates of state values.

Invariant: tokens depend on prompt, weights, settings, and the number of the round or ticket, not on
the other prompts of the session.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from tba_jax.decoding.engine import row_keys
from tba_jax.decoding.keys import fold_in, key_data
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.environments.episode import Episode, Sessions, SingleTurnSession
from tba_jax.environments.episodes import Episodes, open_session
from tba_jax.flow.trajectory import Prompt
from tba_jax.search.config import SearchSettings
from tba_jax.search.state_values import Continuation, states_of
from tba_jax.weights.transport import Published

# First fold of the root key: separates searcher draws from other uses of the seed.
SEARCHER_ROLE = 1
# Folded into the key of a round or ticket to get the key of continuations. It is larger than any
# sample's index.
_CONTINUED = 2**31 - 1


class SampledGroup(NamedTuple):
    """A prompt and its finished episodes; all of them may have failed.

    Attributes:
        episodes: episodes in the order of the samples.
        continuations: tokens of a state -> sampled responses that continue the state.
    """

    prompt: Prompt
    episodes: tuple[Episode, ...]
    continuations: Mapping[bytes, Sequence[Continuation]] = {}


@dataclasses.dataclass
class _Open:
    """A group in progress; `left` is the number of unfinished episodes and continuations."""

    number: int
    prompt: Prompt
    key: np.ndarray  # random key of continuations
    episodes: list[Episode | None]
    left: int
    continuations: dict[bytes, list[Continuation]] = dataclasses.field(default_factory=dict)


class _Request(NamedTuple):
    """Purpose of a request to the decode session.

    Attributes:
        group: the group that needs the response.
        state: tokens that a continuation begins with; None: the response is an episode.
    """

    group: _Open
    state: np.ndarray | None = None


class StateValues(NamedTuple):
    """Settings of the estimation of state values by sampled continuations.

    Attributes:
        tokens: number of tokens between two states of a response; 0: no estimates.
        samples: number of continuations per state.
    """

    tokens: int
    samples: int


NO_STATES = StateValues(0, 0)


class Sampler:
    """Sampling of one searcher.

    Args:
        key: root key of the run.
        episodes: settings of episodes, for a task with an environment.
    """

    states = NO_STATES

    def __init__(
        self,
        decoder: Sessions,
        settings: SearchSettings,
        key: jax.Array,
        searcher: int,
        episodes: Episodes | None = None,
        states: StateValues = NO_STATES,
    ) -> None:
        self.settings = settings
        self.states = states
        self._decoder = decoder
        self._episodes = episodes
        self._sampling = sampling_settings(settings)
        self._key = fold_in(fold_in(key_data(key), SEARCHER_ROLE), searcher)

    def open(self, published: Published) -> "GroupSession":
        """Return an empty session."""
        session = open_session(
            self._decoder,
            published.params,
            self._episodes,
            num_slots=self.settings.slots,
            num_samples=self.settings.samples_per_prompt,
            version=published.version,
        )
        return GroupSession(self, session)

    def sample(
        self, prompts: Sequence[Prompt], number: int, published: Published
    ) -> list[SampledGroup]:
        """Sample S episodes of each prompt, and wait until all have ended.

        Args:
            number: number of the round; no two rounds use the same random numbers.
        """
        groups = self.open(published)
        groups.submit(prompts, number)
        return groups.run()

    def requests(
        self, num_prompts: int, number: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, SamplingSettings]:
        """Return random keys, temperatures and settings for the episodes of a round or ticket.

        Returns:
            Key data of each sample, uint32 [p S 2]; temperatures, float64 [p S]; the key data for
            continuations, uint32 [2]; the sampling settings.
        """
        key = fold_in(self._key, number)
        temperatures = self._temperatures(key, num_prompts)
        keys = row_keys(key, temperatures.size).reshape(*temperatures.shape, 2)
        return keys, temperatures, fold_in(key, _CONTINUED), self._sampling

    def _temperatures(self, key: np.ndarray, num_prompts: int) -> np.ndarray:
        """Return float64 [p S]: the sampling temperature of each response of a round."""
        settings = self.settings
        shape = (num_prompts, settings.samples_per_prompt)
        out = np.full(shape, settings.sampling_temperature)
        if settings.explore:
            share, low, high = settings.explore
            rng = np.random.default_rng(key.tolist())
            explores = rng.random(shape) < share
            # Rounded to hundredths, because the buffer stores each distinct temperature once.
            own = np.round(rng.uniform(low, high, shape), 2)
            out = np.where(explores, own, out)
        return out


class GroupSession:
    """Groups of episodes in a session of the decode engine; one thread drives it."""

    def __init__(self, sampler: Sampler, session: SingleTurnSession) -> None:
        self.session = session
        self._sampler = sampler
        self._requests: dict[int, _Request] = {}  # requests with unfinished samples

    def submit(self, prompts: Sequence[Prompt], number: int) -> list[int]:
        """Queue S episodes of each prompt; return the number of each group, ascending.

        Args:
            number: number of the round or ticket; it selects the random numbers.
        """
        keys, temperatures, continued, settings = self._sampler.requests(len(prompts), number)
        groups = []
        for i, prompt in enumerate(prompts):
            group = self.session.submit(prompt, keys[i], settings, temperatures[i])
            size = len(keys[i])
            self._requests[group] = _Request(
                _Open(group, prompt, fold_in(continued, i), [None] * size, size)
            )
            groups.append(group)
        return groups

    def step(self) -> dict[int, SampledGroup]:
        """Run one chunk; return the groups that ended in it, by their numbers."""
        return self._completed(self.session.step())

    def run(self) -> list[SampledGroup]:
        """Run until all groups have ended; return them in the order of their submission."""
        found: dict[int, SampledGroup] = {}
        for episode in self.session.run():
            found |= self._completed([episode])
        return [found[number] for number in sorted(found)]

    def _completed(self, episodes: Sequence[Episode]) -> dict[int, SampledGroup]:
        """Add episodes to their groups; return the groups that are complete."""
        complete = {}
        for y in episodes:
            group, state = self._requests[y.request]
            group.left -= 1
            if state is None:
                group.episodes[y.sample] = y
            else:
                whole = Continuation(np.concatenate([state, y.tokens]), y.has_eos)
                group.continuations.setdefault(state.tobytes(), []).append(whole)
            if group.left or (state is None and self._continue(group)):
                continue
            complete[group.number] = self._close(group)
        return complete

    def _close(self, group: _Open) -> SampledGroup:
        own = [number for number, request in self._requests.items() if request.group is group]
        for number in own:
            del self._requests[number]
        episodes = tuple(y for y in group.episodes if y is not None)
        return SampledGroup(group.prompt, episodes, group.continuations)

    def _continue(self, group: _Open) -> bool:
        """Queue continuations of the states of all responses; return whether any were queued."""
        settings, (every, num_continuations) = self._sampler.settings, self._sampler.states
        if not every:
            return False
        sampling = sampling_settings(settings)
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
            keys = row_keys(fold_in(group.key, i), num_continuations)
            temperatures = np.full(len(keys), sampling.temperature)
            number = self.session.submit(prompt, keys, limits, temperatures)
            self._requests[number] = _Request(group, state)
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
