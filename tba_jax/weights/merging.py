# SPDX-License-Identifier: Apache-2.0
"""Adapters on their way to searchers: they travel, and whole weights are what is taken up.

It knows no way of travelling. Invariant: of a version a set of devices holds one merged copy.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tba_jax.weights.transport import Published, Transport


class MergingTransport:
    """A transport of adapters whose readers get whole weights.

    Adapters travel; each searcher's devices have held the base since the run began. They are merged
    by the searcher that takes a version up, so that the trainer waits for the transfer alone, and
    once for all that share devices.

    Args:
        adapters: the transport that adapters travel by.
        merges: of each reader: adapters on its devices -> weights as its decoder wants them.
            Readers with the same function share what it returned last.

    Attributes:
        source: the transport that adapters travel by.
    """

    def __init__(self, adapters: Transport, merges: Sequence[Callable[[Any], Any]]) -> None:
        self._adapters = self.source = adapters
        self._merges = list(merges)
        self._group = [self._merges.index(merge) for merge in self._merges]
        self._locks = [threading.Lock() for _ in self._merges]
        self._merged: dict[int, Published] = {}

    def publish(self, version: int, params: Any) -> None:
        """Publish adapters, as the transport that they travel by does."""
        self._adapters.publish(version, params)

    def latest(self, reader: int) -> Published | None:
        """Newest version as whole weights on that reader's devices."""
        published = self._adapters.latest(reader)
        if published is None:
            return None
        group = self._group[reader]
        with self._locks[group]:
            merged = self._merged.get(group)
            if merged is None or merged.version < published.version:
                # Dropped first: a searcher between two rounds then holds one merged copy, not two.
                merged = None
                self._merged.pop(group, None)
                weights = self._merges[group](published.params)
                merged = Published(published.version, jax.block_until_ready(weights))
                self._merged[group] = merged
            return merged

    def merged(self, adapters: Sequence[Any]) -> list[Any]:
        """Whole weights of adapters that lie on the devices of each reader."""
        return [merge(own) for merge, own in zip(self._merges, adapters, strict=True)]

    @property
    def delivery_s(self) -> float:
        """As the transport that adapters travel by."""
        return self._adapters.delivery_s

    @property
    def is_publishing(self) -> bool:
        """As the transport that adapters travel by."""
        return self._adapters.is_publishing

    def poll(self, wait_s: float = 0.0) -> bool:
        """As the transport that adapters travel by."""
        return self._adapters.poll(wait_s)

    def settle(self) -> None:
        """As the transport that adapters travel by."""
        self._adapters.settle()

    def close(self) -> None:
        """As the transport that adapters travel by."""
        self._adapters.close()
