# SPDX-License-Identifier: Apache-2.0
"""Published versions of weights in a work directory: complete, listed and verified.

`weights/<version>` is an Orbax folder with the digests of its files. `versions.json` lists the
complete versions and, for readers in other processes, the session (start of the run) that wrote
them. Invariant: instead of a damaged version, a reader gets an older version and a note.
"""

import os
import time
from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from tba_jax.storage import digests, saves
from tba_jax.storage.whole_files import read_json, write_json

NUM_KEPT = 2
"""Number of newest versions that stay on disk."""
_READ_ERRORS = (OSError, ValueError, KeyError, TypeError, RuntimeError)


class PublicationError(RuntimeError):
    """Weights could not be written or read; the message has the version and the remedy."""


class Versions:
    """The published versions of one run.

    Args:
        workdir: directory of the run; nothing is created in it before `add`.
        session: ID of a start of the run: only its versions are used; "": those of all starts.
        readers: Orbax options that list the processes that read a version together; None: all
            processes of the job.

    Attributes:
        folder: folder of the versions.
    """

    def __init__(
        self,
        workdir: epath.PathLike,
        *,
        session: str = "",
        readers: ocp.options.MultiprocessingOptions | None = None,
    ) -> None:
        self.folder = epath.Path(workdir) / "weights"
        self._marker = epath.Path(workdir) / "versions.json"
        self._session = session
        self._readers = readers or ocp.options.MultiprocessingOptions()

    def path(self, version: int) -> epath.Path:
        """Return the folder of a version."""
        return self.folder / str(version)

    def begin(self, version: int) -> None:
        """Record that this run creates the folder of a version; called before the first write.

        Only recorded folders are ever deleted.

        Raises:
            PublicationError: a folder of another program has that name.
            OSError: storage fails.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        made = self._made()
        for path in self.folder.iterdir() if version not in made else ():
            if _final(path.name) == str(version):
                raise PublicationError(
                    f"{path} exists and was not written by this run, which needs the name for "
                    f"version {version}. Move it away, then run the same command again"
                )
        self._record(self.named(), {*made, version})

    def add(self, version: int, wanted: Collection[int] = ()) -> None:
        """List a written version; delete old versions and remains of killed processes.

        Args:
            version: version whose files are all written; no other version may be in progress. Later
                versions belong to steps that the run will repeat, so they are deleted.
            wanted: older versions that are kept in addition.

        Raises:
            OSError: storage fails.
        """
        digests.write(self.path(version))
        older = [v for v in self.named() if v < version]
        newest = [*older, version][-NUM_KEPT:]
        kept = sorted({*newest, *(v for v in older if v in wanted)})
        made = self._made()
        self._record(kept, {*made, version})
        self._delete({*made, version} - {*kept})
        self._record(kept, {*kept})

    def clear(self) -> None:
        """Delete the versions of an earlier start of the run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        made = self._made()
        self._record((), made)
        self._delete(made)
        self._record((), ())

    def _delete(self, versions: Collection[int]) -> None:
        """Delete complete and unfinished folders of these versions, but no symbolic links."""
        for path in list(self.folder.iterdir()):
            name = _final(path.name)
            if name.isdigit() and int(name) in versions and not os.path.islink(path):
                path.rmtree(missing_ok=True)

    def _record(self, versions: Collection[int], made: Collection[int]) -> None:
        content = {
            "session": self._session,
            "versions": sorted(versions),
            "made": sorted(made),
            "time": time.time(),
        }
        write_json(self._marker, content)

    def _made(self) -> set[int]:
        """Return the versions that this run wrote."""
        return set(self._listed("made"))

    def named(self) -> list[int]:
        """Return the complete versions of the session, ascending."""
        return self._listed("versions")

    def _listed(self, name: str) -> list[int]:
        """Return versions from `versions.json`; none if that file is missing or damaged."""
        try:
            content = read_json(self._marker)
            if name == "versions" and self._session and content["session"] != self._session:
                return []
            return sorted(int(version) for version in content[name])
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def damage(self, version: int) -> list[str]:
        """Return a description of each damaged file of a version."""
        return digests.damage(self.path(version))

    def read(self, version: int, abstract: Any) -> Any:
        """Return the arrays of a version without checking digests; `damage` checks them.

        The arrays pass through numpy: for a jax.Array, Orbax reads TensorStore's metrics, and
        TensorStore 0.1.76 to 0.1.86 never frees the returned objects (16 kB for each version).

        Args:
            abstract: tree of jax.ShapeDtypeStruct with shardings on devices of this process.

        Raises:
            PublicationError: the arrays cannot be read.
        """
        try:
            handler = ocp.StandardCheckpointHandler(multiprocessing_options=self._readers)
            with ocp.Checkpointer(handler, multiprocessing_options=self._readers) as reader:
                args = ocp.args.StandardRestore(jax.tree.map(_in_memory, abstract))
                restored = reader.restore(self.path(version), args=args)
                return jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), restored, abstract)
        except Exception as error:
            # Orbax raises a plain Exception for an array; its cause is TensorStore's error.
            is_array = type(error) is Exception
            if not is_array and not isinstance(error, _READ_ERRORS):
                raise
            cause = (error.__cause__ if is_array else None) or error
            raise PublicationError(
                f"published weights {self.path(version)} cannot be read: "
                f"{type(cause).__name__}: {brief(cause)}. Repair the storage"
            ) from error

    def newest_intact(self, note: Callable[[str], None], wanted: int | None = None) -> int:
        """Return the newest intact version, or the wanted one.

        Args:
            note: receives a line for each damaged version.
            wanted: the only acceptable version, or None.

        Raises:
            PublicationError: no version is intact, or the wanted one is missing or damaged.
        """
        named = self.named()
        if wanted is not None and wanted not in named:
            raise PublicationError(
                f"{self.folder} has no published version {wanted}; published versions: "
                f"{named or 'none'}. Give one of these"
            )
        for version in reversed(named) if wanted is None else [wanted]:
            if not (found := self.damage(version)):
                return version
            note(f"published weights {self.path(version)} are damaged: {found[0]}")
        raise PublicationError(
            f"{self.folder} has no intact version among {named if wanted is None else wanted}. "
            "Leave out --published to read the newest checkpoint, or run with "
            "--config.sync.transport=checkpoint to write a version at every sync"
        )


def _in_memory(x: jax.ShapeDtypeStruct) -> np.ndarray:
    """Return a numpy array of this shape and dtype that takes no memory, for Orbax."""
    return np.broadcast_to(np.zeros((), x.dtype), x.shape)


def _final(name: str) -> str:
    return saves.finished_name(name) or name


def not_published(path: object, error: BaseException) -> PublicationError:
    """Return the exception for a version that could not be written."""
    return PublicationError(
        f"publishing weights {path} failed: {type(error).__name__}: {brief(error)}. Free space or "
        "repair the storage, then run the same command again"
    )


def brief(error: BaseException) -> str:
    """Return the first line of an error's text, shortened in the middle."""
    line = (str(error).strip().splitlines() or ["(no message)"])[0]
    line = line.split(" [tensorstore_spec=")[0]  # drop TensorStore's long description
    return line if len(line) <= 400 else f"{line[:150]} ... {line[-240:]}"
