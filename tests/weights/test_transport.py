# SPDX-License-Identifier: Apache-2.0
"""Publication: never an alias, never half done, never another tree."""

import functools
import itertools
import json
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.devices.worker import StopFlag, Worker, WorkerError
from tba_jax.weights.transport import MemoryTransport, make_publish_program
from tba_jax.weights.version_writer import CheckpointTransport
from tba_jax.weights.versions import PublicationError, Versions


def tree(value):
    return {"a": jnp.full((64, 3), value, jnp.float32), "b": {"c": jnp.arange(5.0) + value}}


def memory(shardings=(None,), **changes):
    program = make_publish_program(jnp.dtype(jnp.float32))
    return MemoryTransport(program, list(shardings), **({"timeout_s": 60} | changes))


def checkpoints(path, **changes):
    program = make_publish_program(jnp.dtype(jnp.float32))
    return CheckpointTransport(str(path), program, [None], **({"timeout_s": 60} | changes))


def deliver(transport, version, params):
    transport.publish(version, params)
    assert transport.poll()


def test_published_weights_survive_donation_of_their_source():
    transport, source = memory(), tree(1.0)
    pointers = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(source)}

    @functools.partial(jax.jit, donate_argnums=0)
    def step(params):
        return jax.tree.map(lambda x: x * 0 - 7.0, params)

    transport.publish(0, source)
    assert transport.latest(0) is None
    jax.block_until_ready(step(source))  # before anybody delivers
    assert transport.poll() and not transport.poll()
    published = transport.latest(0).params
    assert pointers.isdisjoint(x.unsafe_buffer_pointer() for x in jax.tree.leaves(published))
    np.testing.assert_array_equal(published["a"], np.full((64, 3), 1.0))
    np.testing.assert_array_equal(published["b"]["c"], np.arange(5.0) + 1.0)


def test_launching_a_copy_is_not_taken_for_work_that_is_over_at_once():
    # XLA:CPU makes copies of any size on the thread that calls, but for the operations beside it.
    program = make_publish_program(jnp.dtype(jnp.float32))
    analysis = program.lower(tree(1.0)).compile().cost_analysis()
    assert analysis is not None and analysis["flops"] >= 1000
    odd = {"a": jnp.array([[-0.0, jnp.nan, jnp.inf, 1e-40]])}
    copied = program(odd)["a"]
    assert np.asarray(copied).tobytes() == np.asarray(odd["a"]).tobytes()


def test_weights_of_another_shape_are_refused():
    transport = memory()
    deliver(transport, 0, tree(0.0))
    transport.publish(1, {"a": jnp.zeros((64, 4)), "b": {"c": jnp.zeros(5)}})
    with pytest.raises(ValueError, match=r"\['a'\] is \(64, 4\)"):
        transport.poll()
    assert transport.latest(0).version == 0


def test_each_searcher_gets_the_weights_on_its_device():
    devices = jax.local_devices()
    where = [None, *(jax.sharding.SingleDeviceSharding(d) for d in devices[1:3])]
    transport = memory(where)
    deliver(transport, 3, tree(2.0))
    for searcher, device in enumerate(devices[:3]):
        published = transport.latest(searcher)
        assert published.version == 3
        assert {x.device for x in jax.tree.leaves(published.params)} == {device}


def test_a_reader_never_sees_a_torn_version():
    transport = memory()
    deliver(transport, 0, tree(0.0))
    done = threading.Event()
    torn = []

    def read():
        while not done.is_set():
            version, params = transport.latest(0)
            values = {float(params["a"][0, 0]), float(params["b"]["c"][0])}
            if values != {float(version)}:
                torn.append((version, values))

    stop = StopFlag()
    poller = Worker("poller", lambda: transport.poll(0.01), stop).start()
    reader = threading.Thread(target=read)
    reader.start()
    try:
        for version in range(1, 40):
            transport.publish(version, tree(float(version)))
            if version % 10 == 0:
                transport.settle()
                assert transport.latest(0).version == version
    finally:
        done.set()
        reader.join(30)
        poller.close()
    assert torn == []


def test_a_delivery_that_takes_too_long_ends_the_publisher(monkeypatch):
    now_s = itertools.count(0.0, 4.0)  # each look at the clock is 4 s later
    clock = types.SimpleNamespace(monotonic=lambda: next(now_s))
    monkeypatch.setattr("tba_jax.weights.transport.time", clock)
    transport = memory(timeout_s=7)
    transport.publish(0, tree(0.0))
    transport.publish(1, tree(1.0))
    with pytest.raises(PublicationError, match=r"for 8 s: devices or storage hang"):
        transport.publish(2, tree(2.0))
    assert transport.poll()  # it was slow, not lost
    transport.publish(3, tree(3.0))
    transport.publish(4, tree(4.0))
    assert transport.poll() and transport.latest(0).version == 4
    assert transport.delivery_s == 4.0  # since the publication that arrived


def test_storage_that_refuses_reaches_the_trainer_through_the_worker(tmp_path):
    transport = checkpoints(tmp_path)
    deliver(transport, 1, tree(1.0))
    (tmp_path / "weights" / "1").rename(tmp_path / "kept")
    (tmp_path / "weights").rmdir()
    (tmp_path / "weights").write_text("not a folder")
    stop = StopFlag()
    poller = Worker("weight-poller", lambda: transport.poll(0.01), stop).start()
    transport.publish(2, tree(2.0))
    assert stop.wait(30)
    with pytest.raises(WorkerError, match=r"weight-poller failed: PublicationError: publishing"):
        stop.check()
    poller.join(30)
    assert transport.latest(0).version == 1
    assert json.loads((tmp_path / "versions.json").read_text())["versions"] == [1]
    transport.close()


def test_checkpoint_transport_round_trip_keeps_the_newest(tmp_path):
    transport = checkpoints(tmp_path)
    assert not transport.poll() and transport.latest(0) is None
    for version in (0, 5, 9):
        deliver(transport, version, tree(float(version)))
        assert not transport.poll()
        published = transport.latest(0)
        assert published.version == version
        np.testing.assert_array_equal(published.params["b"]["c"], np.arange(5.0) + version)
    transport.close()
    assert json.loads((tmp_path / "versions.json").read_text())["versions"] == [5, 9]
    assert sorted(p.name for p in (tmp_path / "weights").iterdir()) == ["5", "9"]


def flip(folder):
    """One bit of the largest file."""
    file = max((f for f in folder.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def test_weights_that_storage_spoils_are_never_searched_with(tmp_path):
    transport = checkpoints(tmp_path)
    deliver(transport, 1, tree(1.0))
    add = transport._writer.versions.add

    def add_and_spoil(version, wanted):
        add(version, wanted)
        flip(tmp_path / "weights" / str(version))

    transport._writer.versions.add = add_and_spoil
    transport.publish(2, tree(2.0))
    with pytest.raises(PublicationError, match="weights/2 are damaged: "):
        transport.poll()
    assert transport.latest(0).version == 1
    transport.close()


def test_a_remote_reader_reports_damage_and_gets_the_version_before(tmp_path):
    transport = checkpoints(tmp_path)
    for version in (3, 5):
        deliver(transport, version, tree(float(version)))
    transport.close()
    versions, notes = Versions(tmp_path), []
    assert versions.newest_intact(notes.append) == 5 and not notes
    flip(tmp_path / "weights" / "5")
    assert versions.newest_intact(notes.append) == 3
    assert len(notes) == 1 and "weights/5 are damaged: " in notes[0]
    with pytest.raises(PublicationError, match="has no intact version among 5"):
        versions.newest_intact(notes.append, 5)
    with pytest.raises(
        PublicationError, match=r"no published version 4; published versions: \[3, 5\]"
    ):
        versions.newest_intact(notes.append, 4)
    (tmp_path / "versions.json").write_text("{")
    assert versions.named() == []


def test_an_array_that_goes_during_a_read_is_an_error_of_one_line(tmp_path):
    params = {f"w{i}": jnp.arange(20000.0) for i in range(9)}
    transport = checkpoints(tmp_path)
    deliver(transport, 3, params)
    transport.close()
    for file in (tmp_path / "weights" / "3").glob("*/d/*"):
        file.unlink()
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )
    with pytest.raises(PublicationError, match="weights/3 cannot be read") as error:
        Versions(tmp_path).read(3, abstract)
    assert "\n" not in str(error.value)


def test_what_kills_have_left_and_steps_that_are_made_again_are_dropped(tmp_path):
    transport = checkpoints(tmp_path)
    for version in (3, 5):
        deliver(transport, version, tree(float(version)))
    transport.close()
    Versions(tmp_path).begin(6)
    (tmp_path / "weights" / "6.orbax-checkpoint-tmp").mkdir()
    transport = checkpoints(tmp_path)
    deliver(transport, 4, tree(4.0))
    transport.close()
    assert sorted(p.name for p in (tmp_path / "weights").iterdir()) == ["3", "4"]


def test_a_publisher_does_not_wait_for_storage(tmp_path):
    transport = checkpoints(tmp_path)
    reading, go_on = threading.Event(), threading.Event()
    versions = transport._writer.versions
    read = versions.read

    def slow_read(*args):
        reading.set()
        assert go_on.wait(30)
        return read(*args)

    versions.read = slow_read
    transport.publish(1, tree(1.0))
    poller = threading.Thread(target=transport.poll)
    poller.start()
    assert reading.wait(30)
    for version in (2, 3, 4, 5):
        transport.publish(version, tree(float(version)))
    transport.settle()
    assert transport.latest(0) is None
    go_on.set()
    poller.join(30)
    assert transport.latest(0).version == 1
    assert transport.poll() and transport.latest(0).version == 5
    transport.close()
    assert sorted(p.name for p in (tmp_path / "weights").iterdir()) == ["1", "5"]
