# SPDX-License-Identifier: Apache-2.0
"""Cluster: the processes of one run under `jax.distributed`, and small values that they exchange.

A job runs the same program on every host. This module starts `jax.distributed` from flags, from
environment variables, or from the metadata of a TPU pod. Values are exchanged by collectives before
searchers start and after they stop; in between, processes send messages (room `remote`).

Invariant: when a process is lost, the others end with a message that says what to do.
"""

import contextlib
import ipaddress
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from tba_jax.devices.placement import accepts_one_of_each_host

_ENVIRONMENT = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "num_processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}
AUTO = "auto"
"""Value of --coordinator with which the platform, a TPU pod, provides the address."""
CONTINUE = (
    "The newest checkpoint is intact: run the same command again on every host to continue from it"
)


class PeerError(RuntimeError):
    """Another process of the run was lost; the message says what to do."""


class Address(NamedTuple):
    """Address of the coordinator of `jax.distributed`, and index of this process.

    Attributes:
        coordinator: HOST:PORT of process 0; "" if the platform provides it (a TPU pod).
        num_processes: processes of the run; 0 if the platform provides it.
        process_id: index of this process; -1 if the platform provides it.
    """

    coordinator: str = ""
    num_processes: int = 1
    process_id: int = 0


def resolve_address(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    environment: Mapping[str, str],
) -> Address:
    """Return the address from flags, or from environment variables where a flag is missing.

    Without any of them, the run has one process.

    Raises:
        ValueError: the address is incomplete or contradictory.
    """
    given: dict[str, Any] = {
        "coordinator": coordinator,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    for name, variable in _ENVIRONMENT.items():
        if given[name] is None and environment.get(variable):
            text = environment[variable]
            if name != "coordinator" and not text.isdigit():
                raise ValueError(f"{variable}={text!r}: must be a whole number. Correct it")
            given[name] = text if name == "coordinator" else int(text)
    if given["num_processes"] == 1:
        return Address(given["coordinator"] or "", 1, given["process_id"] or 0)
    if given["coordinator"] == AUTO:
        return Address("", 0, -1)
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return Address()
    if missing:
        raise ValueError(
            f"a run over several processes needs --coordinator, --num_processes and --process_id; "
            f"missing: {', '.join(f'--{name} (or {_ENVIRONMENT[name]})' for name in missing)}. "
            f"Give all three, or on a TPU pod --coordinator={AUTO}"
        )
    address = Address(**given)
    if not 0 <= address.process_id < address.num_processes:
        raise ValueError(
            f"--process_id={address.process_id} with --num_processes={address.num_processes}: "
            f"process IDs count from 0. Give --process_id from 0 to {address.num_processes - 1}"
        )
    if ":" not in address.coordinator:
        raise ValueError(
            f"--coordinator={address.coordinator}: must read HOST:PORT, the host of process 0. "
            "For example --coordinator=10.0.0.1:1234"
        )
    return address


class Cluster:
    """The processes of a run that work in lock-step; possibly a single process.

    Args:
        members: numbers of the processes in `jax.distributed`; (): all processes, in order.
        is_primary: as the attribute; None: True in process 0 only.
        coordinator: HOST:PORT of process 0 of the job; "" if the platform provides it.

    Attributes:
        process_id, num_processes, members, coordinator: values of the arguments.
        is_primary: whether this process writes the files of which a run has one: metrics, report.
    """

    def __init__(
        self,
        process_id: int = 0,
        num_processes: int = 1,
        members: Sequence[int] = (),
        is_primary: bool | None = None,
        coordinator: str = "",
    ) -> None:
        self.process_id, self.num_processes = process_id, num_processes
        self.members = tuple(members) or tuple(range(num_processes))
        self.is_primary = process_id == 0 if is_primary is None else is_primary
        self.coordinator = coordinator

    @property
    def number(self) -> int:
        """Number of this process in `jax.distributed`."""
        return self.members[self.process_id]

    def among(self, members: Sequence[int]) -> "Cluster":
        """Return the cluster of some processes, of which the first is primary.

        Args:
            members: numbers of the processes in `jax.distributed`, including this process.
        """
        return Cluster(members.index(self.number), len(members), members)

    def alone(self) -> "Cluster":
        """Return a cluster of this process alone, in which it is not primary."""
        return Cluster(0, 1, [self.number], is_primary=False)

    def _gather(self, row: Int[np.ndarray, " n"]) -> Int[np.ndarray, "h n"]:
        """Return every member's int32 values, the same number each, in order of process IDs."""
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        devices = [jax.local_devices(process_index=i) for i in self.members]
        if accepts_one_of_each_host(devices[0]):
            devices = [own[:1] for own in devices]
        mesh = Mesh(np.array(devices), ("process", "device"))
        rows = jax.make_array_from_process_local_data(
            NamedSharding(mesh, PartitionSpec("process")), np.asarray(row, np.int32)[None]
        )
        whole = NamedSharding(mesh, PartitionSpec())
        return np.asarray(jax.jit(lambda x: x, out_shardings=whole)(rows))

    def gather_json(self, value: Any) -> list[Any]:
        """Return every process's JSON-compatible value."""
        if self.num_processes == 1:
            return [value]
        data = json.dumps(value).encode()
        sizes = self._gather(np.array([len(data)]))[:, 0]
        # Pad to a power of two, so that few shapes are compiled.
        width = 1 << max(6, int(sizes.max() - 1).bit_length())
        rows = self._gather(np.frombuffer(data.ljust(width, b" "), np.int32))
        return [json.loads(row.tobytes()) for row in rows]

    def broadcast_json(self, value: Any) -> Any:
        """Return the JSON-compatible value of process 0; other processes' values are ignored."""
        return self.gather_json(value if self.is_primary else None)[0]

    def close(self) -> None:
        """Disconnect, and wait until the other processes disconnect, too."""
        if self.num_processes > 1:
            import jax

            jax.distributed.shutdown()


def start(address: Address, *, num_cpu_devices: int, heartbeat_s: int, shutdown_s: int) -> Cluster:
    """Connect to the other processes; call before the first use of a device.

    Args:
        heartbeat_s: heartbeat timeout; a process without heartbeats for this long ends the run.
        shutdown_s: maximum time from the first to the last process's disconnection.

    Raises:
        ValueError: the address of process 0 is not known. PeerError: the others do not join.
    """
    if address.num_processes == 1:
        return Cluster()
    import jax

    # This option and the number of devices concern the CPU backend only.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # SIGTERM goes to this project's handler, which informs the other processes by a message.
    jax.config.update("jax_enable_preemption_service", False)
    if num_cpu_devices > 1 and jax.config.jax_num_cpu_devices < 1:
        jax.config.update("jax_num_cpu_devices", num_cpu_devices)
    known = address.num_processes > 0
    # Processes of one machine use a loopback address, which other machines cannot reach.
    is_local = is_loopback(address.coordinator.rpartition(":")[0])
    try:
        jax.distributed.initialize(
            coordinator_address=address.coordinator or None,
            num_processes=address.num_processes if known else None,
            process_id=address.process_id if known else None,
            cluster_detection_method="deactivate" if known else None,
            coordinator_bind_address=address.coordinator if is_local else None,
            heartbeat_timeout_seconds=heartbeat_s,
            shutdown_timeout_seconds=shutdown_s,
        )
    except ValueError as error:
        raise ValueError(
            f"--coordinator={AUTO}: no address of the other processes ({error}). Give "
            "--coordinator=HOST:PORT --num_processes=N --process_id=I, or start the processes "
            "with python -m tba_jax.launch_processes"
        ) from error
    except RuntimeError as error:  # jax raises this type for every failure of the service
        raise PeerError(
            f"joining the other processes at {address.coordinator or 'the pod'} failed: "
            f"{_brief(error)}. Start the same command on every host"
        ) from error
    return Cluster(jax.process_index(), jax.process_count(), coordinator=address.coordinator)


def is_loopback(host: str) -> bool:
    """Return whether a host name or address reaches this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name
        return host == "localhost"


@contextlib.contextmanager
def peer_errors(cluster: Cluster) -> Iterator[None]:
    """Convert the failure of a collective operation to a PeerError with a remedy.

    Raises:
        PeerError: the transport lost the connection to a process.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        words = ("Gloo", "NCCL", "coordination service", "UNAVAILABLE")
        if cluster.num_processes == 1 or not any(word in str(error) for word in words):
            raise
        raise PeerError(
            f"process {cluster.process_id} of {cluster.num_processes} lost another process: "
            f"{_brief(error)}. The output of the lost process has the cause. {CONTINUE}"
        ) from error


def _brief(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


class FailureNotice:
    """Message that a shell prints if this process is killed.

    When a peer is lost, `jax.distributed` aborts the process from native code, without exception or
    handler. A shell therefore waits on a pipe; if the pipe closes before `withdraw`, the shell
    writes the notice to standard error.
    """

    def __init__(self, cluster: Cluster) -> None:
        notice = (
            f"error: process {cluster.process_id} of {cluster.num_processes} was killed, "
            "or aborted by JAX because it lost another process (the lines above say which). "
            f"{CONTINUE}"
        )
        self._shell: subprocess.Popen[bytes] | None = None
        if cluster.num_processes > 1:
            self._shell = subprocess.Popen(
                ["sh", "-c", 'trap "" INT TERM; read -r word || printf "%s\\n" "$0" >&2', notice],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=sys.stderr,
            )

    def withdraw(self) -> None:
        """Cancel the notice: this process ends normally or has printed its own error."""
        if self._shell is not None:
            with contextlib.suppress(OSError):  # the shell was killed
                self._shell.communicate(b"withdrawn\n", timeout=5.0)
            self._shell = None
