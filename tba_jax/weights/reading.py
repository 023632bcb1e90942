# SPDX-License-Identifier: Apache-2.0
"""Published weights as a process reads them that only searches.

`poll` reads the newest announced version from disk. A version that is deleted or written again
during the read is read again, or a newer one.

Invariant: searchers see a whole version or the one before.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tba_jax.weights.transport import Layout, Mailbox, Published
from tba_jax.weights.versions import PublicationError, Versions


class VersionReader:
    """A transport that publishes nothing.

    Args:
        versions: where those of the run are.
        abstract: tree of jax.ShapeDtypeStruct, as files have it, with shardings of this process.
        shardings: as in `MemoryTransport`.
        timeout_s: a version that is named and cannot be read for so long is damaged.
        layout: makes restored params what the readers want; None: they are.
        clock: monotonic seconds.

    Attributes:
        source: where versions are.
    """

    is_publishing = False

    def __init__(
        self,
        versions: Versions,
        abstract: Any,
        shardings: Sequence[Any],
        *,
        timeout_s: float,
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
        self._mailbox = Mailbox(shardings)
        self._told = self._read = -1
        self._failing_since: float | None = None

    def ring(self, version: int) -> None:
        """This version is complete; older words are ignored."""
        with self._changed:
            self._told = max(self._told, version)
            self._changed.notify_all()

    def forget(self) -> None:
        """Begin anew: the versions that were read are of a trainer that is gone."""
        with self._changed:
            self._told = self._read = -1
            self._mailbox = Mailbox(self._shardings)

    def latest(self, reader: int) -> Published | None:
        """Newest version that was read, on that reader's devices."""
        return self._mailbox.latest(reader)

    def poll(self, wait_s: float = 0.0) -> bool:
        """Restore the newest version, if it is not the one that is there.

        Raises:
            PublicationError: it cannot be read.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._told > self._read, wait_s)
            version, mailbox = self._told, self._mailbox
            if version <= self._read:
                return False
        start = self._clock()
        try:
            if found := self.source.damage(version):
                raise PublicationError(f"{self.source.path(version)}: {found[0]}")
            restored = self.source.read(version, self._abstract)
        except PublicationError as error:
            # It may be gone, as newer ones are there, or be written again by a restored trainer.
            self._failing_since = start if self._failing_since is None else self._failing_since
            if start - self._failing_since > self._timeout_s:
                raise PublicationError(
                    f"version {version} of the weights has not been readable for "
                    f"{start - self._failing_since:.0f} s (config.checkpoint.timeout_s): {error}. "
                    "Does this machine see the work directory? Mend the storage; the same command "
                    "goes on"
                ) from error
            return False
        mailbox.put(version, self._layout(restored))
        self._failing_since = None
        with self._changed:
            if mailbox is self._mailbox:
                self._read = version
        self.delivery_s = self._clock() - start
        return True

    def at(self, version: int) -> list[Any]:
        """A version that may not be the newest, for each reader.

        Raises:
            PublicationError: it cannot be read.
        """
        if found := self.source.damage(version):
            raise PublicationError(
                f"published weights {self.source.path(version)} are gone, or not as they were "
                f"written ({found[0]}); the same command goes on from the newest checkpoint"
            )
        mailbox = Mailbox(self._shardings)
        mailbox.put(version, self._layout(self.source.read(version, self._abstract)))
        found_here = [mailbox.latest(i) for i in range(len(self._shardings))]
        return [published.params for published in found_here if published is not None]

    def publish(self, version: int, params: Any) -> None:
        """Never: this process does not train."""
        raise AssertionError("who only reads publishes nothing")

    def settle(self) -> None:
        """Nothing: that would wait for storage."""

    def close(self) -> None:
        """Nothing is under way."""
