# SPDX-License-Identifier: Apache-2.0
"""Weights from trainer to searchers through Orbax checkpoints in the work directory.

Invariant: a version is listed only when all of its files are written, and searchers of this process
get the contents of the files.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp

from tba_jax.models.trees import check_same_tree
from tba_jax.storage import saves
from tba_jax.weights.transport import DeliveringTransport, Layout, Parcel
from tba_jax.weights.versions import PublicationError, Versions, brief, not_published


class CheckpointTransport(DeliveringTransport):
    """Transport through versioned Orbax checkpoints under WORKDIR/weights.

    `poll` writes the newest publication to `weights/<version>` with the digests of its files, and
    lists it in `versions.json`, the completion marker. It then checks the digests and restores the
    version into an in-memory mailbox. A worker thread (asynchronous searchers) or the synchronous
    driver calls `poll`; trainer and searcher threads never call Orbax.

    Args:
        workdir: the run's directory.
        program: copy and cast of the params under the trainer's device lock; files have the
            trainer's layout.
        layout: converts restored params to the searchers' layout; None: they have it.
        shardings, timeout_s: as in DeliveringTransport.
        confirm: raises if this process may no longer write to the work directory; called before a
            version is written, before it becomes visible and before it is listed.
    """

    def __init__(
        self,
        workdir: str,
        program: Callable[[Any], Any],
        shardings: Sequence[Any],
        *,
        timeout_s: int,
        layout: Layout | None = None,
        confirm: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(program, shardings, timeout_s=timeout_s)
        self._confirm = confirm
        self._versions = Versions(workdir)
        self._layout: Layout = (lambda params: params) if layout is None else layout
        self._files = saves.Writer(self._versions.folder, confirm)
        self._writer = ocp.AsyncCheckpointer(
            ocp.StandardCheckpointHandler(),
            async_options=saves.in_background(timeout_s),
            temporary_path_class=self._files.temporary_path_class,
        )
        self._reader = ocp.Checkpointer(ocp.StandardCheckpointHandler())
        self._abstract: Any = None

    def _carry(self, parcel: Parcel) -> None:
        """Write and list the version, and restore it for the searchers."""
        version = parcel.version
        self._write(version, parcel.params)
        if self._versions.damage(version):
            self._write(version, parcel.params)  # a second time, from memory
        parcel.params = None  # the restored copy replaces it
        parcel.params = self._layout(self._read(version))

    def _write(self, version: int, params: Any) -> None:
        """Save a whole version, then mark it complete and delete old ones."""
        jax.block_until_ready(params)
        if self._abstract is None:
            self._abstract = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
            )
        check_same_tree(self._abstract, params)
        self._confirm()
        try:
            path = self._versions.path(version)
            self._versions.begin(version)
            self._writer.save(path, args=ocp.args.StandardSave(params), force=True)
            self._writer.wait_until_finished()
            self._confirm()
            self._versions.add(version)
        except (OSError, ValueError, RuntimeError) as error:
            with contextlib.suppress(OSError):  # the folder is gone, or the storage failed
                self._files.remove_unfinished()
            raise not_published(self._versions.path(version), error) from error

    def _read(self, version: int) -> Any:
        """Return a version whose files have their digests.

        Raises:
            PublicationError: the files are damaged.
        """
        path = self._versions.path(version)
        try:
            found = self._versions.damage(version)
            if not found:
                args = ocp.args.StandardRestore(self._abstract)
                return self._reader.restore(path, args=args)
        except (OSError, ValueError, RuntimeError) as error:
            found = [f"{type(error).__name__}: {brief(error)}"]
        raise PublicationError(
            f"published weights {path} are damaged after two attempts to write them: {found[0]}. "
            "Repair the storage, then run the same command again"
        )

    def settle(self) -> None:
        """Do nothing, because delivery waits for storage; `poll` delivers."""

    def close(self) -> None:
        """Wait for the current save and release Orbax's threads."""
        with self._delivering:
            self._writer.close()
            self._reader.close()
