# SPDX-License-Identifier: Apache-2.0
"""The versions of weights that lie in a work directory: complete, listed, as they were written.

`weights/<version>` is a folder of Orbax's with the digests of its files; `versions.json` names the
complete ones, and where processes on other hosts read them the start of the run that wrote them. It
does not know what weights are. Invariant: a version that is named and damaged is never given to a
reader; an older one is, and that is said.
"""

import os
import time
from collections.abc import Callable, Collection
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from tba_jax.storage import digests, orbax_operations, saves, sealed

_READ_ERRORS = (OSError, ValueError, KeyError, TypeError, RuntimeError)


class PublicationError(RuntimeError):
    """Weights could not be written or read; the message says which and what to do."""


class Versions:
    """The published versions of one run.

    Args:
        workdir: of the run; nothing is made in it before `add`.
        session: the start of the run whose versions count; empty: any.
        readers: which processes read together, as Orbax wants it; None: all of this run.

    Attributes:
        folder: which the versions are in.
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
        """Its folder."""
        return self.folder / str(version)

    def begin(self, version: int) -> None:
        """Record that the run makes the folder of a version, before anything is written there.

        Only recorded folders are ever deleted. The unfinished folder of another writer, which this
        process may have replaced, is not in the way.

        Raises:
            PublicationError: another program's folder has that name. OSError: storage refuses.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        made = self._made()
        for path in self.folder.iterdir() if version not in made else ():
            final = path.name if saves.has_writer(path.name) else _final(path.name)
            if final == str(version):
                raise PublicationError(
                    f"{path} exists and is not of this run, which is about to publish version "
                    f"{version} there. Move it away, then run the same command again"
                )
        self._record(self.named(), {*made, version})

    def add(self, version: int, keep: int, wanted: Collection[int] = ()) -> None:
        """Name a version that is written; drop all but `keep`, and what killed processes left.

        Args:
            version: its files are complete, and no other version is being written.
            keep: number of versions that stay; later ones than this are of steps that are made
                again.
            wanted: older versions that stay, too.

        Raises:
            OSError: storage refuses.
        """
        digests.write(self.path(version))
        older = [v for v in self.named() if v < version]
        newest = [*older, version][-keep:]
        kept = sorted({*newest, *(v for v in older if v in wanted)})
        made = self._made()
        self._record(kept, {*made, version})
        self._delete({*made, version} - {*kept})
        self._record(kept, {*kept})

    def clear(self) -> None:
        """Drop what an earlier start of the run has left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        made = self._made()
        self._record((), made)
        self._delete(made)
        self._record((), ())

    def _delete(self, versions: Collection[int]) -> None:
        """Delete the folders of these versions, unfinished ones too; no symbolic links."""
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
        sealed.write(self._marker, content)

    def _made(self) -> set[int]:
        """Versions whose folders this run made; those with digests where the record is lost."""
        try:
            content = sealed.read(self._marker)
            return {int(version) for version in content.get("made", content["versions"])}
        except (OSError, ValueError, KeyError, TypeError):
            return set(self._with_digests())

    def _with_digests(self) -> list[int]:
        """Versions whose folders have a list of digests, which only a run of tba_jax writes."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted(
            int(path.name)
            for path in found
            if path.name.isdigit() and (path / digests.NAME).is_file()
        )

    def named(self) -> list[int]:
        """Versions in `versions.json`; those that have digests where it is lost or damaged."""
        try:
            content = sealed.read(self._marker)
            if self._session and content["session"] != self._session:
                return []
            return sorted(int(version) for version in content["versions"])
        except (OSError, ValueError, KeyError, TypeError):
            if self._session:
                return []  # files do not say whose they are
            return self._with_digests()

    def damage(self, version: int) -> list[str]:
        """What of a version is not as it was written, a clause for each file."""
        return digests.damage(self.path(version))

    def read(self, version: int, abstract: Any) -> Any:
        """The arrays of a version; whether they are as they were written, `damage` says.

        Args:
            version: which.
            abstract: tree of jax.ShapeDtypeStruct with shardings.

        Raises:
            PublicationError: they cannot be read.
        """
        try:
            handler = ocp.StandardCheckpointHandler(multiprocessing_options=self._readers)
            with ocp.Checkpointer(handler, multiprocessing_options=self._readers) as reader:
                args = ocp.args.StandardRestore(abstract)
                with orbax_operations.operation():
                    return reader.restore(self.path(version), args=args)
        except Exception as error:
            # Orbax raises Exception itself for an array, caused by what TensorStore found.
            is_array = type(error) is Exception
            if not is_array and not isinstance(error, _READ_ERRORS):
                raise
            cause = (error.__cause__ if is_array else None) or error
            raise PublicationError(
                f"published weights {self.path(version)} cannot be read: "
                f"{type(cause).__name__}: {brief(cause)}"
            ) from error

    def newest_intact(self, note: Callable[[str], None], wanted: int | None = None) -> int:
        """The newest version to read; or the one that is wanted.

        Args:
            note: told which are damaged.
            wanted: a version that alone will do.

        Raises:
            PublicationError: none is intact, or the wanted one is not there or not intact.
        """
        named = self.named()
        if wanted is not None and wanted not in named:
            raise PublicationError(
                f"{self.folder} has no published version {wanted}; got {named or 'none'}. Give "
                "one of them (config.sync.transport=checkpoint writes them, config.sync.keep of "
                "them are kept)"
            )
        for version in [wanted] if wanted is not None else reversed(named):
            found = self.damage(version)
            if not found:
                return version
            note(f"published weights {self.path(version)} are damaged: {found[0]}")
            if wanted is not None:
                raise PublicationError(
                    f"published weights {self.path(version)} are damaged: {found[0]}. Give "
                    f"another version: {[v for v in named if v != version] or 'there is none'}"
                )
        raise PublicationError(
            f"{self.folder} has no intact published version; named are {named or 'none'}. A run "
            "with config.sync.transport=checkpoint writes one at every sync"
        )


def _final(name: str) -> str:
    return saves.finished_name(name) or name


def not_published(path: object, error: BaseException) -> PublicationError:
    """Of a version that could not be written there."""
    return PublicationError(
        f"publishing weights {path} failed: {type(error).__name__}: {brief(error)}. Make room or "
        "fix the storage, then run the same command again"
    )


def brief(error: BaseException) -> str:
    """First line of an error's text; the middle of a long one is left out, as the end has why."""
    line = (str(error).strip().splitlines() or ["(no message)"])[0]
    line = line.split(" [tensorstore_spec=")[0]  # a long dump, after the reason
    return line if len(line) <= 400 else f"{line[:150]} ... {line[-240:]}"
