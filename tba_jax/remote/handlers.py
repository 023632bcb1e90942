# SPDX-License-Identifier: Apache-2.0
"""Handlers of the channel: messages of other processes, as calls of the owner."""

import concurrent.futures
import json
from collections.abc import Callable, Mapping
from typing import Any

from tba_jax.remote.channel import Handler, NotReady
from tba_jax.remote.owner import Owner


def owner_handlers(owner: Callable[[], Owner | None]) -> Mapping[str, Handler]:
    """Return the channel handlers of an owner.

    Args:
        owner: returns the owner; None before there is one.
    """

    def ready() -> Owner:
        found = owner()
        if found is None:
            raise NotReady("the trainer is starting, or has failed; its output has the cause")
        return found

    def join(data: bytes) -> bytes:
        values = _arguments(data, list, str, str)
        return json.dumps(ready().join(*values)).encode()

    def step(data: bytes) -> concurrent.futures.Future[bytes]:
        values = _arguments(data, int, int, bool, bool)
        return ready().steps.request(*values)

    return {"join": join, "search": lambda data: ready().answer(data), "step": step}


def _arguments(data: bytes, *kinds: type) -> list[Any]:
    """Return the values of a message, a JSON list.

    Raises:
        ValueError: the message has other values; it is refused and does not end the run.
    """
    try:
        values = json.loads(data)
    except ValueError:
        values = None
    if not isinstance(values, list) or [type(x) for x in values] != list(kinds):
        wanted = ", ".join(kind.__name__ for kind in kinds)
        raise ValueError(
            f"a message has {data[:80]!r}; wanted the JSON list [{wanted}]. Install the same "
            "version of tba_jax on every machine"
        )
    return values
