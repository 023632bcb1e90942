# SPDX-License-Identifier: Apache-2.0
"""Weights from trainer to searchers through Orbax checkpoints in the work directory.

It does not know who reads the files elsewhere. Its invariant: a version is named only when all of
it is written, and a searcher of this process gets what the files hold.
"""

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp

from tba_jax.models.trees import check_same_tree
from tba_jax.storage import orbax_operations, saves
from tba_jax.weights.transport import DeliveringTransport, Layout, Parcel
from tba_jax.weights.versions import PublicationError, Versions, brief, not_published


class CheckpointTransport(DeliveringTransport):
    """Weights handed over as versioned Orbax checkpoints under WORKDIR/weights.

    Whoever drives `poll` (a worker thread beside asynchronous searchers, the synchronous driver
    itself) writes the newest publication to `weights/<version>`, lists the digests of its files,
    names it in `versions.json`, the completion marker, and restores it into an in-memory mailbox
    when its files still have these digests; trainer and searcher threads never call Orbax.

    Args:
        workdir: the run's directory.
        program: copy and cast of the params, in its turn on the trainer's devices; files have the
            trainer's layout.
        layout: makes restored params what the readers want; None: they are.
        shardings, timeout_s: as in DeliveringTransport.
        keep: versions kept on disk, at least 2.
        reads_back: whether the mailbox has what was read from the files, for searchers of this
            process; else what was published, as searchers elsewhere read and verify for themselves.
        confirm: raises where this process may no longer write to the work directory; called before
            a version is written, before it becomes visible and before it is named.
    """

    def __init__(
        self,
        workdir: str,
        program: Callable[[Any], Any],
        shardings: Sequence[Any],
        *,
        keep: int,
        timeout_s: int,
        layout: Layout | None = None,
        reads_back: bool = True,
        confirm: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(program, shardings, timeout_s=timeout_s)
        self._reads_back = reads_back
        self._confirm = confirm
        self._versions = Versions(workdir)
        self._keep = keep
        self._wanted: Callable[[], Collection[int]] = tuple
        self._layout: Layout = (lambda params: params) if layout is None else layout
        self._files = saves.Writer(self._versions.folder, confirm)
        self._writer = ocp.AsyncCheckpointer(
            ocp.StandardCheckpointHandler(),
            async_options=saves.in_background(timeout_s),
            temporary_path_class=self._files.temporary_path_class,
        )
        self._reader = ocp.Checkpointer(ocp.StandardCheckpointHandler())
        self._abstract: Any = None

    def keep_also(self, wanted: Callable[[], Collection[int]]) -> None:
        """Keep these versions on disk beyond the newest ones; it is asked at every publication."""
        self._wanted = wanted

    def _carry(self, parcel: Parcel) -> None:
        """Write, name, and restore for the searchers."""
        version = parcel.version
        self._write(version, parcel.params)
        if self._reads_back:
            if self._versions.damage(version):
                self._write(version, parcel.params)  # once more, while it is in memory
            parcel.params = None  # the copy that is restored is another
            parcel.params = self._read(version)
        parcel.params = self._layout(parcel.params)

    def _write(self, version: int, params: Any) -> None:
        """Save a version whole, then mark it complete and drop old ones."""
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
            with orbax_operations.operation():
                self._writer.save(path, args=ocp.args.StandardSave(params), force=True)
                self._writer.wait_until_finished()
            self._confirm()
            self._versions.add(version, self._keep, self._wanted())
        except (OSError, ValueError, RuntimeError) as error:
            with contextlib.suppress(OSError):  # the folder is gone, or its storage failed
                self._files.remove_unfinished()
            raise not_published(self._versions.path(version), error) from error

    def _read(self, version: int) -> Any:
        """A version that is as it was written.

        Raises:
            PublicationError: it is not.
        """
        path = self._versions.path(version)
        try:
            found = self._versions.damage(version)
            if not found:
                args = ocp.args.StandardRestore(self._abstract)
                with orbax_operations.operation():
                    return self._reader.restore(path, args=args)
        except (OSError, ValueError, RuntimeError) as error:
            found = [f"{type(error).__name__}: {brief(error)}"]
        raise PublicationError(
            f"published weights {path} cannot be read as they were written, twice: {found[0]}. "
            "Mend the storage, then run the same command again"
        )

    def settle(self) -> None:
        """Nothing: that would wait for storage."""

    def close(self) -> None:
        """Wait for the save under way and release Orbax's threads."""
        with self._delivering:
            self._writer.close()
            self._reader.close()
