# SPDX-License-Identifier: Apache-2.0
"""A work directory at gs://BUCKET/FOLDER: a local folder, and its copy in the object store.

A run works in the local folder. `push` uploads new and changed files; `fetch` rebuilds the local
folder. A checkpoint or a version of weights is complete in the store if its `digests.json` exists:
that file is uploaded last and deleted first. Invariant: after every single upload the store holds a
checkpoint and the log lines of its steps (tests/storage/test_mirror.py).
"""

import os
import shutil
from pathlib import Path
from typing import Any

from tba_jax.storage import digests

FOLDERS = ("checkpoints", "weights")
"""Folders whose subfolders have numbers as names and are written once."""
FILES = ("config.json", "versions.json", "report.json", "report.html")
"""Files that are replaced whole, as are logs and plots."""


class StorageError(RuntimeError):
    """An object store cannot be used; the message names the store and the remedy."""


def is_address(text: str | os.PathLike[str]) -> bool:
    """Return whether `text` is an address of an object store, not a folder."""
    return "://" in str(text)


class Mirror:
    """A local folder and its copy in an object store; every method raises OSError if that fails.

    Args:
        address: gs://BUCKET/FOLDER.
        folder: the local folder; `fetch` deletes its content.

    Raises:
        StorageError: the address is of another kind, or the package of the store is missing.
    """

    def __init__(self, address: str, folder: Path) -> None:
        protocol, _, path = address.partition("://")
        if protocol != "gs" or not path.strip("/").partition("/")[2]:
            raise StorageError(
                f"{address!r} is not an address of a work directory. Give gs://BUCKET/FOLDER, or "
                "a folder of this machine"
            )
        import fsspec

        try:
            self._fs: Any = fsspec.filesystem(protocol)
        except ImportError as error:
            raise StorageError(
                f"{address}: {error}. Install it with: pip install 'tba_jax[gcs]'"
            ) from error
        self.address, self.folder = address.rstrip("/"), folder
        self._root = path.strip("/")
        self._known: dict[str, tuple[int, int]] = {}  # uploaded file -> size, time of change
        self._whole: set[str] | None = None  # complete folders in the store; None: not listed yet

    def names(self, prefix: str = "") -> list[str]:
        """List the store; return the sorted names that start with `prefix`."""
        self._fs.invalidate_cache()  # fsspec caches listings
        try:
            found = self._fs.find(f"{self._root}/{prefix}".rstrip("/"))
        except FileNotFoundError:
            return []
        return sorted(path.removeprefix(f"{self._root}/") for path in found)

    def fetch(self, *, weights: bool = False) -> None:
        """Rebuild the local folder: logs, files and the newest complete checkpoint.

        Args:
            weights: also fetch the newest published weights, which a resumed run does not need.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        names = self.names()
        wanted = [name for name in names if name in FILES or _is_log(name)]
        for kind in FOLDERS if weights else FOLDERS[:1]:
            if whole := _whole(kind, names):
                newest = max(whole, key=lambda name: int(name.rpartition("/")[2]))
                wanted += [name for name in names if name.startswith(f"{newest}/")]
        for name in wanted:
            file = self.folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            self._fs.get_file(f"{self._root}/{name}", str(file))

    def push(self) -> None:
        """Upload new and changed files; files that appear during the call wait for the next one."""
        # Logs are uploaded first, so that a checkpoint in the store has the log lines of its steps.
        here = {
            f"{kind}/{path.name}"
            for kind in FOLDERS
            for path in (self.folder / kind).glob("*")
            if path.name.isdigit() and (path / digests.NAME).is_file()
        }
        for log in sorted(self.folder.glob("*.jsonl")):
            self._push_file(log)
        if self._whole is None:
            names = self.names()
            self._whole = {name for kind in FOLDERS for name in _whole(kind, names)}
        for name in sorted(here - self._whole, key=lambda name: int(name.rpartition("/")[2])):
            files = [path for path in (self.folder / name).rglob("*") if path.is_file()]
            try:
                for file in sorted(files, key=lambda path: path.name == digests.NAME):
                    self._fs.put_file(str(file), self._path(file))
            except FileNotFoundError:
                continue  # the run has just deleted the folder
            self._whole.add(name)
        for name in self._whole - here:
            inside = [f"{name}/{digests.NAME}", *self.names(f"{name}/")]
            for each in dict.fromkeys(inside):
                self._fs.rm_file(f"{self._root}/{each}")
            self._whole.discard(name)
        for file in (*(self.folder / name for name in FILES), *self.folder.glob("plots/*")):
            self._push_file(file)

    def _push_file(self, file: Path) -> None:
        if not file.is_file():
            return
        stat = file.stat()
        seen = stat.st_size, stat.st_mtime_ns
        if self._known.get(file.name) != seen:
            self._fs.put_file(str(file), self._path(file))
            self._known[file.name] = seen

    def _path(self, file: Path) -> str:
        return f"{self._root}/{file.relative_to(self.folder)}"


def _is_log(name: str) -> bool:
    return name.endswith(".jsonl") and "/" not in name


def _whole(kind: str, names: list[str]) -> list[str]:
    """Return the numbered folders of a kind that are complete in the store."""
    ends = (name.removesuffix(f"/{digests.NAME}") for name in names if name.endswith(digests.NAME))
    return [name for name in ends if name.startswith(f"{kind}/") and name.split("/")[1].isdigit()]
