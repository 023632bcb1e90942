# SPDX-License-Identifier: Apache-2.0
"""An object store on this machine, as fsspec shows one: for gs://, with the real code.

Objects are files below FAKE_STORE with their names in hexadecimal, so that several processes see
one store. As in the real ones there are no folders, nothing is renamed or appended to, an object
appears whole when its writer closes it, listing shows what is there, and an object can be made only
if there is none (`create`). It has no network, no credentials, no limits on requests.
"""

import io
import os
import uuid
from pathlib import Path

import fsspec


class ObjectStore(fsspec.AbstractFileSystem):
    """The store; `protocol` is that of the real one in whose place it is."""

    protocol = ("gs", "gcs")
    cachable = False

    def __init__(self, **options):
        super().__init__(**options)
        self.root = Path(os.environ["FAKE_STORE"])
        self.root.mkdir(parents=True, exist_ok=True)

    def _file(self, path):
        return self.root / self._strip_protocol(path).encode().hex()

    def _names(self):
        return sorted(
            bytes.fromhex(name).decode() for name in os.listdir(self.root) if "." not in name
        )

    def _commit(self, path, content, *, exclusive=False):
        new = self.root / f"{uuid.uuid4().hex}.new"
        new.write_bytes(content)
        if not exclusive:
            os.replace(new, self._file(path))
            return
        try:
            os.link(new, self._file(path))  # fails where there is one, of many who try
        finally:
            new.unlink()

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        self._commit(path, value, exclusive=mode == "create")

    def cat_file(self, path, start=None, end=None, **kwargs):
        return self._file(path).read_bytes()[start:end]

    def info(self, path, **kwargs):
        name = self._strip_protocol(path)
        if self._file(path).is_file():
            return {"name": name, "type": "file", "size": self._file(path).stat().st_size}
        if any(other.startswith(f"{name}/") for other in self._names()):
            return {"name": name, "type": "directory", "size": 0}
        raise FileNotFoundError(path)

    def find(self, path, maxdepth=None, withdirs=False, detail=False, **kwargs):
        prefix = self._strip_protocol(path)
        return [name for name in self._names() if name.startswith(f"{prefix}/")]

    def ls(self, path, detail=True, **kwargs):
        raise NotImplementedError("a store has no folders")

    def rm_file(self, path):
        self._file(path).unlink()

    def mv(self, *args, **kwargs):
        raise NotImplementedError("a store renames nothing")

    def _open(self, path, mode="rb", **kwargs):
        if mode == "rb":
            return io.BytesIO(self.cat_file(path))
        if mode != "wb":
            raise NotImplementedError(f"a store does not open for {mode!r}")
        store = self

        class Upload(io.BytesIO):
            def close(self):
                if not self.closed:
                    store._commit(path, self.getvalue())
                super().close()

        return Upload()


def register():
    """Have fsspec take this store for the real ones."""
    for protocol in ObjectStore.protocol:
        fsspec.register_implementation(protocol, ObjectStore, clobber=True)
