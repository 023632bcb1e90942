# SPDX-License-Identifier: Apache-2.0
"""Work directories at gs:// addresses, in a store that renames nothing and appends to nothing."""

import contextlib
import io
import json
import os
import shutil
import sys
from pathlib import Path

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.config.schema import make_config
from tba_jax.run import workdir as workdirs
from tba_jax.run.checkpoint import Checkpoints, load_host_state
from tba_jax.run.errors import CheckpointError, UserError
from tba_jax.run.run import claim, train
from tba_jax.run.workdir import opened, run_folder, run_id_of, storage_of
from tba_jax.weights.folder import StoredWeights, WeightFolder

ADDRESS = "gs://bucket/runs/a"
HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
ABSTRACT = {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=HERE)}


class ObjectStore(fsspec.AbstractFileSystem):
    """An object store in a folder: objects are files below FAKE_STORE.

    epath reaches it through fsspec, TensorStore through its driver for files. As in the real store
    nothing is renamed or appended to, a folder exists as long as it has objects, and an object
    appears when its writer closes it. There are no credentials and no generations.
    """

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


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    """The folder of the objects, which replaces the real store in this process."""
    folder = tmp_path / "store"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
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


@contextlib.contextmanager
def opened_run():
    """The local folder of the run at ADDRESS, and its checkpoints."""
    with opened(ADDRESS) as (folder, _):
        (folder / "config.json").write_text("{}")
        checkpoints = Checkpoints(
            storage_of(folder),
            run_id="f00d",
            before_commit=lambda: workdirs.upload(folder),
        )
        yield folder, checkpoints
        checkpoints.close()


def save(checkpoints, folder, step):
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step}) + "\n")
    checkpoints.save(step, {"w": jnp.full(8, float(step))}, {})
    checkpoints.wait()


def steps(folder):
    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line)["step"] for line in text.splitlines()]


def test_a_run_continues_on_another_machine(store, tmp_path, monkeypatch):
    with opened_run() as (folder, checkpoints):
        with pytest.raises(UserError, match="is working on gs://bucket/runs/a"), opened(ADDRESS):
            pass
        for step in (1, 2, 3):
            save(checkpoints, folder, step)
    assert not (store / "bucket/runs/a/tba_jax-heartbeat").exists()
    stored = sorted(path.name for path in (store / "bucket/runs/a/checkpoints").iterdir())
    assert stored == ["2", "3"] and not (folder / "checkpoints").exists()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    with opened_run() as (other, again):
        assert other != folder and steps(other) == [1, 2, 3]
        assert again.newest() == 3 and again.damage(3) == []
        np.testing.assert_array_equal(again.read(3, ABSTRACT)["w"], np.full(8, 3.0))
        save(again, other, 5)
    assert load_host_state(str(run_folder(ADDRESS, "--workdir")))[0] == 5


def test_a_run_begins_and_its_config_is_in_the_store_afterwards(store):
    config = make_config({"task.name": "arithmetic"})
    for _ in range(2):
        with contextlib.ExitStack() as held:
            folder, _ = claim(ADDRESS, config, held)
            (folder / "plots").mkdir(exist_ok=True)
            (folder / "plots" / "a.png").write_bytes(b"png")
            found = run_id_of(folder)
    stored = store / "bucket/runs/a"
    assert run_id_of(stored) == found and (stored / "plots/a.png").read_bytes() == b"png"


def test_a_start_that_fails_leaves_nothing_in_the_store(store):
    for seed in (1, 2):
        with pytest.raises(LookupError), contextlib.ExitStack() as held:
            claim(ADDRESS, make_config({"task.name": "arithmetic", "seed": seed}), held)
            raise LookupError("the reward cannot be used")
    assert not [path for path in store.rglob("*") if path.is_file()]


def test_a_process_that_is_killed_leaves_a_checkpoint_and_the_lines_of_its_steps(store):
    with opened_run() as (folder, checkpoints):
        save(checkpoints, folder, 1)
    step = store / "bucket/runs/a/checkpoints/2"
    step.mkdir()
    (step / "_CHECKPOINT_METADATA").write_text("{}")  # killed before the commit file
    found = run_folder(ADDRESS, "--workdir")
    assert steps(found) == [1] and load_host_state(str(found))[0] == 1


def test_a_store_that_refuses_the_log_fails_the_save(monkeypatch):
    def refuse(folder):
        raise OSError("full")

    with pytest.raises(CheckpointError, match="checkpoints/2 failed: OSError: full"):
        with opened_run() as (folder, checkpoints):
            save(checkpoints, folder, 1)
            monkeypatch.setattr(workdirs, "upload", refuse)
            save(checkpoints, folder, 2)


def test_weights_are_published_to_the_store():
    folder = WeightFolder(ADDRESS, lambda params: params, run_id="f00d")
    for version in (1, 2, 3):
        folder.publish(version, {"w": jnp.full(8, float(version))})
        assert folder.poll()
    folder.close()
    stored = StoredWeights(ADDRESS, ABSTRACT, [HERE])
    stored.announce(3, [])
    assert stored.poll() and stored.at(2, 0).version == 2 and stored.at(1, 0) is None
    np.testing.assert_array_equal(stored.latest(0).params["w"], np.full(8, 3.0))


@pytest.mark.parametrize("address", ["gs://bucket", "gs://", "ftp://a/b", "s3://bucket/run"])
def test_an_address_of_nothing_is_refused(address):
    with pytest.raises(UserError, match="is not an address of a work directory. Give gs://BU"):
        with opened(address):
            pass


def test_a_missing_package_names_the_extra(monkeypatch):
    def fail(*args, **options):
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr("etils.epath.backend.fsspec_backend._get_filesystem", fail)
    with pytest.raises(UserError, match=r"install gcsfs.*pip install 'tba_jax\[gcs\]'"):
        run_folder(ADDRESS, "--workdir")


def test_objects_of_another_program_are_refused_and_left_alone(store):
    theirs = store / "bucket/runs/a/weights/notes/a.txt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("theirs")
    with pytest.raises(UserError, match="holds 'weights' and no config.json"):
        train(make_config({"task.name": "arithmetic"}), ADDRESS)
    with pytest.raises(UserError, match="gs://bucket/runs/b holds no run"):
        run_folder("gs://bucket/runs/b", "--workdir")
    assert [path for path in store.rglob("*") if path.is_file()] == [theirs]
