# SPDX-License-Identifier: Apache-2.0
"""Weights as versions on disk: written by one or more processes, and read back by searchers.

All training processes write together with `VersionWriter`; processes that only search have a
`VersionReader`. Orbax's barriers include only the writers, or a single reader, so neither side
waits for the other. `CheckpointTransport` also delivers a version to searchers of the process that
wrote it. Invariants: a version is listed only when all its files are written, and is not deleted
while its evaluation is requested.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from tba_jax.devices.sharding import storable
from tba_jax.models.trees import check_same_tree
from tba_jax.storage import saves
from tba_jax.weights.transport import DeliveringTransport, Delivery, Layout, Published
from tba_jax.weights.versions import PublicationError, Versions, not_published

POLL_S = 0.05


class Members(NamedTuple):
    """Processes that save or restore together.

    Attributes:
        number: number of this process in `jax.distributed`.
        numbers: numbers of all members, the primary process first.
    """

    number: int
    numbers: tuple[int, ...]

    @property
    def options(self) -> ocp.options.MultiprocessingOptions:
        """Orbax options for these processes; in a job of one process, the default options."""
        if jax.process_count() == 1:
            return ocp.options.MultiprocessingOptions()
        return ocp.options.MultiprocessingOptions(
            primary_host=self.numbers[0],
            active_processes=set(self.numbers),
            barrier_sync_key_prefix=f"weights_{self.numbers[0]}",
        )


_ALONE = Members(0, (0,))


class VersionWriter:
    """Writer of versions for readers in other processes.

    `publish` copies the weights to the host on the trainer's thread, in all training processes at
    the same step; `poll`, on another thread, waits for the files and lists them.

    Args:
        session: ID of this start of the run. Readers use only versions with this ID. "": versions
            of earlier starts stay.
        timeout_s: longest time for writing a version, in seconds.
        kept: returns further versions that must stay on disk.

    Attributes:
        versions: published versions of the run.
    """

    def __init__(
        self,
        workdir: str,
        program: Callable[[Any], Any],
        *,
        session: str = "",
        members: Members = _ALONE,
        timeout_s: int = saves.TIMEOUT_S,
        kept: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self.delivery_s = 0.0
        self.versions = Versions(workdir, session=session)
        self._program = program
        self._kept = kept
        self._is_primary = members.number == members.numbers[0]
        self._writing: tuple[int, float] | None = None
        self._newest = -1
        self._changing = threading.Lock()
        if self._is_primary and session:
            self.versions.clear()
        self._writer = ocp.AsyncCheckpointer(
            ocp.StandardCheckpointHandler(multiprocessing_options=members.options),
            async_options=saves.in_background(timeout_s),
            multiprocessing_options=members.options,
        )

    @property
    def is_publishing(self) -> bool:
        """Whether the last published version is still being written."""
        return self._writing is not None

    def publish(self, version: int, params: Any) -> None:
        """Wait for the previous version, copy the params to the host, and start to write them."""
        self.poll()
        with self._changing:
            start = time.monotonic()
            copied = storable(jax.block_until_ready(self._program(params)))
            if jax.process_count() == 1:
                copied = jax.device_get(copied)  # as in `Versions.read`
            if self._is_primary:
                self._try(version, lambda: self.versions.begin(version))
            self._try(
                version,
                lambda: self._writer.save(
                    self.versions.path(version), args=ocp.args.StandardSave(copied), force=True
                ),
            )
            self._writing = version, start

    def poll(self, wait_s: float = 0.0) -> bool:
        """Wait for the current write and list its version; return whether a write was under way."""
        if self._writing is None and wait_s:
            time.sleep(min(wait_s, POLL_S))
        with self._changing:
            if self._writing is None:
                return False
            version, start = self._writing
            self._try(version, self._writer.wait_until_finished)
            if self._is_primary:
                self._try(version, lambda: self.versions.add(version, self._kept()))
            self._newest = version
            self._writing = None
            self.delivery_s = time.monotonic() - start
            return True

    def _try(self, version: int, action: Callable[[], Any]) -> None:
        try:
            action()
        except (OSError, ValueError, RuntimeError) as error:
            raise not_published(self.versions.path(version), error) from error

    def latest(self, reader: int) -> Published | None:
        """Return the newest listed version without weights: this process has no searchers."""
        del reader
        return Published(self._newest, None) if self._newest >= 0 else None

    def settle(self) -> None:
        """Do nothing: only `poll` may wait for storage."""

    def close(self) -> None:
        """Wait for the current version and release Orbax's threads."""
        self.poll()
        self._writer.close()


class CheckpointTransport(DeliveringTransport):
    """Transport through versions on disk, inside one process.

    `poll` writes the newest publication, compares the digests and restores the weights for the
    searchers. A worker thread (driver=async) or the synchronous driver calls `poll`. Trainer and
    searcher threads never call Orbax.

    Args:
        program: function that copies and casts the params under the trainer's device lock; files
            have the trainer's layout.
        layout: function that converts restored weights to the searchers' layout; None: no change.
    """

    def __init__(
        self,
        workdir: str,
        program: Callable[[Any], Any],
        shardings: Sequence[Any],
        *,
        timeout_s: int = saves.TIMEOUT_S,
        layout: Layout | None = None,
    ) -> None:
        super().__init__(program, shardings, timeout_s=timeout_s)
        self._layout: Layout = (lambda params: params) if layout is None else layout
        self._writer = VersionWriter(workdir, lambda params: params, timeout_s=timeout_s)
        self._abstract: Any = None

    def _carry(self, delivery: Delivery) -> None:
        """Write the version, and restore it for the searchers.

        Raises:
            PublicationError: the files are damaged, or cannot be written or read.
        """
        version, versions = delivery.version, self._writer.versions
        if self._abstract is None:
            self._abstract = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
                delivery.params,
            )
        check_same_tree(self._abstract, delivery.params)
        self._writer.publish(version, delivery.params)
        self._writer.poll()
        if found := versions.damage(version):
            raise PublicationError(
                f"published weights {versions.path(version)} are damaged: {found[0]}. Repair the "
                "storage, then run the same command again"
            )
        delivery.params = None  # the restored copy replaces these arrays
        delivery.params = self._layout(versions.read(version, self._abstract))

    def settle(self) -> None:
        """Do nothing: only `poll` may wait for storage."""

    def close(self) -> None:
        """Wait for the current version and release Orbax's threads."""
        with self._delivering:
            self._writer.close()
