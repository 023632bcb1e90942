# SPDX-License-Identifier: Apache-2.0
"""Turns on devices: two threads, programs of several fake devices, all orders."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tba_jax.devices.site import DeviceLock, DeviceLockError, Site, device_lock_for


def mesh_of(*ids):
    devices = jax.devices()
    return Mesh(np.array([devices[i] for i in ids]), ("model",))


@pytest.mark.parametrize(
    ("meshes", "wants_lock"),
    [
        (((0,), (0,)), False),  # one GPU
        (((0, 1), (0,), (1,)), False),  # one-device programs wait for no other device
        (((0, 1), (2, 3), (4,)), False),
        (((0, 1), (1, 0)), True),
        (((0, 1, 2, 3), (0, 1), (2, 3)), True),
        (((0, 1), (2, 3), (2, 3)), True),
    ],
)
def test_a_lock_exists_where_programs_of_several_devices_can_meet(meshes, wants_lock):
    lock = device_lock_for([mesh_of(*ids) for ids in meshes], 30.0)
    assert (lock is not None) == wants_lock


def test_two_threads_launch_collectives_on_the_same_devices_in_both_orders():
    lock = DeviceLock(30.0)
    running, overlaps, results = [], [], []

    def launch_often(ids):
        mesh = mesh_of(*ids)
        sharding = NamedSharding(mesh, PartitionSpec("model"))
        program = jax.jit(
            lambda x: jnp.full((8,), x.sum()),
            in_shardings=sharding,
            out_shardings=NamedSharding(mesh, PartitionSpec()),
        )

        def watched(x):
            running.append(ids)
            overlaps.append(len(running))
            out = jax.block_until_ready(program(x))
            running.remove(ids)
            return out

        launch = Site(mesh, lock).locked(watched)
        data = jax.device_put(np.arange(8.0, dtype=np.float32), sharding)
        results.extend(float(launch(data)[0]) for _ in range(25))

    all_ids = ((0, 1, 2, 3), (3, 2, 1, 0), (2, 3, 4, 5))
    threads = [threading.Thread(target=launch_often, args=(ids,), daemon=True) for ids in all_ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert results == [28.0] * 75 and max(overlaps) == 1


def test_threads_on_other_devices_do_not_wait_and_an_early_request_is_not_overtaken():
    lock, order = DeviceLock(30.0), []
    may_end = threading.Event()

    def launch(name, *ids, holds=False):
        def program():
            order.append(name)
            assert not holds or may_end.wait(30.0)

        thread = threading.Thread(target=Site(mesh_of(*ids), lock).locked(program), daemon=True)
        thread.start()
        thread.join(0.2)
        return thread

    threads = [launch("small", 0, 1, holds=True), launch("all", 0, 1, 2, 3), launch("late", 2, 3)]
    threads.append(launch("apart", 4, 5))
    # `late` has free devices, but `all` came first and needs them: it must not wait forever.
    assert order == ["small", "apart"]
    may_end.set()
    for thread in threads:
        thread.join(10.0)
    assert order == ["small", "apart", "all", "late"] and lock.wait_s > 0


def test_a_program_that_hangs_ends_the_wait_of_the_next_one():
    lock, hangs = DeviceLock(0.1), threading.Event()
    first = Site(mesh_of(0, 1), lock).locked(lambda: hangs.wait(30.0))
    thread = threading.Thread(target=first, daemon=True)
    thread.start()
    next_one = Site(mesh_of(1, 2), lock).locked(lambda: 5)
    with pytest.raises(DeviceLockError, match=r"devices \[1, 2\]: the program before it hangs"):
        next_one()
    hangs.set()
    thread.join(10.0)
    assert next_one() == 5  # the failed request left the queue
