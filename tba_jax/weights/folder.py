# SPDX-License-Identifier: Apache-2.0
"""Published weights as a folder of versions, for searchers in other processes.

All trainer processes write WORKDIR/weights/VERSION together; each process that searches reads
alone. Orbax's barriers include only the writers, or a single reader, so neither side waits for the
other. Invariants: searchers get a whole version whose digests are right: the newest or an older
one. A version is announced when its files are complete, and not deleted while it is evaluated.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from tba_jax.devices.platform import return_free_memory
from tba_jax.storage.steps import TIMEOUT_S, SavedSteps
from tba_jax.weights.memory import OnDevices
from tba_jax.weights.publication import PublicationError, Published

FOLDER = "weights"
"""Name of the folder of versions in a work directory."""


class WeightFolder(SavedSteps):
    """The versions of one run in storage: written by the trainer processes, read by others.

    All trainer processes `publish` at the same step, which copies the weights to the host; `poll`,
    on another thread, waits for the files.

    Args:
        workdir: work directory of the run.
        program: result of `make_publish_program`; None in a process that only reads.
        options: further arguments of `SavedSteps`; `wanted` returns the versions under evaluation.

    Attributes:
        newest: newest version that this process has written; None before the first.
        delivery_s: seconds from the newest publication to its last file.
    """

    def __init__(
        self, workdir: epath.PathLike, program: Callable[[Any], Any] | None = None, **options: Any
    ) -> None:
        super().__init__(
            epath.Path(workdir) / FOLDER,
            "params",
            error=PublicationError,
            read_only=program is None,
            **options,
        )
        self.newest: int | None = None
        self.delivery_s = 0.0
        self._program = program
        self._writing: tuple[int, float] | None = None
        self._changing = threading.Lock()

    @property
    def is_publishing(self) -> bool:
        """Whether the last published version is still being written."""
        return self._writing is not None

    def publish(self, version: int, params: Any) -> None:
        """Wait for the previous version, copy the params to the host, and start to write them.

        Raises:
            PublicationError: the files of this or of the previous version cannot be written.
        """
        assert self._program is not None, "a process that only reads does not publish"
        self.poll()
        with self._changing:
            start = time.monotonic()
            copied = jax.block_until_ready(self._program(params))
            if jax.process_count() == 1:
                copied = jax.device_get(copied)  # as in `load`
            self.write(version, copied)
            self._writing = version, start

    def poll(self, wait_s: float = 0.0) -> bool:
        """Wait until the current version is written; return whether a write was under way.

        Raises:
            PublicationError: the files cannot be written.
        """
        if self._writing is None:
            time.sleep(wait_s)
        with self._changing:
            if self._writing is None:
                return False
            version, start = self._writing
            self.wait()
            self.newest, self._writing = version, None
            self.delivery_s = time.monotonic() - start
            return True

    def keep(self, version: int) -> None:
        """Do nothing: `wanted` names the versions under evaluation."""

    def keep_only(self, versions: Collection[int]) -> None:
        """Do nothing."""

    def load(self, version: int, abstract: Any) -> Any:
        """Check the digests of a version, then return its arrays.

        The arrays pass through numpy: for a jax.Array, Orbax reads TensorStore's metrics, and
        TensorStore 0.1.76 to 0.1.86 never frees the returned objects (16 kB for each version).

        Args:
            abstract: tree of jax.ShapeDtypeStruct with shardings on devices of this process.

        Raises:
            PublicationError: the version is missing, damaged or unreadable.
        """
        if damage := self.damage(version):
            raise self.damaged(version, damage)
        # Arrays of these shapes and dtypes that take no memory.
        wanted = jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), abstract)
        found = self.read(version, wanted)
        return jax.device_put(found, jax.tree.map(lambda x: x.sharding, abstract))


class StoredWeights(OnDevices):
    """Weights of the searchers of a process that does not train, read from a folder of versions.

    `poll` reads the newest announced version. If the version is deleted or rewritten meanwhile,
    `poll` reads again, possibly a newer version.

    Args:
        abstract: tree of jax.ShapeDtypeStruct of the files, with shardings on this process.
        shardings, merges: as in `OnDevices`.
        timeout_s: seconds after which an announced version that cannot be read is an error.
    """

    def __init__(
        self,
        workdir: epath.PathLike,
        abstract: Any,
        shardings: Sequence[Any],
        merges: Sequence[Callable[[Any], Any]] = (),
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        super().__init__(shardings, merges)
        self._workdir, self._abstract = workdir, abstract
        self._changed, self._reading = threading.Condition(), threading.Lock()
        self._files: WeightFolder | None = None
        self._announced, self._timeout_s = -1, timeout_s
        self._failing_since: float | None = None

    def reset(self) -> None:
        """Forget all versions, because a new owner announces others."""
        with self._reading, self._lock:  # after a read of the previous owner's version
            self._announced, self.newest = -1, None
            self._held, self._kept, self._merged = {}, set(), {}

    def announce(self, version: int, evaluated: Collection[int]) -> None:
        """Receive the newest complete version, and the versions under evaluation."""
        self.keep_only(evaluated)
        with self._changed:
            self._announced = max(self._announced, version)
            self._changed.notify_all()

    def poll(self, wait_s: float = 0.0) -> bool:
        """Read the newest announced version, unless it was read before; return whether it was read.

        Raises:
            PublicationError: announced versions have not been readable for `timeout_s`.
        """

        def is_behind() -> bool:
            return self._announced > (-1 if self.newest is None else self.newest)

        with self._changed:
            self._changed.wait_for(is_behind, wait_s)
        with self._reading:
            if not is_behind():
                return False
            version, start = self._announced, time.monotonic()
            try:
                params = self._load(version)
            except PublicationError as error:
                # A newer version may have replaced it, or a restored trainer may be rewriting it.
                self._failing_since = self._failing_since or start
                if (failing_s := start - self._failing_since) <= self._timeout_s:
                    return False
                raise PublicationError(
                    f"version {version} of the weights has not been readable for {failing_s:.0f} "
                    f"s: {error}. Check that this machine can read the work directory, then run "
                    "the same command again"
                ) from error
            self._failing_since = None
            self.put(version, params)
            self.delivery_s = time.monotonic() - start
        return_free_memory()
        return True

    def at(self, version: int, i: int) -> Published | None:
        """Return a version under evaluation for searcher i; None if it was deleted."""
        with self._reading:  # several searchers want it; one reads it
            if (found := super().at(version, i)) is not None:
                return found
            try:
                self.put(version, self._load(version), is_newest=False)
            except PublicationError:
                return None
            return super().at(version, i)

    def _load(self, version: int) -> Any:
        if self._files is None:
            self._files = WeightFolder(self._workdir)
        return self._files.load(version, self._abstract)
