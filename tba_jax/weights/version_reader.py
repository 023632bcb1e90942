# SPDX-License-Identifier: Apache-2.0
"""Reader of published weights for processes that only search.

`poll` reads the newest announced version from disk. If the version is deleted or rewritten during
the read, `poll` reads again, possibly a newer version.

Invariant: searchers get a whole version: the newest or the previous one.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tba_jax.devices.platform import return_free_memory
from tba_jax.storage import saves
from tba_jax.weights.transport import Delivered, Layout, Published
from tba_jax.weights.versions import PublicationError, Versions

_TRIM_PERIOD_S = 60.0  # least time between two returns of freed memory to the operating system


class VersionReader:
    """Transport that only reads versions from disk.

    Args:
        abstract: tree of jax.ShapeDtypeStruct of the files, with shardings on this process.
        timeout_s: seconds after which a listed version that cannot be read counts as damaged.
        layout: function that converts restored weights to the searchers' layout; None: no change.

    Attributes:
        source: published versions of the run.
    """

    is_publishing = False

    def __init__(
        self,
        versions: Versions,
        abstract: Any,
        shardings: Sequence[Any],
        *,
        timeout_s: float = saves.TIMEOUT_S,
        layout: Layout | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.delivery_s = 0.0
        self.source = versions
        self._abstract = abstract
        self._shardings = shardings
        self._timeout_s = timeout_s
        self._layout: Layout = (lambda params: params) if layout is None else layout
        self._clock = clock
        self._changed = threading.Condition()
        self._delivered = Delivered(shardings)
        self._announced = self._read = -1
        self._failing_since: float | None = None
        self._trimmed_at = clock()

    def announce(self, version: int) -> None:
        """Announce that this version is complete; announcements of older versions are ignored."""
        with self._changed:
            self._announced = max(self._announced, version)
            self._changed.notify_all()

    def forget(self) -> None:
        """Forget all versions that were read: their trainer was replaced."""
        with self._changed:
            self._announced = self._read = -1
            self._delivered = Delivered(self._shardings)

    def latest(self, reader: int) -> Published | None:
        """Return the newest version that was read, on the devices of searcher `reader`."""
        return self._delivered.latest(reader)

    def poll(self, wait_s: float = 0.0) -> bool:
        """Read the newest version, unless it was read before.

        Raises:
            PublicationError: the version cannot be read.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._announced > self._read, wait_s)
            version, delivered = self._announced, self._delivered
            if version <= self._read:
                return False
        start = self._clock()
        try:
            if found := self.source.damage(version):
                raise PublicationError(
                    f"{self.source.path(version)}: {found[0]}. Repair the storage"
                )
            restored = self.source.read(version, self._abstract)
        except PublicationError as error:
            # A newer version may have replaced it, or a restored trainer may be rewriting it.
            self._failing_since = start if self._failing_since is None else self._failing_since
            if start - self._failing_since > self._timeout_s:
                raise PublicationError(
                    f"version {version} of the weights has not been readable for "
                    f"{start - self._failing_since:.0f} s: {error}. "
                    "Check that this machine can read the work directory, then run the same "
                    "command again"
                ) from error
            return False
        delivered.put(version, self._layout(restored))
        self._failing_since = None
        with self._changed:
            if delivered is self._delivered:
                self._read = version
        if self._clock() - self._trimmed_at >= _TRIM_PERIOD_S:
            self._trimmed_at = self._clock()
            return_free_memory()
        self.delivery_s = self._clock() - start
        return True

    def at(self, version: int) -> list[Any]:
        """Return one version, not necessarily the newest, for each reader.

        Raises:
            PublicationError: the version cannot be read.
        """
        if found := self.source.damage(version):
            raise PublicationError(
                f"published weights {self.source.path(version)} are deleted or damaged "
                f"({found[0]}). Run the same command again to continue from the newest checkpoint"
            )
        delivered = Delivered(self._shardings)
        delivered.put(version, self._layout(self.source.read(version, self._abstract)))
        found_here = [delivered.latest(i) for i in range(len(self._shardings))]
        return [published.params for published in found_here if published is not None]

    def publish(self, version: int, params: Any) -> None:
        """Fail: this process does not train."""
        raise AssertionError("a reader of versions does not publish")

    def settle(self) -> None:
        """Do nothing: only `poll` may wait for storage."""

    def close(self) -> None:
        """Do nothing: there is no background work."""
