# SPDX-License-Identifier: Apache-2.0
"""Weights from hosts that train to hosts that search, as Orbax checkpoints in a shared directory.

`VersionWriter` is the trainer's side, on all of its hosts; a host that searches has a
`VersionReader`. Orbax's barriers name the hosts that train, and a reader alone (`Members`), so
nobody waits for the other side. Invariant: no version goes while somebody was asked to evaluate it.
"""

import threading
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from tba_jax.devices.sharding import storable
from tba_jax.storage import orbax_operations, saves
from tba_jax.weights.transport import Published
from tba_jax.weights.versions import Versions, not_published

POLL_S = 0.05


class Members(NamedTuple):
    """Processes that save or restore together.

    Attributes:
        number: of this process in `jax.distributed`.
        numbers: of all of them, the one that writes what exists once first.
    """

    number: int
    numbers: tuple[int, ...]

    @property
    def options(self) -> ocp.options.MultiprocessingOptions:
        """As Orbax wants it; a process by itself where there are no others."""
        if jax.process_count() == 1:
            return ocp.options.MultiprocessingOptions()
        return ocp.options.MultiprocessingOptions(
            primary_host=self.numbers[0],
            active_processes=set(self.numbers),
            barrier_sync_key_prefix=f"weights_{self.numbers[0]}",
        )


class VersionWriter:
    """Writes versions; its readers are elsewhere.

    `publish` copies the weights to the host on the thread of the trainer, which every host that
    trains does at the same step; `poll`, on another thread, waits for the files and names them.

    Args:
        workdir: the run's directory.
        program: copy and cast of the params.
        session: this start of the run.
        members: the hosts that train.
        keep: versions kept on disk, at least 2.
        timeout_s: a version that takes longer has failed.
        kept: further versions that stay.
    """

    def __init__(
        self,
        workdir: str,
        program: Callable[[Any], Any],
        *,
        session: str,
        members: Members,
        keep: int,
        timeout_s: int,
        kept: Callable[[], Collection[int]],
    ) -> None:
        self.delivery_s = 0.0
        self._versions = Versions(workdir, session=session)
        self._program = program
        self._keep, self._kept = keep, kept
        self._is_primary = members.number == members.numbers[0]
        self._writing: tuple[int, float] | None = None
        self._newest = -1
        self._changing = threading.Lock()
        if self._is_primary:
            self._versions.clear()
        self._writer = ocp.AsyncCheckpointer(
            ocp.StandardCheckpointHandler(multiprocessing_options=members.options),
            async_options=saves.in_background(timeout_s),
            multiprocessing_options=members.options,
        )

    @property
    def is_publishing(self) -> bool:
        """Whether the version before is still being written."""
        return self._writing is not None

    def publish(self, version: int, params: Any) -> None:
        """Copy to the host and begin to write; waits for the version before."""
        self.poll()
        with self._changing:
            start = time.monotonic()
            copied = storable(jax.block_until_ready(self._program(params)))
            if self._is_primary:
                self._try(version, lambda: self._versions.begin(version))
            orbax_operations.begin()
            self._try(
                version,
                lambda: self._writer.save(
                    self._versions.path(version), args=ocp.args.StandardSave(copied), force=True
                ),
            )
            self._writing = version, start

    def poll(self, wait_s: float = 0.0) -> bool:
        """Wait until what is being written is, and name it; True when there was something."""
        if self._writing is None and wait_s:
            time.sleep(min(wait_s, POLL_S))
        with self._changing:
            if self._writing is None:
                return False
            version, start = self._writing
            self._try(version, self._writer.wait_until_finished)
            orbax_operations.end()
            if self._is_primary:
                self._try(version, lambda: self._versions.add(version, self._keep, self._kept()))
            self._newest = version
            self._writing = None
            self.delivery_s = time.monotonic() - start
            return True

    def _try(self, version: int, action: Callable[[], Any]) -> None:
        try:
            action()
        except (OSError, ValueError, RuntimeError) as error:
            raise not_published(self._versions.path(version), error) from error

    def latest(self, reader: int) -> Published | None:
        """The newest version that was named, without weights: nobody reads them here."""
        del reader
        return Published(self._newest, None) if self._newest >= 0 else None

    def settle(self) -> None:
        """Nothing: that would wait for storage."""

    def close(self) -> None:
        """Wait for the version under way and release Orbax's threads."""
        self.poll()
        self._writer.close()
