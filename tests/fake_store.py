# SPDX-License-Identifier: Apache-2.0
"""An object store in a folder, for gs:// addresses, with the code of etils.epath and Orbax.

epath reaches it through fsspec, TensorStore through its driver for files. As in the real store
nothing is renamed or appended to, a folder exists as long as it has objects, and an object appears
when its writer closes it. There is no network, and there are no credentials and no generations.
"""

import io
import os
import shutil
import sys
from pathlib import Path

import fsspec


class ObjectStore(fsspec.AbstractFileSystem):
    """The store; objects are files below FAKE_STORE."""

    protocol = ("gs", "gcs")
    cachable = False

    def _file(self, path):
        return Path(os.environ["FAKE_STORE"]) / self._strip_protocol(path)

    def info(self, path, **options):
        file, name = self._file(path), self._strip_protocol(path)
        if file.is_file():
            return {"name": name, "type": "file", "size": file.stat().st_size}
        if file.is_dir() and any(x.is_file() for x in file.rglob("*")):
            return {"name": name, "type": "directory", "size": 0}
        raise FileNotFoundError(path)

    def ls(self, path, detail=True, **options):
        self.info(path)
        names = [f"{self._strip_protocol(path)}/{x.name}" for x in self._file(path).iterdir()]
        names = [name for name in sorted(names) if self.exists(name)]
        return [self.info(name) for name in names] if detail else names

    def mkdir(self, path, **options):
        """Do nothing: a store has no folders; TensorStore's driver for files makes its own."""

    makedirs = mkdir

    def rm_file(self, path):
        self._file(path).unlink()

    def rm(self, path, recursive=False, maxdepth=None):
        self.info(path)
        file = self._file(path)
        shutil.rmtree(file) if recursive and file.is_dir() else file.unlink()

    def mv(self, *args, **options):
        raise NotImplementedError("a store renames nothing")

    def _open(self, path, mode="rb", **options):
        file = self._file(path)
        if mode == "rb":
            return io.BytesIO(file.read_bytes())
        assert mode == "wb", f"a store does not open for {mode!r}"

        class Upload(io.BytesIO):
            def close(self):
                if not self.closed:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(self.getvalue())
                super().close()

        return Upload()


def use(monkeypatch, folder):
    """Replace the real store in this process; return the folder of the objects."""
    monkeypatch.setenv("FAKE_STORE", str(folder))
    known = sys.modules["fsspec.registry"]  # `fsspec.registry` is the table in it
    for protocol in ObjectStore.protocol:
        monkeypatch.setitem(known._registry, protocol, ObjectStore)
    gcs = "orbax.checkpoint._src.path.gcs_utils"
    monkeypatch.setattr(
        f"{gcs}.get_kvstore_for_gcs",
        lambda path: {"driver": "file", "path": f"{folder}/{path.removeprefix('gs://')}"},
    )
    monkeypatch.setattr(f"{gcs}.is_hierarchical_namespace_enabled", lambda path: False)
    return folder
