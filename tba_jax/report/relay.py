# SPDX-License-Identifier: Apache-2.0
"""A display for a process that no person watches: what it would show is fetched by another one.

Invariant: what was relayed can be fetched again, as an answer may be lost.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Display(Protocol):
    """What a run says to a person; `ProgressDisplay` says what each means."""

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Newest values."""
        ...

    def resume(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Values of before."""
        ...

    def phase(self, text: str) -> None:
        """Show the current activity."""
        ...

    def note(self, text: str) -> None:
        """Print a line that stays."""
        ...

    def close(self) -> None:
        """Nothing follows."""
        ...


class Relay:
    """Keeps what is to be shown, in order, until it was fetched; safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first = 0  # number of the oldest item that is kept
        self._items: list[tuple[str, tuple[Any, ...]]] = []

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Newest values."""
        self._add("write", step, dict(values))

    def resume(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Values of before."""
        self._add("resume", [dict(record) for record in records])

    def phase(self, text: str) -> None:
        """Show the current activity."""
        self._add("phase", text)

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self._add("note", text)

    def close(self) -> None:
        """Do nothing: the watching process closes its own display."""

    def _add(self, method: str, *arguments: Any) -> None:
        with self._lock:
            self._items.append((method, arguments))

    def since(self, number: int) -> tuple[int, list[tuple[str, tuple[Any, ...]]]]:
        """Return items from `number` on, and the number to request next; older ones are dropped.

        Args:
            number: what an earlier call returned, 0 at first.
        """
        with self._lock:
            done = max(0, number - self._first)
            del self._items[:done]
            self._first += done
            return self._first + len(self._items), list(self._items)


def show(items: Sequence[tuple[str, tuple[Any, ...]]], display: Display) -> None:
    """Show what another process relayed."""
    for method, arguments in items:
        getattr(display, method)(*arguments)
