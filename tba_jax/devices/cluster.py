# SPDX-License-Identifier: Apache-2.0
"""Cluster: the processes of one run under `jax.distributed`, and small values that they exchange.

A job runs the same program on every host. Values pass through the key-value store of its
coordination service, before searchers start and after they stop; in between, processes send
messages (room `remote`). `jax.distributed` ends a process whose peer is lost.
"""

import collections
import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

AUTO = "auto"
"""Value of --coordinator with which the platform, a TPU pod, provides the address."""
CONTINUE = (
    "The newest checkpoint is intact: run the same command again on every host to continue from it"
)
_EXCHANGE_S = 3600
"""Longest wait for a value of another process, which may be reading its data or its model."""
_num_exchanges = collections.Counter[tuple[int, ...]]()  # by members, equal in all of them


class PeerError(RuntimeError):
    """Another process of the run was lost; the message says what to do."""


class Address(NamedTuple):
    """HOST:PORT of process 0, and index of this process; "", 0 and -1: a TPU pod provides them."""

    coordinator_address: str = ""
    num_processes: int = 1
    process_id: int = 0


def resolve_address(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> Address:
    """Return the address from the values of flags; a run without them has one process.

    Raises:
        ValueError: the address is incomplete or contradictory.
    """
    if num_processes == 1 or (coordinator, num_processes, process_id) == (None, None, None):
        return Address()
    if coordinator == AUTO:
        return Address("", 0, -1)
    match coordinator, num_processes, process_id:
        case str(towards), int(number), int(mine) if ":" in towards and 0 <= mine < number:
            return Address(towards, number, mine)
    raise ValueError(
        f"--coordinator={coordinator} --num_processes={num_processes} --process_id={process_id}: a "
        "run over several processes needs all three, as flags or as JAX_COORDINATOR_ADDRESS, "
        "JAX_NUM_PROCESSES and JAX_PROCESS_ID. The coordinator must be HOST:PORT of process 0, "
        "such as 10.0.0.1:1234, and process IDs count from 0. On a TPU pod, "
        f"--coordinator={AUTO} is enough"
    )


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of a run that work in lock-step; possibly a single process.

    Attributes:
        number: number of this process in `jax.distributed`.
        members: numbers of the processes of the cluster in `jax.distributed`.
        coordinator: HOST:PORT of process 0 of the job; "" if the platform provides it.
    """

    number: int = 0
    members: tuple[int, ...] = (0,)
    coordinator: str = ""

    @property
    def is_primary(self) -> bool:
        """Whether this process writes the files of which a run has one: metrics, report."""
        return self.number == self.members[0]

    @property
    def process_id(self) -> int:
        """Index of this process in the cluster."""
        return self.members.index(self.number)

    @property
    def num_processes(self) -> int:
        """Number of processes of the cluster."""
        return len(self.members)

    def among(self, members: Sequence[int]) -> "Cluster":
        """Return the cluster of some processes, including this one; the first is primary."""
        return dataclasses.replace(self, members=tuple(members))

    def gather_json(self, value: Any) -> list[Any]:
        """Return the JSON-compatible value of every process, by process ID; all call this.

        Raises:
            PeerError: another process gave no value for an hour.
        """
        if self.num_processes == 1:
            return [value]
        from jax._src.distributed import global_state  # Orbax's barriers use the same client

        store = global_state.client
        assert store is not None, "a cluster of several processes is connected"
        _num_exchanges[self.members] += 1
        key = f"tba_jax/{self.members}/{_num_exchanges[self.members]}"
        with peer_errors(self):
            store.key_value_set(f"{key}/{self.number}", json.dumps(value))
            keys = [f"{key}/{number}" for number in self.members]
            return [json.loads(store.blocking_key_value_get(x, _EXCHANGE_S * 1000)) for x in keys]

    def broadcast_json(self, value: Any) -> Any:
        """Return the JSON-compatible value of process 0; other processes' values are ignored."""
        return self.gather_json(value if self.process_id == 0 else None)[0]

    def close(self) -> None:
        """Disconnect, and wait until the other processes disconnect, too."""
        if self.num_processes > 1:
            import jax

            jax.distributed.shutdown()


def start(address: Address, *, heartbeat_s: int, shutdown_s: int, join_s: float = 300.0) -> Cluster:
    """Connect to the other processes; call before the first use of a device.

    Args:
        join_s: longest wait for process 0.
        heartbeat_s: heartbeat timeout; a process without heartbeats for this long ends the run.
        shutdown_s: maximum time from the first to the last process's disconnection.

    Raises:
        PeerError: the address of process 0 is not known, or the others do not join.
    """
    if address.num_processes == 1:
        return Cluster()
    import jax

    towards = address.coordinator_address
    who = dict[str, Any](heartbeat_timeout_seconds=heartbeat_s, shutdown_timeout_seconds=shutdown_s)
    if towards:  # else the platform provides this
        who |= {**address._asdict(), "cluster_detection_method": "deactivate"}
    # Processes of one machine use a loopback address, which other machines cannot reach.
    if towards.startswith(("127.", "localhost:", "[::1]:")):
        who |= {"coordinator_bind_address": towards}
    (host, _, port), end_s = towards.rpartition(":"), time.monotonic() + join_s
    _num_exchanges.clear()
    try:
        # JAX would end the process: by a segmentation fault where the port of process 0 is taken,
        # and without an error of Python where nothing listens there.
        if address.process_id == 0:
            socket.create_server(("", int(port))).close()
        while address.process_id > 0:
            try:
                socket.create_connection((host.strip("[]"), int(port)), 5.0).close()
                break
            except OSError:
                if time.monotonic() > end_s:
                    raise
                time.sleep(0.5)
        # SIGTERM goes to this project's handler, which informs the other processes by a message.
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(**who)
    except (OSError, RuntimeError, ValueError) as error:
        raise PeerError(
            f"joining the other processes at {towards or 'the pod'} failed: "
            f"{str(error)[:300]}. Start the same command on every host, with --coordinator="
            "HOST:PORT of process 0, where the port is free and open to the others"
        ) from error
    return Cluster(jax.process_index(), tuple(range(jax.process_count())), towards)


@contextlib.contextmanager
def peer_errors(cluster: Cluster) -> Iterator[None]:
    """Convert a failure of the connection between processes to a PeerError with a remedy."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        words = ("Gloo", "NCCL", "coordination service", "UNAVAILABLE", "DEADLINE_EXCEEDED")
        if cluster.num_processes == 1 or not any(word in str(error) for word in words):
            raise
        raise PeerError(
            f"process {cluster.process_id} of {cluster.num_processes} lost another process: "
            f"{str(error)[:300]}. The output of the lost process has the cause. {CONTINUE}"
        ) from error
