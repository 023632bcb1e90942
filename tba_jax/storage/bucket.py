# SPDX-License-Identifier: Apache-2.0
"""Objects under gs://BUCKET/PREFIX or s3://BUCKET/PREFIX, through fsspec.

Objects are written whole and never renamed or appended to; listings are current. A lock needs a
store that creates an object only if none exists; other stores are refused. Invariant: if several
processes create the same object, exactly one succeeds (tests/storage/test_bucket.py).
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_EXTRAS = {"gs": "gcs", "s3": "s3"}


class StorageError(RuntimeError):
    """An object store cannot be used; the message names the store and the remedy."""


def is_address(text: str | os.PathLike[str]) -> bool:
    """Return whether `text` is an address of an object store, not a folder."""
    return "://" in str(text)


@contextlib.contextmanager
def _as_os_error(what: str) -> Iterator[None]:
    """Convert every exception to an OSError, because each store has its own exception classes.

    Raises:
        OSError: the operation failed.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{what}: {type(error).__name__}: {error}") from error


class Bucket:
    """The objects under an address; object names are relative to the address.

    Args:
        address: gs://BUCKET/PREFIX or s3://BUCKET/PREFIX.

    Raises:
        StorageError: the address is of another kind, or the package of the store is missing.
    """

    def __init__(self, address: str) -> None:
        protocol, _, path = address.partition("://")
        if protocol not in _EXTRAS or not path.strip("/").partition("/")[2]:
            raise StorageError(
                f"{address!r} is not an address of a work directory. Give gs://BUCKET/FOLDER, "
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
        """Check that the store can create an object only if none exists.

        Raises:
            StorageError: the store overwrites an existing object, or checks and writes in two
                steps.
        """
        import fsspec

        reason = ""
        if type(self._fs).pipe_file is fsspec.AbstractFileSystem.pipe_file:
            reason = "its fsspec class cannot check and write in one step"
        else:
            name = f"lock/probe-{os.urandom(8).hex()}"
            made = [self.create(name, mark) for mark in (b"first", b"second")]
            self.remove([name])
            if made != [True, False]:
                reason = "it overwrites an existing object"
        if reason:
            raise StorageError(
                f"{self.address}: the store does not support atomic create-if-absent ({reason}), "
                "so two runs could take the same work directory. Give a folder of a shared file "
                "system"
            )

    def create(self, name: str, content: bytes) -> bool:
        """Create an object if none exists; return whether this call created it.

        Every caller must give a unique `content`. If the store's response was lost, a repeated call
        recognises the caller's own object by the content.
        """
        try:
            with _as_os_error(f"creating {self}/{name}"):
                self._fs.pipe_file(self._path(name), content, mode="create")
        except FileExistsError:
            return self.read(name) == content
        return True

    def write(self, name: str, content: bytes) -> None:
        """Replace an object."""
        with _as_os_error(f"writing {self}/{name}"):
            self._fs.pipe_file(self._path(name), content)

    def read(self, name: str) -> bytes | None:
        """Return the content of an object, or None if there is no such object."""
        try:
            with _as_os_error(f"reading {self}/{name}"):
                return self._fs.cat_file(self._path(name))
        except FileNotFoundError:
            return None

    def upload(self, file: Path, name: str) -> None:
        """Replace an object with the content of a file."""
        with _as_os_error(f"writing {self}/{name}"):
            self._fs.put_file(str(file), self._path(name))

    def download(self, name: str, file: Path) -> None:
        """Write an object to a file; creates the folder of the file."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with _as_os_error(f"reading {self}/{name}"):
            self._fs.get_file(self._path(name), str(file))

    def names(self, prefix: str = "") -> list[str]:
        """List the store; return the sorted names that start with `prefix`."""
        self._fs.invalidate_cache()  # fsspec caches listings
        folder = self._path(prefix.rpartition("/")[0]).rstrip("/")
        try:
            with _as_os_error(f"listing {self}/{prefix}"):
                found = self._fs.find(folder)
        except FileNotFoundError:
            return []
        names = (path.removeprefix(f"{self._root}/") for path in found)
        return sorted(name for name in names if name.startswith(prefix))

    def remove(self, names: list[str]) -> None:
        """Delete objects in this order; missing objects are ignored."""
        for name in names:
            try:
                with _as_os_error(f"deleting {self}/{name}"):
                    self._fs.rm_file(self._path(name))
            except FileNotFoundError:
                continue

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"
