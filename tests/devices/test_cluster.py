# SPDX-License-Identifier: Apache-2.0
"""Where the processes of a run find one another, and which failure is a lost process.

What needs real processes is in integration/test_pod.py and chaos/test_lost_peer.py.
"""

import pytest

from tba_jax.devices.cluster import Address, Cluster, PeerError, peer_errors, resolve_address


def test_address_comes_from_flags():
    assert resolve_address("b:2", 2, 0) == Address("b:2", 2, 0)
    assert resolve_address(None, None, None) == resolve_address(None, 1, None) == Address()
    assert resolve_address("auto", None, None) == Address("", 0, -1)  # a TPU pod knows by itself
    for flags, message in (
        (("a:1", 2, None), "--process_id=None: .* needs all three"),
        (("a:1", 2, 2), "count from 0"),
        (("a", 2, 0), "must be HOST:PORT"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve_address(*flags)


def test_only_the_failure_of_a_collective_is_a_lost_peer():
    pod = Cluster(1, (0, 1))
    lost = "process 1 of 2 lost another.*run the same command again"
    with pytest.raises(PeerError, match=lost), peer_errors(pod):
        raise ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer")
    with pytest.raises(ValueError, match="of ours"), peer_errors(pod):
        raise ValueError("a mistake of ours")
