# SPDX-License-Identifier: Apache-2.0
"""Weights in memory and in a folder of versions: whole versions only, and the newest wins."""

import functools
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from tba_jax.storage.steps import delete_own
from tba_jax.weights.folder import StoredWeights, WeightFolder
from tba_jax.weights.memory import OnDevices, Weights
from tba_jax.weights.publication import PublicationError, make_publish_program


def tree(value):
    return {"a": jnp.full((64, 3), value, jnp.float32), "b": {"c": jnp.arange(5.0) + value}}


HERE = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def memory(shardings=(HERE,), **changes):
    return Weights(make_publish_program(jnp.dtype(jnp.float32)), list(shardings), **changes)


def deliver(weights, version):
    weights.publish(version, tree(float(version)))
    assert weights.poll()


def test_published_weights_survive_donation_of_their_source():
    weights, source = memory(), tree(1.0)
    pointers = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(source)}

    @functools.partial(jax.jit, donate_argnums=0)
    def step(params):
        return jax.tree.map(lambda x: x * 0 - 7.0, params)

    weights.publish(0, source)
    assert weights.latest(0) is None
    jax.block_until_ready(step(source))  # before the delivery
    assert weights.poll() and not weights.poll()
    published = weights.latest(0).params
    assert pointers.isdisjoint(x.unsafe_buffer_pointer() for x in jax.tree.leaves(published))
    np.testing.assert_array_equal(published["a"], np.full((64, 3), 1.0))
    np.testing.assert_array_equal(published["b"]["c"], np.arange(5.0) + 1.0)


def test_a_publisher_waits_for_no_delivery_and_the_newest_wins(monkeypatch):
    weights = memory()
    delivering, go_on = threading.Event(), threading.Event()
    put = OnDevices.put

    def slow_put(self, version, params, **options):
        delivering.set()
        assert go_on.wait(30)
        put(self, version, params, **options)

    monkeypatch.setattr(OnDevices, "put", slow_put)
    weights.publish(1, tree(1.0))
    poller = threading.Thread(target=weights.poll)
    poller.start()
    assert delivering.wait(30)
    for version in (2, 3, 4, 5):
        weights.publish(version, tree(float(version)))
    assert weights.latest(0) is None
    go_on.set()
    poller.join(30)
    assert weights.latest(0).version == 1
    assert weights.poll() and weights.latest(0).version == 5 and not weights.poll()


def test_a_process_without_the_owner_follows_its_announcements():
    weights = memory()
    deliver(weights, 1)
    weights.keep(1)
    deliver(weights, 2)
    weights.announce(2, [])  # the evaluation of version 1 is not requested yet
    assert weights.at(1, 0) is not None
    weights.announce(2, [1])
    deliver(weights, 4)
    weights.keep(4)
    deliver(weights, 5)
    weights.announce(5, [])
    assert weights.at(1, 0) is None and weights.at(4, 0) is not None


def test_adapters_are_merged_once_for_searchers_with_the_same_devices():
    calls = []

    def merge(params):
        calls.append(float(params["a"][0, 0]))
        return {"merged": params["a"] + 10}

    def other(params):
        return {"merged": params["a"]}

    weights = memory([HERE] * 3, merges=[merge, merge, other])
    deliver(weights, 1)
    assert weights.latest(0) is weights.latest(1) and calls == [1.0]
    assert weights.latest(2).params["merged"][0, 0] == 1.0
    weights.keep(1)
    deliver(weights, 2)
    assert weights.latest(0).params["merged"][0, 0] == 12.0
    assert weights.at(1, 1).params["merged"][0, 0] == 11.0 and calls == [1.0, 2.0]
    assert weights.adapters(0).version == 2 and "a" in weights.adapters(0).params


def writer(workdir, **options):
    program = make_publish_program(jnp.dtype(jnp.float32))
    return WeightFolder(workdir, program, **{"run_id": "f00d"} | options)


def reader(workdir, devices=None, **options):
    here = [jax.sharding.SingleDeviceSharding(d) for d in devices or jax.local_devices()[:1]]
    abstract = {"w": jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=here[0])}
    return StoredWeights(workdir, abstract, here, **options)


def weights(value):
    return {"w": jnp.arange(16.0).reshape(4, 4) + value}


def publish(folder, *versions):
    for version in versions:
        folder.publish(version, weights(version))
        assert folder.poll() and not folder.poll() and folder.newest == version


def names(workdir):
    return sorted(path.name for path in (workdir / "weights").iterdir())


def test_every_reader_gets_the_newest_announced_version(tmp_path):
    devices = jax.local_devices()[:2]
    wanted: list[int] = []
    folder = writer(tmp_path, wanted=lambda: wanted)
    stored = reader(tmp_path, devices)
    assert not stored.poll() and stored.latest(0) is None
    folder.publish(0, weights(0))
    assert folder.is_publishing and folder.newest is None
    assert folder.poll() and not folder.is_publishing
    assert not stored.poll()  # not announced
    stored.announce(0, [])
    assert stored.poll() and not stored.poll()
    for i, device in enumerate(devices):
        version, params = stored.latest(i)
        assert version == 0 and params["w"].devices() == {device}
        np.testing.assert_array_equal(params["w"], np.asarray(weights(0)["w"]))
    # A version under evaluation stays; others go when two newer ones are complete.
    wanted.append(0)
    publish(folder, 1, 2, 3)
    assert names(tmp_path) == ["0", "2", "3"]
    stored.announce(3, [0])
    assert stored.poll() and stored.latest(1).version == 3
    old = stored.at(0, 1)
    np.testing.assert_array_equal(old.params["w"], np.asarray(weights(0)["w"]))
    assert stored.at(1, 0) is None and stored.latest(1).version == 3
    stored._load = None  # an older version is read once for all shards of its evaluation
    stored.announce(3, [0])
    assert stored.at(0, 0).version == stored.at(0, 1).version == 0
    folder.close()


def test_a_reader_follows_a_restored_trainer_and_names_damage(tmp_path, monkeypatch):
    now_s = [1.0]
    clock = types.SimpleNamespace(monotonic=lambda: now_s[0], sleep=lambda s: None)
    monkeypatch.setattr("tba_jax.weights.folder.time", clock)
    folder, stored = writer(tmp_path), reader(tmp_path, timeout_s=10.0)
    publish(folder, 6)
    stored.announce(6, [])
    assert stored.poll() and stored.latest(0).version == 6
    stored.announce(7, [])  # as if version 7 had been deleted meanwhile
    assert not stored.poll() and stored.latest(0).version == 6
    folder.close()
    # A trainer that was restored before version 6 writes version 4, and version 6 again.
    delete_own(epath.Path(tmp_path / "weights"), "f00d")
    folder = writer(tmp_path)
    publish(folder, 4)
    stored.announce(4, [])
    assert not stored.poll() and stored.latest(0).version == 6
    stored.reset()
    stored.announce(4, ())
    assert stored.latest(0) is None and stored.poll() and stored.latest(0).version == 4
    folder.publish(6, weights(60))
    assert folder.poll()
    stored.announce(6, [])
    assert stored.poll()
    np.testing.assert_array_equal(stored.latest(0).params["w"][0, 0], 60.0)
    files = [path for path in (tmp_path / "weights" / "6").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    data = largest.read_bytes()
    largest.write_bytes(data[:-9] + bytes([data[-9] ^ 4]) + data[-8:])  # one flipped bit
    stored.reset()
    stored.announce(6, ())
    assert not stored.poll() and stored.latest(0) is None
    now_s[0] = 20.0
    with pytest.raises(PublicationError, match="has not been readable for 19 s: .*is damaged"):
        stored.poll()
    folder.close()


def test_storage_that_refuses_a_version_is_an_error(tmp_path):
    folder = writer(tmp_path)
    publish(folder, 1)
    (tmp_path / "weights" / "1").rename(tmp_path / "kept")
    (tmp_path / "weights").rmdir()
    (tmp_path / "weights").write_text("not a folder")
    with pytest.raises(PublicationError, match="writing .*weights/2 failed"):
        folder.publish(2, weights(2))
        folder.poll()
    assert folder.newest == 1


def test_a_publication_waits_for_no_reader(tmp_path, monkeypatch):
    folder, stored = writer(tmp_path), reader(tmp_path)
    publish(folder, 1)
    reading, go_on = threading.Event(), threading.Event()
    load = WeightFolder.load

    def slow_load(*args):
        reading.set()
        assert go_on.wait(30)
        return load(*args)

    monkeypatch.setattr(WeightFolder, "load", slow_load)
    stored.announce(1, [])
    poller = threading.Thread(target=stored.poll)
    poller.start()
    assert reading.wait(30)
    publish(folder, *range(2, 6))  # version 1 is deleted meanwhile
    stored.announce(5, [])
    go_on.set()
    poller.join(30)
    assert stored.latest(0) is None
    assert stored.poll() and stored.latest(0).version == 5
    folder.close()
