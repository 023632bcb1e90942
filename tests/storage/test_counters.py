# SPDX-License-Identifier: Apache-2.0
"""Saving and reading again and again leaves nothing behind."""

import gc

import jax.numpy as jnp

from tba_jax.weights.checkpoints import CheckpointTransport
from tba_jax.weights.transport import make_publish_program


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
    # Without `leave_out` each version leaves some forty.
    assert num_lists(3, 9) - before < 40
    transport.close()
