# SPDX-License-Identifier: Apache-2.0
"""Machines that join and leave a cluster, and a cluster that stopped working."""

import pytest

from tba_jax.run.ray_cluster import GCS_TIMEOUT_S, Machines


def node(number, is_alive=True):
    return {"NodeID": f"{number:06d}abc", "NodeManagerHostname": f"h{number}", "Alive": is_alive}


class Cluster:
    """A list of nodes and a clock; node 1 is the driver's."""

    def __init__(self):
        self.nodes, self.now = [node(1), node(2)], 0.0
        self.machines = Machines(lambda: self.nodes, node(1)["NodeID"], lambda: self.now)
        self.machines.poll()


def test_a_machine_that_joins_or_leaves_is_one_line():
    cluster = Cluster()
    assert cluster.machines.changes() == []
    cluster.nodes[1] = node(2, is_alive=False)  # a dead one stays in Ray's list
    cluster.machines.poll()
    assert cluster.machines.changes() == ["machine h2/000002 has left the cluster"]
    cluster.nodes.append(node(3))
    for _ in range(2):
        cluster.machines.poll()
    assert cluster.machines.changes() == ["machine h3/000003 has joined the cluster"]
    assert cluster.machines.changes() == [] and cluster.machines.failure() == ""


def test_the_dead_node_of_the_driver_is_a_failure_of_the_cluster():
    cluster = Cluster()
    cluster.nodes[0] = node(1, is_alive=False)
    cluster.machines.poll()
    assert cluster.machines.failure() == "the Ray node of the driver (its raylet process) is dead"


@pytest.mark.parametrize("was_stopped", [True, False])
def test_a_control_service_that_does_not_answer_has_a_deadline(was_stopped):
    """Seconds in which the driver itself was stopped do not count."""
    cluster = Cluster()
    for _ in range(1 if was_stopped else 10):
        cluster.now += 4 * GCS_TIMEOUT_S if was_stopped else GCS_TIMEOUT_S / 8
        failure = cluster.machines.failure()
    assert failure == (
        "" if was_stopped else "Ray's control service (GCS) has not answered for 38 s"
    )
    cluster.machines.poll()
    assert cluster.machines.failure() == ""
