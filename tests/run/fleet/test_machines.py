# SPDX-License-Identifier: Apache-2.0
"""Machines of a cluster that come and go are told once each."""

from tba_jax.run.fleet.machines import Machines


def node(number, is_alive=True):
    return {"NodeID": f"{number:06d}abc", "NodeManagerHostname": f"h{number}", "Alive": is_alive}


def test_a_coming_and_a_going_is_one_line_each():
    nodes, now = [node(1), node(2)], [0.0]
    machines = Machines(lambda: nodes, clock=lambda: now[0])
    nodes[1] = node(2, is_alive=False)  # a dead one stays in Ray's list
    assert machines.changes() == []  # not at every look of the driver
    now[0] = 3.0
    assert machines.changes() == ["machine h2/000002 is gone"]
    nodes.append(node(3))
    now[0] = 6.0
    assert machines.changes() == ["machine h3/000003 has come"]
    now[0] = 9.0
    assert machines.changes() == []
