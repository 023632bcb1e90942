# SPDX-License-Identifier: Apache-2.0
"""Saves of one process that begin at the same time, and saves that fail."""

import itertools
import resource
import sys
import time

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint._src.futures import synchronization

from tba_jax.run.checkpoint import Checkpoints
from tba_jax.run.host_state import Facts, HostState
from tba_jax.storage import saves
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
    facts = Facts(seed=0, num_searchers=1, run_id="f00d", fingerprints={})
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


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_a_failed_save_prints_nothing_of_its_other_writes(kind, tmp_path, monkeypatch):
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: printed.append(str(error.exc_value)))
    processes = ocp.options.MultiprocessingOptions()
    writer = ocp.AsyncCheckpointer(
        saves.tree_handler(processes), async_options=saves.in_background(60)
    )
    random = np.random.default_rng(0)
    arrays = {f"a{i}": kind(random.random((100, 1000), np.float32)) for i in range(30)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # bytes; each array has 400,000
    try:
        with pytest.raises(ValueError, match="File too large"):
            writer.save(tmp_path / "1", args=ocp.args.StandardSave(arrays))
            writer.wait_until_finished()
        time.sleep(0.5)  # without the wait, writes end later than the save
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        writer.close()
    assert not printed
