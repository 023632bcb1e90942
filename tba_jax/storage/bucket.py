# SPDX-License-Identifier: Apache-2.0
"""An object store below an address, gs://BUCKET/PREFIX or s3://BUCKET/PREFIX, through fsspec.

Objects are written whole, never renamed or appended to, and listed as they are. An object can be
made if there is none, which is what a lock needs: a store without that is refused. It knows nothing
of what the objects are. Invariant: of many who make one object, one does.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_EXTRAS = {"gs": "gcs", "s3": "s3"}


class StorageError(RuntimeError):
    """A store cannot be used; the message says which and what to do."""


def is_address(text: str | os.PathLike[str]) -> bool:
    """Whether this names an object store and not a folder."""
    return "://" in str(text)


@contextlib.contextmanager
def _as_os_error(what: str) -> Iterator[None]:
    """Let failures be OSErrors: each store raises classes of its own, some below Exception alone.

    Raises:
        OSError: whatever was raised.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{what}: {type(error).__name__}: {error}") from error


class Bucket:
    """The objects below an address, by their names below it.

    Args:
        address: gs://BUCKET/PREFIX or s3://BUCKET/PREFIX.

    Raises:
        StorageError: another kind of address, or its package is not installed.
    """

    def __init__(self, address: str) -> None:
        protocol, _, path = address.partition("://")
        if protocol not in _EXTRAS or not path.strip("/").partition("/")[2]:
            raise StorageError(
                f"{address!r} is no address of a work directory; want gs://BUCKET/FOLDER, "
                "s3://BUCKET/FOLDER, or a folder of this machine"
            )
        import fsspec

        try:
            self._fs: Any = fsspec.filesystem(protocol)
        except ImportError as error:
            extra = _EXTRAS[protocol]
            raise StorageError(
                f"{address}: {error}. Install it with: pip install 'tba_jax[{extra}]'"
            ) from error
        self.address = address.rstrip("/")
        self._root = path.strip("/")

    def __str__(self) -> str:
        return self.address

    def require_create(self) -> None:
        """See that an object can be made only where there is none.

        Raises:
            StorageError: the store overwrites, or looks first and then writes.
        """
        import fsspec

        reason = ""
        if type(self._fs).pipe_file is fsspec.AbstractFileSystem.pipe_file:
            reason = "its fsspec class looks first and then writes"
        else:
            name = f"lock/probe-{os.urandom(8).hex()}"
            made = [self.create(name, mark) for mark in (b"first", b"second")]
            self.remove([name])
            if made != [True, False]:
                reason = "it overwrites an object that is there"
        if reason:
            raise StorageError(
                f"{self.address} cannot make an object only where there is none ({reason}), so "
                "two runs could take one work directory. Give a folder of a shared file system"
            )

    def create(self, name: str, content: bytes) -> bool:
        """Make an object, unless there is one; whether this call did.

        Contents must differ between those who may make it: an answer that was lost is told by them.
        """
        try:
            with _as_os_error(f"making {self}/{name}"):
                self._fs.pipe_file(self._path(name), content, mode="create")
        except FileExistsError:
            return self.read(name) == content
        return True

    def write(self, name: str, content: bytes) -> None:
        """Replace an object."""
        with _as_os_error(f"writing {self}/{name}"):
            self._fs.pipe_file(self._path(name), content)

    def read(self, name: str) -> bytes | None:
        """Its content; None where there is none."""
        try:
            with _as_os_error(f"reading {self}/{name}"):
                return self._fs.cat_file(self._path(name))
        except FileNotFoundError:
            return None

    def upload(self, file: Path, name: str) -> None:
        """Replace an object by a file's content."""
        with _as_os_error(f"writing {self}/{name}"):
            self._fs.put_file(str(file), self._path(name))

    def download(self, name: str, file: Path) -> None:
        """Make a file of an object, with its folder."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with _as_os_error(f"reading {self}/{name}"):
            self._fs.get_file(self._path(name), str(file))

    def names(self, prefix: str = "") -> list[str]:
        """Objects whose names begin so, sorted, as the store has them now."""
        self._fs.invalidate_cache()  # fsspec remembers listings
        folder = self._path(prefix.rpartition("/")[0]).rstrip("/")
        try:
            with _as_os_error(f"listing {self}/{prefix}"):
                found = self._fs.find(folder)
        except FileNotFoundError:
            return []
        names = (path.removeprefix(f"{self._root}/") for path in found)
        return sorted(name for name in names if name.startswith(prefix))

    def remove(self, names: list[str]) -> None:
        """Delete objects, in this order; those that are gone already are no error."""
        for name in names:
            try:
                with _as_os_error(f"deleting {self}/{name}"):
                    self._fs.rm_file(self._path(name))
            except FileNotFoundError:
                continue

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"
