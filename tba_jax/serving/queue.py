# SPDX-License-Identifier: Apache-2.0
"""Queue between the threads that receive requests and the thread that drives a decode session.

Invariant: every submitted generation ends with one final update for each sample or with one error,
unless it is cancelled.
"""

import os
import threading
from collections.abc import Mapping
from typing import Any

from tba_jax.decoding.session import Session
from tba_jax.serving.protocol import Call, Generation, Kind, Served, Update, parse


class RequestQueue:
    """Queue of generations for one session, and the scope of independent requests.

    `parse`, `submit` and `cancel` are thread-safe.

    Args:
        served: the model.

    Attributes:
        is_paused: whether decoding is paused.
    """

    def __init__(self, served: Served) -> None:
        self.is_paused = False
        self._served = served
        self._lock = threading.Lock()
        self._new: list[Generation] = []
        self._cancelled: list[Generation] = []
        self._failure: Exception | None = None
        # Generation and its number of unfinished samples, by the session's number of the request;
        # used on the session's thread only.
        self._live: dict[int, tuple[Generation, int]] = {}

    def parse(self, kind: Kind, body: Mapping[str, Any]) -> Call:
        """Return the call of a request.

        Raises:
            ApiError: the request is refused.
        """
        return parse(kind, body, self._served, int.from_bytes(os.urandom(7), "big"))

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

    def step(self, session: Session) -> bool:
        """Take in requests and decode one chunk; return False if there is nothing to decode."""
        self._take_in(session)
        if self.is_paused or session.is_idle:
            return False
        try:
            for response in session.step():
                generation, left = self._live.pop(response.request)
                if left > 1:
                    self._live[response.request] = generation, left - 1
                finish = "stop" if response.has_eos else "length"
                row = (response.sample, response.tokens, response.token_logprobs, finish)
                generation.notify(Update(*row))
            for number, (generation, _) in self._live.items():
                if generation.is_streamed:
                    for sample, (tokens, logprobs) in session.unfinished(number).items():
                        generation.notify(Update(sample, tokens, logprobs))
        except Exception as error:  # every waiting client receives the error of the device
            self.fail(error)
            raise
        return True

    def fail(self, error: Exception) -> None:
        """End every generation with an error, and refuse later ones with the same error."""
        with self._lock:
            self._failure = error
            new, self._new = self._new, []
        for generation in [*new, *(each for each, _ in self._live.values())]:
            generation.notify(error)
        self._live.clear()

    def _take_in(self, session: Session) -> None:
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
            self._live[number] = generation, len(generation.keys)
        for number, (generation, _) in list(self._live.items()):
            if generation in cancelled:
                session.cancel(number)
                del self._live[number]
