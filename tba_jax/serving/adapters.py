# SPDX-License-Identifier: Apache-2.0
"""Adapters that clients load into a running server, each with a name, a queue and a session.

A request selects an adapter by its name in `model`. Invariant: a request ends with the weights that
it began with; an adapter that is unloaded finishes its requests and accepts no further ones.
"""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tba_jax.decoding.session import Session
from tba_jax.serving.protocol import ApiError, Call, Kind
from tba_jax.serving.queue import Generation, RequestQueue
from tba_jax.serving.server import PlainScope


class _Entry(NamedTuple):
    """A model that can be requested: the base model, or the base model with an adapter."""

    scope: PlainScope
    session: Session


class AdapterScope:
    """Scope of independent requests to a model and its adapters; `step` runs on one thread.

    Args:
        base: scope of the base model.
        session: session of the base model.
        open_session: folder of an adapter -> session of the model with it.
        most: maximum number of adapters.
    """

    def __init__(
        self,
        base: PlainScope,
        session: Session,
        open_session: Callable[[Path], Session],
        most: int,
    ) -> None:
        self._base, self._open_session, self._most = base, open_session, most
        self._entries = {base.served.model: _Entry(base, session)}
        self._leaving: list[_Entry] = []  # unloaded, with unfinished requests
        self._lock = threading.Lock()
        self._loading = threading.Lock()

    @property
    def names(self) -> list[str]:
        """Return the names of the loaded adapters."""
        with self._lock:
            return [name for name in self._entries if name != self._base.served.model]

    def load(self, name: str, path: str) -> None:
        """Load the adapter of a folder under a new name.

        Raises:
            ApiError: the name is taken, or the folder has no adapter of this model.
        """
        with self._loading:
            with self._lock:
                is_full = len(self._entries) + len(self._leaving) > self._most
                if name in self._entries:
                    raise ApiError(
                        f"the adapter {name!r:.80} has already been loaded. Unload it, or give "
                        "another name"
                    )
            if is_full:
                raise ApiError(
                    f"{self._most} adapters are loaded (--max_adapters). Unload one, or try again "
                    "when the requests of an unloaded one have ended",
                    status=429,
                    code="too_many_adapters",
                )
            try:
                session = self._open_session(Path(path))
            except (ValueError, OSError) as error:
                raise ApiError(f"the adapter {name!r:.80} cannot be loaded: {error}") from error
            queue = RequestQueue()
            queue.pause(self.is_paused)
            scope = PlainScope(self._base.served._replace(model=name), queue)
            with self._lock:
                self._entries[name] = _Entry(scope, session)

    def unload(self, name: str) -> None:
        """Accept no further requests for an adapter.

        Raises:
            ApiError: there is no such adapter.
        """
        with self._lock:
            if name not in self._entries or name == self._base.served.model:
                raise ApiError(
                    f"the adapter {name!r:.80} is not loaded. GET /v1/models lists the loaded ones",
                    status=404,
                )
            self._leaving.append(self._entries.pop(name))

    def parse(self, kind: Kind, body: Mapping[str, Any]) -> Call:
        """Return the call of a request."""
        name = body.get("model")
        with self._lock:
            found = self._entries.get(name) if isinstance(name, str) else None
        return (self._base if found is None else found.scope).parse(kind, body)

    def submit(self, generation: Generation) -> None:
        """Queue a generation.

        Raises:
            ApiError: its adapter was unloaded after the request was parsed.
        """
        with self._lock:
            found = self._entries.get(generation.model)
            if found is not None:
                found.scope.submit(generation)
                return
        raise ApiError(
            f"the model {generation.model!r:.80} does not exist", status=404, code="model_not_found"
        )

    def cancel(self, generation: Generation) -> None:
        """Drop a generation, if it has not ended."""
        with self._lock:
            for entry in (*self._entries.values(), *self._leaving):
                if entry.scope.served.model == generation.model:
                    entry.scope.cancel(generation)

    @property
    def is_paused(self) -> bool:
        """Whether decoding is paused."""
        return self._base.queue.is_paused

    def pause(self, is_paused: bool) -> None:
        """Stop decoding, or resume it."""
        with self._lock:
            for entry in (*self._entries.values(), *self._leaving):
                entry.scope.queue.pause(is_paused)

    def step(self) -> bool:
        """Decode a chunk of each model; return False if there is nothing to decode."""
        with self._lock:
            entries = [*self._entries.values(), *self._leaving]
        try:
            done = [entry.scope.queue.step(entry.session) for entry in entries]
        except Exception as error:  # of the device; every waiting client receives it
            for entry in entries:
                entry.scope.queue.fail(error)
            raise
        with self._lock:
            self._leaving = [x for x in self._leaving if not x.scope.queue.is_empty]
        return any(done)
