# SPDX-License-Identifier: Apache-2.0
"""What is compiled ahead is found by its first call, and what cannot be compiled fails there."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tba_jax.devices.precompilation import THREAD, Precompiler
from tba_jax.devices.worker import WorkerError


@pytest.fixture
def compiled():
    """(program, thread) of everything that is compiled while a test runs."""
    found = []

    def listen(name, seconds, **about):
        if name.endswith("backend_compile_duration"):
            found.append((about["fun_name"], threading.current_thread().name))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def shapes_of(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def test_the_first_call_finds_the_program(compiled):
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    where = NamedSharding(mesh, PartitionSpec("x"))
    state, batch = jax.device_put((jnp.ones((8, 3)), jnp.ones(8)), where)

    def step(state, batch):
        return state + batch[:, None], batch.sum()

    program = jax.jit(step, donate_argnums=0, in_shardings=(where, where))
    arguments = shapes_of((state, batch))
    compiled.clear()
    ahead = Precompiler({"step": lambda: program.lower(*arguments)}).start()
    ahead.wait("step")
    assert compiled == [("jit(step)", THREAD)]
    out, total = program(state, batch)
    assert len(compiled) == 1
    assert state.is_deleted() and float(total) == 8 and float(out.sum()) == 48
    ahead.close(timeout_s=10)


def test_a_failed_compilation_fails_its_waiters_and_those_of_later_programs():
    def broken(x):
        raise ValueError("these shapes do not fit")

    jobs = {"broken": lambda: jax.jit(broken).lower(1.0), "later": lambda: pytest.fail("begun")}
    ahead = Precompiler(jobs).start()
    for name in ("broken", "later"):
        with pytest.raises(WorkerError, match="compiler failed: ValueError: these shapes do not"):
            ahead.wait(name)
    ahead.close(timeout_s=10)
