# SPDX-License-Identifier: Apache-2.0
"""Transport of adapters to searchers that decode with merged weights.

Invariant: searchers with the same devices share one merged copy of a version
(tests/weights/test_transport.py).
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tba_jax.weights.transport import Published, Transport


class MergingTransport:
    """Transport of adapters; `latest` returns the base weights with the adapters merged in.

    Each searcher's devices hold the base weights from the start of the run. A searcher merges a
    version when it begins to use it, so the trainer waits for the transfer only. Searchers with the
    same devices merge once.

    Args:
        merges: one function per searcher: adapters on its devices -> weights in the layout of its
            decoder. Searchers with the same function share the function's last result.

    Attributes:
        source: transport of the adapters.
    """

    def __init__(self, adapters: Transport, merges: Sequence[Callable[[Any], Any]]) -> None:
        self._adapters = self.source = adapters
        self._merges = list(merges)
        self._group = [self._merges.index(merge) for merge in self._merges]
        self._locks = [threading.Lock() for _ in self._merges]
        self._merged: dict[int, Published] = {}

    def publish(self, version: int, params: Any) -> None:
        """Publish adapters."""
        self._adapters.publish(version, params)

    def latest(self, reader: int) -> Published | None:
        """Return the newest version as merged weights on the reader's devices."""
        published = self._adapters.latest(reader)
        if published is None:
            return None
        group = self._group[reader]
        with self._locks[group]:
            merged = self._merged.get(group)
            if merged is None or merged.version < published.version:
                # Drop the old copy first, so that the devices never hold two merged copies.
                merged = None
                self._merged.pop(group, None)
                weights = self._merges[group](published.params)
                merged = Published(published.version, jax.block_until_ready(weights))
                self._merged[group] = merged
            return merged

    def merged(self, adapters: Sequence[Any]) -> list[Any]:
        """Return merged weights for each searcher."""
        return [merge(own) for merge, own in zip(self._merges, adapters, strict=True)]

    @property
    def delivery_s(self) -> float:
        return self._adapters.delivery_s

    @property
    def is_publishing(self) -> bool:
        return self._adapters.is_publishing

    def poll(self, wait_s: float = 0.0) -> bool:
        return self._adapters.poll(wait_s)

    def settle(self) -> None:
        self._adapters.settle()

    def close(self) -> None:
        self._adapters.close()
