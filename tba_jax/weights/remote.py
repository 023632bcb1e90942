# SPDX-License-Identifier: Apache-2.0
"""Weights from hosts that train to hosts that search, as Orbax checkpoints in a shared directory.

`VersionWriter` is the trainer's side, on all of its hosts; `VersionReader` that of a host that
searches. `versions.json` names what is complete, and the start of the run that wrote it: versions
that an earlier start left are not seen. Orbax's barriers name the hosts that train, and a reader
alone, so nobody waits for the other side. Invariant: a reader sees a whole version or the one
before, and none goes while somebody was asked to evaluate it.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath

from tba_jax.devices.sharding import storable
from tba_jax.storage import digests, sealed
from tba_jax.weights.transport import Layout, Mailbox, PublicationError, Published, brief

MARKER = "versions.json"
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
        self._folder = epath.Path(workdir) / "weights"
        self._marker = epath.Path(workdir) / MARKER
        self._program = program
        self._session = session
        self._keep, self._kept = keep, kept
        self._is_primary = members.number == members.numbers[0]
        self._writing: tuple[int, float] | None = None
        self._versions: list[int] = []
        self._changing = threading.Lock()
        if self._is_primary:
            self._folder.mkdir(parents=True, exist_ok=True)
            for old in self._folder.iterdir():
                old.rmtree()
        self._writer = ocp.AsyncCheckpointer(
            ocp.StandardCheckpointHandler(multiprocessing_options=members.options),
            async_options=ocp.options.AsyncOptions(timeout_secs=timeout_s),
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
            self._try(
                version,
                lambda: self._writer.save(
                    self._folder / str(version), args=ocp.args.StandardSave(copied), force=True
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
            self._versions.append(version)
            old = self._versions[: -self._keep]
            gone = [v for v in old if v not in set(self._kept())]
            self._versions = [v for v in self._versions if v not in gone]
            if self._is_primary:
                self._try(version, lambda: self._mark(gone))
            self._writing = None
            self.delivery_s = time.monotonic() - start
            return True

    def _mark(self, gone: Sequence[int]) -> None:
        digests.write(self._folder / str(self._versions[-1]))
        content = {"session": self._session, "versions": self._versions, "time": time.time()}
        sealed.write(self._marker, content)
        for version in gone:
            (self._folder / str(version)).rmtree(missing_ok=True)

    def _try(self, version: int, action: Callable[[], Any]) -> None:
        try:
            action()
        except (OSError, ValueError, RuntimeError) as error:
            raise PublicationError(
                f"publishing weights {self._folder / str(version)} failed: "
                f"{type(error).__name__}: {brief(error)}. Make room or fix the storage, then run "
                "the same command again"
            ) from error

    def latest(self, reader: int) -> Published | None:
        """The newest version that was named, without weights: nobody reads them here."""
        del reader
        return Published(self._versions[-1], None) if self._versions else None

    def settle(self) -> None:
        """Nothing: that would wait for storage."""

    def close(self) -> None:
        """Wait for the version under way and release Orbax's threads."""
        self.poll()
        self._writer.close()


class VersionReader:
    """Reads versions onto the devices of this host's searchers.

    Args:
        workdir: the run's directory.
        session: the start of the run whose versions count.
        number: of this process in `jax.distributed`.
        abstract: a version as it is read: a tree of jax.ShapeDtypeStruct with shardings.
        layout: makes of it what the readers want.
        shardings: as in `MemoryTransport`.
    """

    is_publishing = False

    def __init__(
        self,
        workdir: str,
        *,
        session: str,
        number: int,
        abstract: Any,
        layout: Layout,
        shardings: Sequence[Any],
    ) -> None:
        self.delivery_s = 0.0
        self._folder = epath.Path(workdir) / "weights"
        self._marker = epath.Path(workdir) / MARKER
        self._session = session
        self._abstract = abstract
        self._layout = layout
        self._shardings = list(shardings)
        self._mailbox = Mailbox(shardings)
        self._newest = -1
        options = Members(number, (number,)).options
        self._reader = ocp.Checkpointer(
            ocp.StandardCheckpointHandler(multiprocessing_options=options),
            multiprocessing_options=options,
        )

    def publish(self, version: int, params: Any) -> None:
        """Not from here."""
        raise AssertionError("hosts that search publish nothing")

    def _marked(self) -> tuple[list[int], float]:
        """Versions that are complete, and when the newest was."""
        try:
            content = sealed.read(self._marker)
        except FileNotFoundError:
            return [], 0.0
        if content.get("session") != self._session:
            return [], 0.0
        return content["versions"], content["time"]

    def poll(self, wait_s: float = 0.0) -> bool:
        """Read the newest version, where it is not the one before; True when it was not."""
        versions, named = self._marked()
        if not versions or versions[-1] == self._newest:
            time.sleep(min(wait_s, POLL_S))
            return False
        version = versions[-1]
        restored = self._restore(version)
        if restored is None:
            return False
        self._mailbox.put(version, self._layout(restored))
        self._newest = version
        self.delivery_s = max(0.0, time.time() - named)
        return True

    def _restore(self, version: int) -> Any:
        """A version, None where newer ones have replaced it meanwhile."""
        path = self._folder / str(version)
        try:
            if found := digests.damage(path):
                raise OSError(found[0])
            return self._reader.restore(path, args=ocp.args.StandardRestore(self._abstract))
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            if version not in self._marked()[0]:
                return None
            raise PublicationError(
                f"published weights {path} cannot be read as they were written: "
                f"{type(error).__name__}: {brief(error)}. Do all hosts see the same work "
                "directory? Mend that, then run the same command again"
            ) from error

    def latest(self, reader: int) -> Published | None:
        """Newest version that was read, on that reader's devices."""
        return self._mailbox.latest(reader)

    def at(self, version: int) -> list[Any]:
        """An older version that is kept, for each reader.

        Raises:
            PublicationError: it is not there any more.
        """
        restored = self._restore(version)
        if restored is None:
            raise PublicationError(
                f"weights {self._folder / str(version)} are gone, and were to be evaluated; "
                "run the same command again"
            )
        mailbox = Mailbox(self._shardings)
        mailbox.put(version, self._layout(restored))
        found = [mailbox.latest(i) for i in range(len(self._shardings))]
        return [published.params for published in found if published is not None]

    def settle(self) -> None:
        """Nothing: that would wait for storage."""

    def close(self) -> None:
        """Release Orbax's threads."""
        self._reader.close()
