# SPDX-License-Identifier: Apache-2.0
"""Saves of one process that begin at the same time."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint._src.futures import synchronization

from tba_jax.run.checkpoint import Checkpoints
from tba_jax.run.host_state import Facts, HostState
from tba_jax.weights.transport import make_publish_program
from tba_jax.weights.version_writer import CheckpointTransport


@pytest.fixture
def others_begin(monkeypatch):
    """Between any two looks at Orbax's number of the newest save, another one has begun."""
    numbers = itertools.count(1000)
    ids = synchronization.OperationIdGenerator
    monkeypatch.setattr(ids, "get_current_operation_id", lambda: str(next(numbers)))


def test_a_checkpoint_is_complete_though_other_saves_begin(tmp_path, others_begin):
    checkpoints = Checkpoints(str(tmp_path / "checkpoints"), timeout_s=20)
    facts = Facts(seed=0, run_id="f00d")
    checkpoints.save(3, {"w": jnp.arange(8.0)}, HostState(facts, {}))
    checkpoints.close()
    assert Checkpoints(str(tmp_path / "checkpoints")).latest_step() == 3


def test_a_version_arrives_though_other_saves_begin(tmp_path, others_begin):
    program = make_publish_program(jnp.dtype(jnp.float32))
    transport = CheckpointTransport(str(tmp_path), program, [None], timeout_s=20)
    transport.publish(0, {"w": jnp.arange(8.0)})
    assert transport.poll()
    arrived = transport.latest(0)
    assert arrived is not None and arrived.version == 0
    np.testing.assert_array_equal(arrived.params["w"], np.arange(8.0))
    transport.close()
