# SPDX-License-Identifier: Apache-2.0
"""Work directories in an object store that renames nothing, appends to nothing, and may refuse."""

import json
import sys

import fake_store
import fsspec
import pytest
from etils import epath

from tba_jax.config.schema import Config
from tba_jax.run import bucket
from tba_jax.run.bucket import fetched, run_folder, uploading
from tba_jax.run.errors import UserError
from tba_jax.run.session import train
from tba_jax.storage import digests
from tba_jax.storage.mirror import Mirror, StorageError

ADDRESS = "gs://bucket/runs/a"


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    known = sys.modules["fsspec.registry"]  # `fsspec.registry` is the table in it
    for protocol in fake_store.ObjectStore.protocol:
        monkeypatch.setitem(known._registry, protocol, fake_store.ObjectStore)
    return fsspec.filesystem("gs")


def checkpoint(folder, number, content=b"weights"):
    """A complete folder as Orbax and its digests leave it."""
    path = folder / "checkpoints" / str(number)
    (path / "train_state" / "d").mkdir(parents=True)
    (path / "train_state" / "d" / "0").write_bytes(content)
    digests.write(epath.Path(path))


def log(folder, *records):
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps({"step": record}) + "\n" for record in records)


def steps(folder):
    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line)["step"] for line in text.splitlines()]


def test_an_upload_that_is_cut_off_anywhere_leaves_a_run_that_can_be_continued(store, tmp_path):
    """After every single write the store holds a checkpoint and the lines of its steps."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    (here / "config.json").write_text("{}")
    seen = set()

    def look():
        Mirror(ADDRESS, there).fetch()
        kept = [int(path.name) for path in there.glob("checkpoints/*")]
        assert (len(kept) == 1) or not seen
        for number in kept:
            assert set(range(1, number + 1)) <= set(steps(there)), (kept, steps(there))
            content = (there / f"checkpoints/{number}/train_state/d/0").read_bytes()
            assert content == b"%d" % number
            seen.add(number)

    class Looking:
        def __getattr__(self, name):
            real = getattr(store, name)

            def then_look(*args):
                result = real(*args)
                if name in ("put_file", "rm_file"):
                    look()
                return result

            return then_look

    mirror = Mirror(ADDRESS, here)
    mirror._fs = Looking()
    for step in range(1, 6):
        log(here, step)
        checkpoint(here, step, b"%d" % step)
        mirror.push()
        (here / "checkpoints" / str(step) / "digests.json").unlink()  # the run deletes it
    assert seen == {1, 2, 3, 4, 5}
    names = mirror.names()
    assert [name for name in names if name.startswith("checkpoints/")] == [
        "checkpoints/5/digests.json",
        "checkpoints/5/train_state/d/0",
    ]
    assert (there / "config.json").exists() or "config.json" in names


def test_one_process_works_on_a_directory_and_continues_it_elsewhere(store, tmp_path, monkeypatch):
    with fetched(ADDRESS) as (mirror, hold), uploading(mirror, hold):
        (mirror.folder / "config.json").write_text("{}")
        log(mirror.folder, 1, 2)
        checkpoint(mirror.folder, 2)
        with pytest.raises(UserError, match="is working on gs://bucket/runs/a"):
            with fetched(ADDRESS):
                pass
    assert "heartbeat.json" not in mirror.names()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    with fetched(ADDRESS) as (mirror, _):
        assert steps(mirror.folder) == [1, 2] and (mirror.folder / "checkpoints/2").is_dir()
    assert steps(run_folder(ADDRESS, "--workdir")) == [1, 2]


def test_a_store_that_refuses_ends_the_run_after_a_while(store, monkeypatch):
    monkeypatch.setattr(bucket, "_PATIENCE_S", 0.0)
    with fetched(ADDRESS) as (mirror, hold):
        monkeypatch.setattr(mirror, "push", lambda: 1 / 0)
        with pytest.raises(StorageError, match="no upload to gs://.* has succeeded for 0 s"):
            with uploading(mirror, hold):
                assert hold.stop.wait(30.0)


@pytest.mark.parametrize("address", ["gs://bucket", "gs://", "ftp://a/b", "s3://bucket/run"])
def test_an_address_of_nothing_is_refused(address, tmp_path):
    with pytest.raises(StorageError, match="is not an address of a work directory. Give gs://BU"):
        Mirror(address, tmp_path)


def test_a_missing_package_names_the_extra(monkeypatch, tmp_path):
    def fail(protocol):
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr(fsspec, "filesystem", fail)
    with pytest.raises(StorageError, match=r"install gcsfs.*pip install 'tba_jax\[gcs\]'"):
        Mirror(ADDRESS, tmp_path)


def test_objects_of_another_program_are_refused_or_left_alone(store, tmp_path):
    store.pipe_file("bucket/runs/a/weights/notes/a.txt", b"theirs")
    with pytest.raises(UserError, match="has weights/notes/a.txt and no config.json"):
        train(Config(), ADDRESS)
    with pytest.raises(UserError, match="gs://bucket/runs/b holds no run"):
        run_folder("gs://bucket/runs/b", "--workdir")
    mirror = Mirror(ADDRESS, tmp_path / "run")
    mirror.fetch()
    mirror.push()
    assert mirror.names() == ["weights/notes/a.txt"]
