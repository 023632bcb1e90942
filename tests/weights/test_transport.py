# SPDX-License-Identifier: Apache-2.0
"""Publication: never an alias, never half done, never another tree."""

import functools
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.weights.transport import CheckpointTransport, MemoryTransport, make_publish_program


def tree(value):
    return {"a": jnp.full((64, 3), value, jnp.float32), "b": {"c": jnp.arange(5.0) + value}}


def test_published_weights_survive_donation_of_their_source():
    transport = MemoryTransport(jnp.dtype(jnp.float32), [None])
    source = tree(1.0)
    pointers = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(source)}
    transport.publish(0, source)
    published = transport.latest(0).params
    assert pointers.isdisjoint(x.unsafe_buffer_pointer() for x in jax.tree.leaves(published))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(params):
        return jax.tree.map(lambda x: x * 0 - 7.0, params)

    jax.block_until_ready(step(source))
    np.testing.assert_array_equal(published["a"], np.full((64, 3), 1.0))
    np.testing.assert_array_equal(published["b"]["c"], np.arange(5.0) + 1.0)


def test_publication_casts_to_the_rollout_dtype():
    out = make_publish_program(jnp.dtype(jnp.bfloat16))(tree(1.5))
    assert {x.dtype for x in jax.tree.leaves(out)} == {jnp.dtype(jnp.bfloat16)}
    assert float(out["a"][0, 0]) == 1.5


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"a": jnp.zeros((64, 3))}, "another tree"),
        ({"a": jnp.zeros((64, 4)), "b": {"c": jnp.zeros(5)}}, r"\['a'\] is \(64, 4\)"),
    ],
)
def test_weights_of_another_shape_are_refused(other, message):
    transport = MemoryTransport(jnp.dtype(jnp.float32), [None])
    transport.publish(0, tree(0.0))
    with pytest.raises(ValueError, match=message):
        transport.publish(1, other)
    assert transport.latest(0).version == 0


def test_each_searcher_gets_the_weights_on_its_device():
    devices = jax.local_devices()
    where = [None, *(jax.sharding.SingleDeviceSharding(d) for d in devices[1:3])]
    transport = MemoryTransport(jnp.dtype(jnp.float32), where)
    transport.publish(3, tree(2.0))
    for searcher, device in enumerate(devices[:3]):
        published = transport.latest(searcher)
        assert published.version == 3
        assert {x.device for x in jax.tree.leaves(published.params)} == {device}


def test_a_reader_never_sees_a_torn_version():
    transport = MemoryTransport(jnp.dtype(jnp.float32), [None])
    transport.publish(0, tree(0.0))
    done = threading.Event()
    torn = []

    def read():
        while not done.is_set():
            version, params = transport.latest(0)
            values = {float(params["a"][0, 0]), float(params["b"]["c"][0])}
            if values != {float(version)}:
                torn.append((version, values))

    reader = threading.Thread(target=read)
    reader.start()
    for version in range(1, 40):
        transport.publish(version, tree(float(version)))
    done.set()
    reader.join(30)
    assert torn == []


def test_checkpoint_transport_round_trip_keeps_the_newest(tmp_path):
    transport = CheckpointTransport(
        str(tmp_path), keep=2, dtype=jnp.dtype(jnp.float32), shardings=[None]
    )
    assert not transport.poll() and transport.latest(0) is None
    for version in (0, 5, 9):
        transport.publish(version, tree(float(version)))
        assert transport.poll()
        assert not transport.poll()
        published = transport.latest(0)
        assert published.version == version
        np.testing.assert_array_equal(published.params["b"]["c"], np.arange(5.0) + version)
    transport.close()
    assert json.loads((tmp_path / "versions.json").read_text())["versions"] == [5, 9]
    assert sorted(p.name for p in (tmp_path / "weights").iterdir()) == ["5", "9"]


def test_a_version_being_read_is_spared_until_the_reader_is_done(tmp_path):
    transport = CheckpointTransport(
        str(tmp_path), keep=2, dtype=jnp.dtype(jnp.float32), shardings=[None]
    )
    reading, go_on = threading.Event(), threading.Event()
    restore = transport._reader.restore

    def slow_restore(*args, **kwargs):
        reading.set()
        assert go_on.wait(30)
        return restore(*args, **kwargs)

    transport._reader.restore = slow_restore
    transport.publish(1, tree(1.0))
    poller = threading.Thread(target=transport.poll)
    poller.start()
    assert reading.wait(30)
    for version in (2, 3, 4, 5):
        transport.publish(version, tree(float(version)))
    assert (tmp_path / "weights" / "1").exists()
    go_on.set()
    poller.join(30)
    assert transport.latest(0).version == 1
    transport.close()
    assert sorted(p.name for p in (tmp_path / "weights").iterdir()) == ["4", "5"]


def test_checkpoint_transport_delivers_the_last_of_versions_nobody_polled(tmp_path):
    transport = CheckpointTransport(
        str(tmp_path), keep=2, dtype=jnp.dtype(jnp.float32), shardings=[None]
    )
    transport.publish(1, tree(1.0))
    transport.publish(2, tree(2.0))
    assert transport.poll()
    assert transport.latest(0).version == 2
    transport.close()
