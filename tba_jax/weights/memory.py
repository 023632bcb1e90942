# SPDX-License-Identifier: Apache-2.0
"""Published weights in the memory of one process.

Invariants: searchers receive whole versions, which share no memory with the train state; searchers
with the same devices share one copy (tests/weights/test_weights.py).
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from tba_jax.devices.sharding import hand_over
from tba_jax.weights.publication import Published

DELIVERY_S = 0.1
"""Seconds for which a thread waits for a publication before it checks whether to stop."""


class OnDevices:
    """Versions on the devices of the searchers of a process: the newest, and those that are kept.

    With adapters, a version is merged into the base weights when a searcher begins to use it, so
    the trainer waits for the transfer only.

    Args:
        shardings: for each searcher, a sharding or a tree of shardings.
        merges: for each searcher, a function: adapters on its devices -> weights in the layout of
            its decoder. Searchers with the same function share its result. Empty without adapters.

    Attributes:
        newest: newest version on the devices; None before the first.
        delivery_s: publication latency of the newest version, in seconds.
    """

    def __init__(
        self, shardings: Sequence[Any], merges: Sequence[Callable[[Any], Any]] = ()
    ) -> None:
        self.newest: int | None = None
        self.delivery_s = 0.0
        self._shardings, self._merges = list(shardings), list(merges)
        self._lock, self._merging = threading.Lock(), threading.Lock()
        self._held: dict[int, list[Any]] = {}  # version -> weights or adapters of each searcher
        self._merged: dict[tuple[int, int], Published] = {}  # (version, first searcher with merge)
        self._kept, self._seen = set[int](), set[int]()  # seen: their evaluation was announced

    def put(self, version: int, params: Any, *, is_newest: bool = True) -> None:
        """Copy params to each searcher's devices, then replace the previous version.

        Args:
            params: weights in the searchers' dtype and layout, or adapters.
            is_newest: False: keep the version beside the newest one, for its evaluation.
        """
        # Searchers on the same devices share one copy.
        firsts = [self._shardings.index(wanted) for wanted in self._shardings]
        copies = {i: hand_over(params, self._shardings[i]) for i in dict.fromkeys(firsts)}
        jax.block_until_ready(copies)  # a searcher's thread never waits for arrays
        delivered = [copies[i] for i in firsts]
        with self._lock:
            self._held[version] = delivered
            if is_newest:
                self.newest = version
            else:
                self._kept.add(version)
            self._drop()

    def latest(self, i: int) -> Published | None:
        """Return the newest version for searcher i of this process; None before the first."""
        while (newest := self.newest) is not None:
            if (found := OnDevices.at(self, newest, i)) is not None:
                return found  # else a newer version has just replaced it
        return None

    def adapters(self, i: int) -> Published | None:
        """Return the newest version for searcher i as it was published, without merging."""
        with self._lock:
            newest = self.newest
            return None if newest is None else Published(newest, self._held[newest][i])

    def at(self, version: int, i: int) -> Published | None:
        """Return a version for searcher i; None if it was dropped."""
        with self._lock:
            if version not in self._held:
                return None
            published = Published(version, self._held[version][i])
        if not self._merges:
            return published
        key = version, self._merges.index(self._merges[i])
        with self._merging:
            if key not in self._merged:
                # Drop old copies first, so that the devices hold no copy that is not needed.
                self._merged = {x: y for x, y in self._merged.items() if x[0] in self._held}
                weights = self._merges[i](published.params)
                self._merged[key] = Published(version, jax.block_until_ready(weights))
            return self._merged[key]

    def keep(self, version: int) -> None:
        """Keep a version for its evaluation, also after newer publications."""
        with self._lock:
            self._kept.add(version)

    def keep_only(self, versions: Collection[int]) -> None:
        """Drop all versions but the newest and these, whose evaluations are not finished."""
        with self._lock:
            self._kept &= set(versions)
            self._drop()

    def announce(self, version: int, evaluated: Collection[int]) -> None:
        """Receive the newest version of the run and the versions under evaluation.

        A kept version goes when it is not evaluated any more: it or a newer one was, before.
        """
        del version
        self._seen = (self._seen | set(evaluated)) & self._kept
        last = max((*self._seen, *evaluated), default=-1)
        self.keep_only({v for v in self._kept if v in evaluated or v > last})

    def reset(self) -> None:
        """Begin with a new owner; only processes that do not train outlive an owner."""

    def _drop(self) -> None:
        wanted = self._kept | {self.newest}
        self._held = {version: held for version, held in self._held.items() if version in wanted}


class Weights(OnDevices):
    """Weights that a trainer process publishes to its own searchers.

    `publish` launches the copy on the trainer's thread; `poll`, on another thread, delivers it. A
    publication replaces one that is not delivered yet: a slow delivery costs freshness and no step.

    Args:
        program: result of `make_publish_program`, launched under the trainer's device lock.
        shardings, merges: as in `OnDevices`.
    """

    is_publishing = False
    """Whether a new publication would wait for the previous one."""

    def __init__(
        self,
        program: Callable[[Any], Any],
        shardings: Sequence[Any],
        merges: Sequence[Callable[[Any], Any]] = (),
    ) -> None:
        super().__init__(shardings, merges)
        self._program = program
        self._changed, self._delivering = threading.Condition(), threading.Lock()
        self._waiting: tuple[int, Any, float] | None = None  # version, params, time

    def publish(self, version: int, params: Any) -> None:
        """Launch copy and cast; the device runs both before the next donated step."""
        copied = self._program(params)
        with self._changed:
            self._waiting = version, copied, time.monotonic()
            self._changed.notify_all()

    def poll(self, wait_s: float = 0.0) -> bool:
        """Deliver the newest publication; return whether there was one.

        Args:
            wait_s: longest wait for a publication, in seconds.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None, wait_s)
        with self._delivering:
            with self._changed:
                taken, self._waiting = self._waiting, None
            if taken is None:
                return False
            version, params, since = taken
            self.put(version, params)
            self.delivery_s = time.monotonic() - since
            return True

    def keep(self, version: int) -> None:
        """Deliver a version before a newer publication replaces it, and keep it."""
        super().keep(version)
        self.poll()
