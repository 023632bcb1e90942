# SPDX-License-Identifier: Apache-2.0
"""The machines of a cluster, as they come and go.

What a process that died was on, Ray says late or not at all; that a machine is gone its own list
says. It knows no processes. Invariant: a coming and a going is one line each, told once.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_EVERY_S = 2.0


class Machines:
    """Watches Ray's list of machines.

    Args:
        list_nodes: `ray.nodes`.
        clock: seconds.
    """

    def __init__(
        self,
        list_nodes: Callable[[], Sequence[Mapping[str, Any]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._list_nodes = list_nodes
        self._clock = clock
        self._there = self._look()
        self._looked_at = clock()

    def changes(self) -> list[str]:
        """What came and what went since the last look, a line each; looks every few seconds."""
        now = self._clock()
        if now - self._looked_at < _EVERY_S:
            return []
        self._looked_at = now
        before, self._there = self._there, self._look()
        gone = [
            f"machine {name} is gone" for node, name in before.items() if node not in self._there
        ]
        come = [
            f"machine {name} has come" for node, name in self._there.items() if node not in before
        ]
        return gone + come

    def _look(self) -> dict[str, str]:
        """Machines that are alive, and their names as the report has them."""
        return {
            str(node["NodeID"]): machine_name(node["NodeManagerHostname"], node["NodeID"])
            for node in self._list_nodes()
            if node["Alive"]
        }


def machine_name(hostname: str, node: str) -> str:
    """Host and the beginning of Ray's number: one host can be several machines of Ray's."""
    return f"{hostname}/{node[:6]}"
