# SPDX-License-Identifier: Apache-2.0
"""Rollouts: prompts and a sampler give transcripts, with the author of each token.

A response is one turn of the policy, or an episode of several turns with an environment's
observations between them. Invariant: a transcript has the log-prob of each sampled token under the
distribution that the token was drawn from.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from tba_jax.decoding.engine import Decoded, Decoder, row_keys
from tba_jax.decoding.keys import fold_in, key_data
from tba_jax.decoding.requests import Response, SamplingSettings
from tba_jax.decoding.session import Session
from tba_jax.environments.episodes import Episode, Episodes, EpisodeSession, ReplayedEnvironment
from tba_jax.flow.trajectory import FinishReason, Prompt
from tba_jax.rewards.source import Verdict
from tba_jax.search.config import SearchSettings
from tba_jax.weights.transport import Published

# First fold of the root key: separates searcher draws from other uses of the seed.
SEARCHER_ROLE = 1
# Folded into the key of a round or ticket, beyond any number of its samples.
_CONTINUED = 2**31 - 1


class Transcript(NamedTuple):
    """One sampled response.

    Attributes:
        tokens: int32 [t], end-of-sequence included.
        token_logprobs: float32 [t], of the distribution sampled from; 0 where is_sampled is False.
        is_sampled: bool [t], sampled by the policy; None: every token was.
        has_eos: False where the length limit cut it.
        version_min, version_max: span of the versions that read its prompt or drew it.
        temperature: it was drawn at.
        finish: why it ended; None: `has_eos` says.
        verdict: of its environment; None: reward functions are asked.
        environment_s: seconds that an episode waited for its environment; None without one.
    """

    tokens: np.ndarray
    token_logprobs: np.ndarray
    is_sampled: np.ndarray | None
    has_eos: bool
    version_min: int
    version_max: int
    temperature: float
    finish: FinishReason | None = None
    verdict: Verdict | None = None
    environment_s: float | None = None

    @property
    def finish_reason(self) -> FinishReason:
        """Return the reason of the response's end."""
        return self.finish or ("eos" if self.has_eos else "length")

    @property
    def num_sampled(self) -> int:
        """Return the number of tokens that the policy sampled."""
        return len(self.tokens) if self.is_sampled is None else int(self.is_sampled.sum())


class Rollout(NamedTuple):
    """A prompt and its responses, possibly none."""

    prompt: Prompt
    transcripts: tuple[Transcript, ...]


class Drawn(NamedTuple):
    """Result of a sampler: responses to p prompts, and their temperatures, float [p S]."""

    decoded: Decoded
    temperatures: np.ndarray


def rollout(
    prompts: Sequence[Prompt], sampler: Callable[[Sequence[np.ndarray]], Drawn]
) -> list[Rollout]:
    """Sample responses to every prompt: one turn of the policy.

    Args:
        prompts: p prompts.
        sampler: p token sequences -> S responses to each.
    """
    return rollouts_of(prompts, sampler([prompt.tokens for prompt in prompts]))


def rollouts_of(prompts: Sequence[Prompt], drawn: Drawn) -> list[Rollout]:
    """Return the drawn responses, prompt by prompt; a length of 0 is no response."""
    decoded, temperatures = drawn

    def transcript(i: int, j: int) -> Transcript:
        length = int(decoded.lengths[i, j])
        return Transcript(
            tokens=np.array(decoded.tokens[i, j, :length], np.int32),
            token_logprobs=np.array(decoded.token_logprobs[i, j, :length], np.float32),
            is_sampled=None,
            has_eos=bool(decoded.has_eos[i, j]),
            version_min=int(decoded.version_min[i, j]),
            version_max=int(decoded.version_max[i, j]),
            temperature=float(temperatures[i, j]),
        )

    return [
        Rollout(
            prompt, tuple(transcript(i, j) for j in np.flatnonzero(decoded.lengths[i]).tolist())
        )
        for i, prompt in enumerate(prompts)
    ]


def transcript_of(response: Response | Episode, temperature: float) -> Transcript:
    """Return the transcript of a response of a session, or of an episode."""
    if isinstance(response, Episode):
        return Transcript(
            response.tokens,
            response.token_logprobs,
            response.is_sampled,
            response.has_eos,
            response.version_min,
            response.version_max,
            temperature,
            response.finish,
            response.verdict,
            response.environment_s,
        )
    return Transcript(
        tokens=response.tokens.astype(np.int32),
        token_logprobs=response.token_logprobs.astype(np.float32),
        is_sampled=None,
        has_eos=response.has_eos,
        version_min=response.version_min,
        version_max=response.version_max,
        temperature=temperature,
    )


class Sampler:
    """Sampling of one searcher.

    Args:
        decoder: the engine; programs compile for the devices of the weights.
        settings: settings of searchers.
        key: root key of the run.
        searcher: index of the searcher.
        episodes: of a task with an environment.
    """

    def __init__(
        self,
        decoder: Decoder,
        settings: SearchSettings,
        key: jax.Array,
        searcher: int,
        episodes: Episodes | None = None,
    ) -> None:
        self.settings = settings
        self.episodes = episodes
        self._decoder = decoder
        self._sampling = sampling_settings(settings)
        self._key = fold_in(fold_in(key_data(key), SEARCHER_ROLE), searcher)

    def replay_environments(self) -> None:
        """Take the responses of environments from a log: no environment is asked any more."""
        if self.episodes is not None:
            self.episodes = dataclasses.replace(self.episodes, environments=ReplayedEnvironment())

    def draw(
        self,
        prompts: Sequence[np.ndarray],
        *,
        round: int,
        published: Published,
    ) -> Drawn:
        """Draw S responses to each of p prompts.

        Args:
            prompts: token ids.
            round: number of the round; no two rounds use the same random numbers.
            published: the weights.
        """
        key = fold_in(self._key, round)
        temperatures = self._temperatures(key, len(prompts))
        p, k = temperatures.shape
        decoded = self._decoder.decode(
            published.params,
            prompts,
            num_samples=k,
            key=row_keys(key, p * k).reshape(p, k, 2),
            settings=self._sampling,
            temperatures=temperatures,
            num_slots=self.settings.num_slots or None,
            version=published.version,
        )
        return Drawn(decoded, temperatures)

    def rollouts(
        self, prompts: Sequence[Prompt], *, round: int, published: Published
    ) -> list[Rollout]:
        """S episodes of each of p prompts; arguments as of `draw`."""
        key = fold_in(self._key, round)
        temperatures = self._temperatures(key, len(prompts))
        keys = row_keys(key, temperatures.size).reshape(*temperatures.shape, 2)
        session = self.open(published)
        assert isinstance(session, EpisodeSession)
        for i, prompt in enumerate(prompts):
            session.submit(prompt, keys[i], self._sampling, temperatures[i])
        found = {(y.request, y.sample): y for y in session.run()}
        return [
            Rollout(
                prompt,
                tuple(
                    transcript_of(found[i, j], temperature)
                    for j, temperature in enumerate(temperatures[i].tolist())
                ),
            )
            for i, prompt in enumerate(prompts)
        ]

    def open(self, published: Published) -> Session | EpisodeSession:
        """Return an empty session to which tickets are submitted while it runs."""
        session = self._open(published)
        return session if self.episodes is None else self.episodes.over(session)

    def _open(self, published: Published) -> Session:
        size = self.settings.samples_per_prompt
        num_slots = self.settings.num_slots or self.settings.prompts_per_round * size
        return self._decoder.session(
            published.params,
            num_slots=num_slots,
            prefill_prompts=-(-num_slots // size),
            version=published.version,
            is_fed=True,
        )

    def submit(
        self, session: Session | EpisodeSession, prompt: Prompt, number: int
    ) -> tuple[int, np.ndarray]:
        """Queue S samples of a prompt.

        Args:
            session: made by `open`.
            prompt: the prompt.
            number: of the ticket; no two tickets or rounds use the same random numbers.

        Returns:
            The session's request number, and the temperature of each sample, float [S].
        """
        key = fold_in(self._key, number)
        (temperatures,) = self._temperatures(key, 1)
        keys = row_keys(key, self.settings.samples_per_prompt)
        if isinstance(session, EpisodeSession):
            return session.submit(prompt, keys, self._sampling, temperatures), temperatures
        return session.submit(prompt.tokens, keys, self._sampling, temperatures), temperatures

    def go_on(
        self,
        prompt: np.ndarray,
        states: Sequence[np.ndarray],
        *,
        num_samples: int,
        number: int,
        place: int,
        published: Published,
    ) -> list[list[Response]]:
        """Draw continuations of the first tokens of a response.

        They depend on prompt, states and numbers, not on other draws.

        Args:
            prompt: token ids.
            states: first tokens of responses, each shorter than the length limit.
            num_samples: continuations per state.
            number: number of the round or ticket.
            place: index of the prompt in the round.
            published: the weights.
        """
        session = self._open(published)
        key = fold_in(fold_in(fold_in(self._key, number), _CONTINUED), place)
        for i, state in enumerate(states):
            limits = dataclasses.replace(
                self._sampling,
                max_new_tokens=self._sampling.max_new_tokens - len(state),
                min_new_tokens=max(0, self._sampling.min_new_tokens - len(state)),
            )
            keys = row_keys(fold_in(key, i), num_samples)
            session.submit(np.concatenate([prompt, state]), keys, limits)
        found: list[list[Response]] = [[] for _ in states]
        for response in session.run():
            found[response.request].append(response)
        return [sorted(of_state, key=lambda y: y.sample) for of_state in found]

    def _temperatures(self, key: np.ndarray, num_prompts: int) -> np.ndarray:
        """Return float64 [p S]: the sampling temperature of each response of a round."""
        settings = self.settings
        shape = (num_prompts, settings.samples_per_prompt)
        out = np.full(shape, settings.sampling_temperature)
        if settings.explore_share:
            rng = np.random.default_rng(key.tolist())
            explores = rng.random(shape) < settings.explore_share
            limits = settings.explore_min_temperature, settings.explore_max_temperature
            # Rounded to hundredths, because the buffer keeps a table of distinct settings.
            own = np.round(rng.uniform(*limits, shape), 2)
            out = np.where(explores, own, out)
        return out


def sampling_settings(settings: SearchSettings) -> SamplingSettings:
    """Return the sampling settings of searchers."""
    return SamplingSettings(
        settings.max_new_tokens,
        temperature=settings.sampling_temperature,
        top_p=settings.top_p,
        min_new_tokens=settings.min_new_tokens,
    )
