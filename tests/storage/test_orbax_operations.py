# SPDX-License-Identifier: Apache-2.0
"""What an operation of Orbax changes elsewhere, and that it leaves nothing behind."""

import gc
import logging
import sys

import jax.numpy as jnp
import pytest
import tensorstore
from absl import logging as absl_logging

from tba_jax.storage import orbax_operations
from tba_jax.weights.checkpoints import CheckpointTransport
from tba_jax.weights.transport import make_publish_program


@pytest.fixture(autouse=True)
def none_has_failed():
    """As in a new process: the changes stay after an operation that failed, in any test before."""
    orbax_operations._changes.close()
    orbax_operations._operations = 0


def test_a_version_more_is_not_a_list_more(tmp_path):
    program = make_publish_program(jnp.dtype(jnp.float32))
    transport = CheckpointTransport(str(tmp_path), program, [None], keep=2, timeout_s=60)
    weights = {"w": jnp.ones(4)}

    def num_lists(first, last):
        for version in range(first, last):
            transport.publish(version, weights)
            assert transport.poll()
        gc.collect()
        return sum(type(x) is list for x in gc.get_objects())

    before = num_lists(0, 3)
    # With TensorStore's metrics each version leaves some forty.
    assert num_lists(3, 9) - before < 40
    transport.close()


def changeable():
    """What an operation changes."""
    loggers = (logging.getLogger("asyncio"), absl_logging.get_absl_logger())
    filters = [list(logger.filters) for logger in loggers]
    return sys.unraisablehook, tensorstore.experimental_collect_matching_metrics, filters


def test_other_packages_are_as_before_when_the_last_operation_has_ended():
    before = changeable()
    with orbax_operations.operation():
        during = changeable()
        assert all(now != then for now, then in zip(during, before, strict=True))
        with orbax_operations.operation():
            assert changeable() == during
        assert changeable() == during
    assert changeable() == before


def test_a_hook_that_was_set_during_an_operation_stays(monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    with orbax_operations.operation():
        sys.unraisablehook = theirs = print
    assert sys.unraisablehook is theirs
