# SPDX-License-Identifier: Apache-2.0
"""Weights from training hosts to searching hosts, as Orbax checkpoints in a shared directory.

`VersionWriter` writes, on all training hosts; searching hosts have a `VersionReader`. Orbax's
barriers include only the training hosts, or a single reader, so neither side waits for the other.
Invariant: a version is not deleted while an evaluation of it is requested.
"""

import threading
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from tba_jax.devices.sharding import storable
from tba_jax.storage import saves
from tba_jax.weights.transport import Published
from tba_jax.weights.versions import Versions, not_published

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
        """Return the members as Orbax options; a single process if there are no others."""
        if jax.process_count() == 1:
            return ocp.options.MultiprocessingOptions()
        return ocp.options.MultiprocessingOptions(
            primary_host=self.numbers[0],
            active_processes=set(self.numbers),
            barrier_sync_key_prefix=f"weights_{self.numbers[0]}",
        )


class VersionWriter:
    """Writes versions for readers in other processes.

    `publish` copies the weights to the host on the trainer's thread, in all training processes at
    the same step; `poll`, on another thread, waits for the files and lists them.

    Args:
        workdir: the run's directory.
        program: copy and cast of the params.
        session: identifier of this start of the run.
        members: the training processes.
        timeout_s: a version that takes longer has failed.
        kept: returns further versions to keep.
    """

    def __init__(
        self,
        workdir: str,
        program: Callable[[Any], Any],
        *,
        session: str,
        members: Members,
        timeout_s: int,
        kept: Callable[[], Collection[int]],
    ) -> None:
        self.delivery_s = 0.0
        self._versions = Versions(workdir, session=session)
        self._program = program
        self._kept = kept
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
        """Whether the last published version is still being written."""
        return self._writing is not None

    def publish(self, version: int, params: Any) -> None:
        """Copy to the host and start to write; waits for the version before."""
        self.poll()
        with self._changing:
            start = time.monotonic()
            copied = storable(jax.block_until_ready(self._program(params)))
            if self._is_primary:
                self._try(version, lambda: self._versions.begin(version))
            self._try(
                version,
                lambda: self._writer.save(
                    self._versions.path(version), args=ocp.args.StandardSave(copied), force=True
                ),
            )
            self._writing = version, start

    def poll(self, wait_s: float = 0.0) -> bool:
        """Wait for the current write and list its version; return whether there was one."""
        if self._writing is None and wait_s:
            time.sleep(min(wait_s, POLL_S))
        with self._changing:
            if self._writing is None:
                return False
            version, start = self._writing
            self._try(version, self._writer.wait_until_finished)
            if self._is_primary:
                self._try(version, lambda: self._versions.add(version, self._kept()))
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
        """Return the newest listed version without weights: this process has no searchers."""
        del reader
        return Published(self._newest, None) if self._newest >= 0 else None

    def settle(self) -> None:
        """Do nothing, because delivery waits for storage; `poll` delivers."""

    def close(self) -> None:
        """Wait for the current version and release Orbax's threads."""
        self.poll()
        self._writer.close()
