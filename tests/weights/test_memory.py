# SPDX-License-Identifier: Apache-2.0
"""Weights in memory: never an alias of the train state, never half a version, the newest wins."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.weights.memory import OnDevices, Weights
from tba_jax.weights.publication import make_publish_program


def tree(value):
    return {"a": jnp.full((64, 3), value, jnp.float32), "b": {"c": jnp.arange(5.0) + value}}


def memory(shardings=(None,), **changes):
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


def test_a_reader_never_sees_parts_of_two_versions():
    weights = memory()
    deliver(weights, 0)
    done = threading.Event()
    torn = []

    def read():
        while not done.is_set():
            version, params = weights.latest(0)
            values = {float(params["a"][0, 0]), float(params["b"]["c"][0])}
            if values != {float(version)}:
                torn.append((version, values))

    reader = threading.Thread(target=read)
    reader.start()
    for version in range(1, 40):
        deliver(weights, version)
    done.set()
    reader.join(30)
    assert torn == []


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
    weights.announce(5, [6])  # version 4 was evaluated between two announcements
    assert weights.at(4, 0) is None


def test_adapters_are_merged_once_for_searchers_with_the_same_devices():
    calls = []

    def merge(params):
        calls.append(float(params["a"][0, 0]))
        return {"merged": params["a"] + 10}

    def other(params):
        return {"merged": params["a"]}

    weights = memory([None] * 3, merges=[merge, merge, other])
    deliver(weights, 1)
    assert weights.latest(0) is weights.latest(1) and calls == [1.0]
    assert weights.latest(2).params["merged"][0, 0] == 1.0
    weights.keep(1)
    deliver(weights, 2)
    assert weights.latest(0).params["merged"][0, 0] == 12.0
    assert weights.at(1, 1).params["merged"][0, 0] == 11.0 and calls == [1.0, 2.0]
    assert weights.adapters(0).version == 2 and "a" in weights.adapters(0).params
