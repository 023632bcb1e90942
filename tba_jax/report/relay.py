# SPDX-License-Identifier: Apache-2.0
"""Display of a process without a terminal: another process fetches and shows its output.

Invariant: fetched items can be fetched again, because a response may be lost.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol


class Display(Protocol):
    """Progress output of a run; `ProgressDisplay` documents the methods."""

    def write(self, step: int, values: Mapping[str, Any]) -> None: ...

    def resume(self, records: Iterable[Mapping[str, Any]]) -> None: ...

    def phase(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None:
        """Close the display."""
        ...


class Relay:
    """Thread-safe queue of display calls, kept until they are fetched."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first = 0  # number of the oldest kept item
        self._items: list[tuple[str, tuple[Any, ...]]] = []

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self._add("write", step, dict(values))

    def resume(self, records: Iterable[Mapping[str, Any]]) -> None:
        self._add("resume", [dict(record) for record in records])

    def phase(self, text: str) -> None:
        self._add("phase", text)

    def note(self, text: str) -> None:
        self._add("note", text)

    def close(self) -> None:
        """Do nothing: the fetching process closes its own display."""

    def _add(self, method: str, *arguments: Any) -> None:
        with self._lock:
            self._items.append((method, arguments))

    def since(self, number: int) -> tuple[int, list[tuple[str, tuple[Any, ...]]]]:
        """Return the items from `number` on and the next number to request; drop older items.

        Args:
            number: number that the last call returned; 0 for the first call.
        """
        with self._lock:
            done = max(0, number - self._first)
            del self._items[:done]
            self._first += done
            return self._first + len(self._items), list(self._items)


def show(items: Sequence[tuple[str, tuple[Any, ...]]], display: Display) -> None:
    """Show the relayed calls of another process on a display."""
    for method, arguments in items:
        getattr(display, method)(*arguments)
