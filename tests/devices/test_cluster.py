# SPDX-License-Identifier: Apache-2.0
"""Where the processes of a run find one another, and which failure is a lost process.

What needs real processes is in integration/test_pod.py and chaos/test_lost_peer.py.
"""

import pytest

from tba_jax.devices.cluster import (
    Address,
    Cluster,
    PeerError,
    peer_errors,
    resolve_address,
)


def test_address_comes_from_flags_then_from_the_environment():
    environment = {
        "JAX_COORDINATOR_ADDRESS": "a:1",
        "JAX_NUM_PROCESSES": "4",
        "JAX_PROCESS_ID": "3",
    }
    assert resolve_address(None, None, None, environment) == Address("a:1", 4, 3)
    assert resolve_address("b:2", 2, 0, environment) == Address("b:2", 2, 0)
    assert resolve_address(None, None, None, {}) == Address()
    platform = Address("", 0, -1)  # a TPU pod knows by itself
    assert resolve_address("auto", None, None, {}) == platform
    assert resolve_address(None, 1, None, {}) == Address()


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        (("a:1", 2, None), {}, r"missing: --process_id \(or JAX_PROCESS_ID\)"),
        ((None, 2, 0), {}, "missing: --coordinator"),
        (("a:1", 2, 2), {}, "count from 0"),
        (("a", 2, 0), {}, "must be HOST:PORT"),
        (("a:1", 2, None), {"JAX_PROCESS_ID": "x"}, "must be a whole number"),
    ],
)
def test_a_part_of_an_address_is_refused(flags, environment, message):
    with pytest.raises(ValueError, match=message):
        resolve_address(*flags, environment)


def test_only_the_failure_of_a_collective_is_a_lost_peer():
    pod = Cluster(1, (0, 1))
    with (
        pytest.raises(PeerError, match="process 1 of 2 lost another.*run the same command again"),
        peer_errors(pod),
    ):
        raise ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer")
    with pytest.raises(ValueError, match="of ours"), peer_errors(pod):
        raise ValueError("a mistake of ours")
