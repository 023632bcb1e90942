# SPDX-License-Identifier: Apache-2.0
"""Queue between the threads that receive requests and the thread that drives a decode session.

Invariant: every submitted generation ends with one final update for each sample or with one error,
unless it is cancelled.
"""

import collections
import dataclasses
import threading
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from tba_jax.decoding.requests import Response, SamplingSettings
from tba_jax.decoding.session import Session

Finish = Literal["", "stop", "length"]


class Update(NamedTuple):
    """All tokens of one sample so far.

    Attributes:
        sample: index of the sample.
        tokens: int32 [t].
        token_logprobs: float32 [t], log-probs under the distribution that was sampled from.
        finish: reason why the sample ended; "": the sample has not ended.
        version_min, version_max: oldest and newest weight version; -1 before the end.
    """

    sample: int
    tokens: np.ndarray
    token_logprobs: np.ndarray
    finish: Finish = ""
    version_min: int = -1
    version_max: int = -1


@dataclasses.dataclass(eq=False)
class Generation:
    """Samples of one prompt, requested by another thread.

    Attributes:
        prompt: int32 [s].
        keys: uint32 [n 2], threefry key data of each sample.
        settings: sampling settings.
        is_streamed: whether updates before the end are wanted.
        notify: receives updates, or the error of a refused prompt; called on the session's thread.
    """

    prompt: np.ndarray
    keys: np.ndarray
    settings: SamplingSettings
    is_streamed: bool
    notify: Callable[[Update | Exception], None]


class RequestQueue:
    """Queue of generations for one session; `submit` and `cancel` are thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: list[Generation] = []
        self._cancelled: list[Generation] = []
        self._is_paused = False
        self._failure: Exception | None = None
        # Used on the session's thread only; by the session's number of the generation.
        self._live: dict[int, Generation] = {}
        self._left: collections.Counter[int] = collections.Counter()

    def submit(self, generation: Generation) -> None:
        """Queue a generation.

        Raises:
            Exception: the session's thread has failed with this error.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._new.append(generation)

    def cancel(self, generation: Generation) -> None:
        """Drop a generation that has not ended; its slots become free."""
        with self._lock:
            self._cancelled.append(generation)

    def pause(self, is_paused: bool) -> None:
        """Stop decoding, or resume it."""
        self._is_paused = is_paused

    @property
    def is_paused(self) -> bool:
        """Whether decoding is paused."""
        return self._is_paused

    def step(self, session: Session) -> bool:
        """Take in requests and decode one chunk; return False if there is nothing to decode."""
        self.take_in(session)
        if self._is_paused or session.is_idle:
            return False
        try:
            for response in session.step():
                self.deliver(response)
            self.report(session)
        except Exception as error:  # every waiting client receives the error of the device
            self.fail(error)
            raise
        return True

    def take_in(self, session: Session) -> None:
        """Submit new generations to the session and drop cancelled ones."""
        with self._lock:
            new, self._new = self._new, []
            cancelled, self._cancelled = self._cancelled, []
        for generation in new:
            if generation in cancelled:
                continue
            try:
                number = session.submit(generation.prompt, generation.keys, generation.settings)
            except ValueError as error:
                generation.notify(error)
                continue
            self._live[number] = generation
            self._left[number] = len(generation.keys)
        for number, generation in list(self._live.items()):
            if generation in cancelled:
                session.cancel(number)
                self._forget(number)

    def deliver(self, response: Response) -> None:
        """Send a finished sample to its receiver."""
        generation = self._live[response.request]
        self._left[response.request] -= 1
        if not self._left[response.request]:
            self._forget(response.request)
        finish: Finish = "stop" if response.has_eos else "length"
        generation.notify(
            Update(
                response.sample,
                response.tokens,
                response.token_logprobs,
                finish,
                response.version_min,
                response.version_max,
            )
        )

    def report(self, session: Session) -> None:
        """Send an update with all tokens so far to each streamed generation."""
        for number, generation in self._live.items():
            if generation.is_streamed:
                for sample, (tokens, logprobs) in session.unfinished(number).items():
                    generation.notify(Update(sample, tokens, logprobs))

    def fail(self, error: Exception) -> None:
        """End every generation with an error, and refuse later ones with the same error."""
        with self._lock:
            self._failure = error
            new, self._new = self._new, []
        for generation in [*new, *self._live.values()]:
            generation.notify(error)
        self._live.clear()

    def _forget(self, number: int) -> None:
        del self._live[number], self._left[number]
