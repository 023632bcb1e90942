# SPDX-License-Identifier: Apache-2.0
"""Machines of a Ray cluster, and whether the cluster still works.

Ray reports late, or not at all, on which machine a process died. Its list of machines is current
within seconds. Invariant: each machine that joins or leaves is reported in one line, once.
"""

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tba_jax.devices.worker import StopFlag, Worker
from tba_jax.remote.searcher_table import BoundedClock

# Ray ends a process without an exception when the GCS has been away for 60 s.
GCS_TIMEOUT_S = 30.0
# A GCS of this machine that does not answer for this long and refuses connections has ended.
REFUSED_S = 6.0
_PERIOD_S = 2.0


class Machines:
    """Poll Ray's list of machines on a thread, because the call has no deadline.

    Args:
        list_nodes: `ray.nodes`.
        own: Ray's ID of the node that this process belongs to.
        clock: seconds.
        is_refused: whether the GCS has ended: it refuses connections and will not be restarted.
    """

    def __init__(
        self,
        list_nodes: Callable[[], Sequence[Mapping[str, Any]]],
        own: str,
        clock: Callable[[], float] = time.monotonic,
        is_refused: Callable[[], bool] = lambda: False,
    ) -> None:
        self._list_nodes = list_nodes
        self._own = own
        self._is_refused = is_refused
        self._time = BoundedClock(clock, max_jump_s=GCS_TIMEOUT_S / 4)
        self._lock = threading.Lock()
        self._alive: dict[str, str] | None = None  # name by node ID, of the newest list
        self._lines: list[str] = []
        self._answered_s = self._time()

    def start(self, stop: StopFlag) -> None:
        """Poll until `stop`; `stop.check()` raises what a call raised."""
        Worker("machines", self.poll, stop, idle_s=_PERIOD_S).start()

    def poll(self) -> bool:
        """Get the list once."""
        alive = {
            str(node["NodeID"]): machine_name(node["NodeManagerHostname"], node["NodeID"])
            for node in self._list_nodes()
            if node["Alive"]
        }
        with self._lock:
            before = alive if self._alive is None else self._alive
            self._lines += [f"machine {before[i]} is gone" for i in before if i not in alive]
            self._lines += [f"machine {alive[i]} has come" for i in alive if i not in before]
            self._alive, self._answered_s = alive, self._time()
        return False

    def changes(self) -> list[str]:
        """Return a line for each machine that joined or left since the last call."""
        with self._lock:
            lines, self._lines = self._lines, []
            return lines

    def failure(self) -> str:
        """Return why this process cannot use the cluster any more; "" while it can."""
        with self._lock:
            silent_s = self._time() - self._answered_s
            is_dead = self._alive is not None and self._own not in self._alive
        if silent_s > GCS_TIMEOUT_S or (silent_s > REFUSED_S and self._is_refused()):
            return f"Ray's control service (GCS) has not answered for {silent_s:.0f} s"
        return "the Ray node of the driver (its raylet process) is dead" if is_dead else ""


def refuses_connections(address: str) -> bool:
    """Return whether no process listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=0.5).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass  # a host that is away for a moment refuses nothing
    return False


def machine_name(hostname: str, node: str) -> str:
    """Return the host and the start of Ray's node ID, as one host can have several nodes."""
    return f"{hostname}/{node[:6]}"
