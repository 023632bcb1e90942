# SPDX-License-Identifier: Apache-2.0
"""Work directories in an object store that renames nothing, appends to nothing, and may refuse."""

import json
import sys
import threading

import fake_store
import fsspec
import pytest
from etils import epath

from tba_jax.config.schema import Config
from tba_jax.run.errors import UserError, WorkdirLost
from tba_jax.run.lock import Hold, Mirroring, run_folder
from tba_jax.run.session import train
from tba_jax.storage import digests
from tba_jax.storage.bucket import Bucket, StorageError
from tba_jax.storage.mirror import Mirror


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_STORE", str(tmp_path / "store"))
    known = sys.modules["fsspec.registry"]  # `fsspec.registry` is the table in it
    for protocol in fake_store.ObjectStore.protocol:
        monkeypatch.setitem(known._registry, protocol, fake_store.ObjectStore)
    return Bucket("gs://bucket/runs/a/")


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


def test_objects_are_made_once_listed_as_they_are_and_read_whole(bucket):
    assert bucket.read("x/a") is None and bucket.names() == []
    assert bucket.create("x/a", b"mine") and not bucket.create("x/a", b"yours")
    assert bucket.create("x/a", b"mine")  # an answer was lost, and it was asked again
    bucket.write("x/a", b"more")
    bucket.write("xy", b"")
    assert bucket.read("x/a") == b"more" and bucket.names("x/") == ["x/a"]
    assert bucket.names() == ["x/a", "xy"]
    bucket.remove(["x/a", "x/a"])
    assert bucket.names() == ["xy"]
    assert Bucket("s3://bucket/runs").names() == ["a/xy"]


def test_of_many_who_make_an_object_one_does(bucket):
    together, made = threading.Barrier(8), []

    def make(mark):
        together.wait(30.0)
        made.append(bucket.create("lock/1", mark))

    threads = [threading.Thread(target=make, args=(b"%d" % i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert sorted(made) == [False] * 7 + [True]


class Overwrites(fake_store.ObjectStore):
    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        self._commit(path, value)


class LooksFirst(fake_store.ObjectStore):
    pipe_file = fsspec.AbstractFileSystem.pipe_file


@pytest.mark.parametrize(
    ("store", "message"), [(Overwrites, "it overwrites an existing"), (LooksFirst, "in one step")]
)
def test_a_store_that_two_could_make_one_object_in_is_refused(store, message, bucket):
    bucket.require_create()
    assert bucket.names() == []
    fsspec.register_implementation("gs", store, clobber=True)
    with pytest.raises(StorageError, match=f"runs/a: the store does not support .*{message}"):
        Bucket("gs://bucket/runs/a").require_create()


@pytest.mark.parametrize("address", ["gs://bucket", "gs://", "ftp://a/b", "s3://bucket/"])
def test_an_address_of_nothing_is_refused(address):
    with pytest.raises(
        StorageError, match="is not an address of a work directory. Give gs://BUCKET/"
    ):
        Bucket(address)


def test_a_missing_package_names_the_extra(monkeypatch):
    def fail(protocol):
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr(fsspec, "filesystem", fail)
    with pytest.raises(StorageError, match=r"install gcsfs.*pip install 'tba_jax\[gcs\]'"):
        Bucket("gs://bucket/run")


def test_what_was_brought_is_fetched(bucket, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    (here / "config.json").write_text("{}")
    log(here, 1, 2)
    with open(here / "metrics.jsonl", "a") as file:
        file.write('{"torn')
    checkpoint(here, 2, b"two")
    mirror = Mirror(bucket, here, number=3)
    mirror.push()
    objects = bucket.names()
    mirror.push()
    assert bucket.names() == objects and not (here / "being_pushed").exists()
    Mirror(bucket, there).fetch(pytest.fail)
    assert steps(there) == [1, 2]
    assert (there / "checkpoints/2/train_state/d/0").read_bytes() == b"two"
    assert (there / "config.json").read_text() == "{}"
    # More of it, and less: the run drops a checkpoint when it has a newer one.
    text = (here / "metrics.jsonl").read_text().removesuffix('{"torn')
    (here / "metrics.jsonl").write_text(text)
    log(here, 3)
    checkpoint(here, 3, b"three")
    (here / "checkpoints/2/digests.json").unlink()
    mirror.push()
    assert not bucket.names("checkpoints/2/")
    Mirror(bucket, there).fetch(pytest.fail)
    assert steps(there) == [1, 2, 3]
    assert [path.name for path in (there / "checkpoints").iterdir()] == ["3"]


def test_a_push_that_is_cut_off_anywhere_leaves_what_can_be_continued(bucket, tmp_path):
    """After every single write the bucket holds a checkpoint and the lines of its steps."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    seen = set()

    def look(*_):
        Mirror(bucket, there).fetch(pytest.fail)
        kept = [int(path.name) for path in there.glob("checkpoints/*")]
        assert (len(kept) == 1) or not seen
        for number in kept:
            assert set(range(1, number + 1)) <= set(steps(there)), (kept, steps(there))
            seen.add(number)

    mirror = Mirror(bucket, here, number=1)
    for name in ("write", "upload", "remove"):
        real = getattr(bucket, name)

        def then_look(*args, real=real):
            real(*args)
            look()

        setattr(bucket, name, then_look)
    for step in range(1, 6):
        log(here, step)
        checkpoint(here, step, b"%d" % step)
        mirror.push()
        (here / "checkpoints" / str(step) / "digests.json").unlink()
    assert seen == {1, 2, 3, 4, 5}


def test_the_next_holder_begins_its_logs_with_what_it_kept(bucket, tmp_path):
    first, second, there = (tmp_path / name for name in ("first", "second", "there"))
    first.mkdir()
    log(first, 1, 2, 3)
    checkpoint(first, 2)
    old = Mirror(bucket, first, number=1)
    old.push()
    mirror = Mirror(bucket, second, number=2)
    mirror.fetch(pytest.fail)
    (second / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')  # 3 is made again
    mirror.push()
    mirror.forget()
    log(first, 4)  # one that slept wakes up
    old.push()
    Mirror(bucket, there).fetch(pytest.fail)
    assert steps(there) == [1, 2]
    assert [n for n in bucket.names("logs/") if "00000001-" in n] == [
        "logs/metrics.jsonl/00000001-00000001"
    ]


def test_a_damaged_checkpoint_in_the_bucket_is_said_and_the_one_before_it_fetched(bucket, tmp_path):
    here, notes = tmp_path / "here", []
    for number in (2, 5):
        checkpoint(here, number)
    Mirror(bucket, here, number=1).push()
    bucket.write("checkpoints/5/train_state/d/0", b"weighty")
    Mirror(bucket, tmp_path / "there").fetch(notes.append)
    assert [path.name for path in (tmp_path / "there/checkpoints").iterdir()] == ["2"]
    assert (
        len(notes) == 1 and "checkpoints/5 is damaged: train_state/d/0 has the digest" in notes[0]
    )


def test_a_bucket_has_one_holder_which_detects_the_next(bucket):
    with Hold(bucket, beat_s=60.0) as hold:
        with pytest.raises(UserError, match="is working on gs://bucket/runs/a"):
            Hold(bucket)
        hold.confirm()
        bucket.create("lock/00000002.json", b'{"pid": 7, "host": "far"}')
        with pytest.raises(WorkdirLost, match="process 7 on far has taken over gs://"):
            hold.confirm()
    assert bucket.read("lock/00000001.json") is not None


class Refuses:
    """A mirror whose store takes nothing, until it does."""

    folder = "/cache/run"

    def __init__(self):
        self.is_open, self.pushes = False, 0

    def push(self):
        if not self.is_open:
            raise OSError("503 Slow Down")
        self.pushes += 1

    def forget(self):
        self.forgot = self.pushes


def test_a_store_that_refuses_may_pass_but_not_for_long(bucket):
    now, mirror = [0.0], Refuses()
    with Hold(bucket, beat_s=60.0) as hold:
        mirroring = Mirroring(mirror, hold, patience_s=60.0, period_s=60.0, clock=lambda: now[0])
        mirroring._step()
        now[0] = 61.0
        with pytest.raises(StorageError, match="no upload .* for 60 s .*503 Slow Down.*/cache/run"):
            mirroring._step()
        mirror.is_open = True
        mirroring._step()
        mirroring._step()
        assert mirror.pushes == 2 and mirror.forgot == 1


def test_commands_say_that_a_bucket_holds_no_run(bucket):
    with pytest.raises(UserError, match="gs://bucket/runs/b holds no run"):
        run_folder("gs://bucket/runs/b", "--workdir", print)


@pytest.mark.parametrize(
    "name", ["weights/3/model.bin", "config.json", "logs/notes", "plots/a.png"]
)
def test_a_bucket_with_objects_of_another_program_is_refused_and_left_alone(bucket, name):
    bucket.write(name, b"theirs")
    with pytest.raises(UserError, match=f"has {name.split('/')[0]}, which a run writes, and no"):
        train(Config(), bucket.address)
    assert bucket.names() == [name] and bucket.read(name) == b"theirs"


def test_objects_that_no_run_writes_stay_in_the_bucket_of_a_run(bucket, tmp_path):
    bucket.write("weights/notes/a.txt", b"theirs")
    mirror = Mirror(bucket, tmp_path / "run", 1)
    mirror.fetch(print)
    mirror.forget()
    assert bucket.read("weights/notes/a.txt") == b"theirs"
