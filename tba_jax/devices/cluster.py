# SPDX-License-Identifier: Apache-2.0
"""Cluster: the processes of one run under `jax.distributed`, and small values that they exchange.

A pod runs the same program on every host. This module starts `jax.distributed` from flags, from the
environment or from what a TPU pod knows about itself. Values are exchanged by collectives before
searchers start and after they have stopped; meanwhile processes send messages (room `remote`).

Invariant: a process whose peers are gone ends, and says what to do.
"""

import contextlib
import dataclasses
import ipaddress
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from tba_jax.devices.slices import accepts_one_of_each_host

_ENVIRONMENT = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "num_processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}
CONTINUE = (
    "The newest checkpoint is intact: run the same command again on every host to continue from it"
)


class PeerError(RuntimeError):
    """Another process of the run is gone; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class Address:
    """Where this process finds the others.

    Attributes:
        coordinator: HOST:PORT of process 0; "" where the platform knows (a TPU pod).
        num_processes: processes of the run, 0 where the platform knows.
        process_id: this one, -1 where the platform knows.
    """

    coordinator: str = ""
    num_processes: int = 0
    process_id: int = -1


def resolve_address(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    environment: Mapping[str, str],
) -> Address:
    """The address from flags, and from the environment where flags are not given.

    Raises:
        ValueError: only a part of it is given, or it makes no sense.
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
                raise ValueError(f"{variable} = {text!r}: wanted a number")
            given[name] = text if name == "coordinator" else int(text)
    if given["num_processes"] == 1:
        return Address(given["coordinator"] or "", 1, given["process_id"] or 0)
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return Address()
    if missing:
        raise ValueError(
            f"a run over several processes needs --coordinator, --num_processes and --process_id; "
            f"missing: {', '.join(f'--{name} (or {_ENVIRONMENT[name]})' for name in missing)}. "
            "On a TPU pod give none of them"
        )
    address = Address(**given)
    if not 0 <= address.process_id < address.num_processes:
        raise ValueError(
            f"--process_id={address.process_id} with --num_processes={address.num_processes}: "
            "process ids count from 0"
        )
    if ":" not in address.coordinator:
        raise ValueError(
            f"--coordinator={address.coordinator}: wanted HOST:PORT of the host of process 0"
        )
    return address


class Cluster:
    """The processes of a run that work in lock-step, of which there may be only one.

    Args:
        process_id: this process among them.
        num_processes: how many there are.
        members: their numbers in `jax.distributed`; none: those of all, in order.
        is_primary: as below; None: process 0 is.
        coordinator: HOST:PORT of process 0 of the job; "" where the platform knows.

    Attributes:
        process_id, num_processes, members, coordinator: as given.
        is_primary: whether this process writes what exists once: metrics, progress, report.
    """

    def __init__(
        self,
        process_id: int = 0,
        num_processes: int = 1,
        members: Sequence[int] = (),
        is_primary: bool | None = None,
        coordinator: str = "",
    ) -> None:
        self.process_id = process_id
        self.num_processes = num_processes
        self.members = tuple(members) or tuple(range(num_processes))
        self.is_primary = process_id == 0 if is_primary is None else is_primary
        self.coordinator = coordinator
        self._replicate: Callable[[Any], Any] | None = None
        self._rows: Any = None

    @property
    def number(self) -> int:
        """This process's number in `jax.distributed`."""
        return self.members[self.process_id]

    def among(self, members: Sequence[int]) -> "Cluster":
        """Those of these processes, this one included, of which the first is primary.

        Args:
            members: numbers in `jax.distributed`.
        """
        return Cluster(members.index(self.number), len(members), members)

    def alone(self) -> "Cluster":
        """This process by itself, in a run that another one is primary of."""
        return Cluster(0, 1, [self.number], is_primary=False)

    def gather(self, values: Int[np.ndarray, " n"]) -> Int[np.ndarray, "h n"]:
        """Every member's values, in order of process ids.

        Args:
            values: int32, as many in every process.
        """
        row = np.asarray(values, np.int32)[None]
        if self.num_processes == 1:
            return row
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        if self._replicate is None:
            mesh = Mesh(np.array(self._meeting_devices()), ("process", "device"))
            self._rows = NamedSharding(mesh, PartitionSpec("process"))
            self._replicate = jax.jit(
                lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec())
            )
        rows = jax.make_array_from_process_local_data(self._rows, row)
        return np.asarray(self._replicate(rows))

    def _meeting_devices(self) -> list[list[Any]]:
        """Of each member: one device where the chips allow that, else all."""
        import jax

        devices = [jax.local_devices(process_index=i) for i in self.members]
        if accepts_one_of_each_host(devices[0]):
            return [own[:1] for own in devices]
        return devices

    def gather_json(self, value: Any) -> list[Any]:
        """Every process's JSON-compatible value."""
        if self.num_processes == 1:
            return [value]
        data = json.dumps(value).encode()
        sizes = self.gather(np.array([len(data)], np.int32))[:, 0]
        # A power of two, so that few shapes are compiled.
        width = 1 << max(6, int(sizes.max() - 1).bit_length())
        rows = self.gather(np.frombuffer(data.ljust(width, b" "), np.int32))
        return [json.loads(row.tobytes()) for row in rows]

    def broadcast_json(self, value: Any) -> Any:
        """Process 0's JSON-compatible value; what the others give is ignored."""
        return self.gather_json(value if self.is_primary else None)[0]

    def close(self) -> None:
        """Leave together: waits for the other processes to end, too."""
        if self.num_processes > 1:
            import jax

            jax.distributed.shutdown()


def start(address: Address, *, num_cpu_devices: int, heartbeat_s: int, shutdown_s: int) -> Cluster:
    """Join the other processes; before the first use of a device.

    Args:
        address: from `resolve_address`.
        num_cpu_devices: devices that each process's CPU backend has.
        heartbeat_s: a process that is silent for this long is taken for dead, and all end.
        shutdown_s: time that the last process may take longer than the first at the end.

    Raises:
        ValueError: nobody says where the other processes are.
    """
    if address.num_processes == 1:
        return Cluster()
    import jax

    # Concerns the CPU backend alone, as the number of its devices.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # SIGTERM of any process comes to our own handler, and reaches the others as a message.
    jax.config.update("jax_enable_preemption_service", False)
    if num_cpu_devices > 1:
        jax.config.update("jax_num_cpu_devices", num_cpu_devices)
    known = address.num_processes > 0
    try:
        jax.distributed.initialize(
            coordinator_address=address.coordinator or None,
            num_processes=address.num_processes if known else None,
            process_id=address.process_id if known else None,
            cluster_detection_method="deactivate" if known else None,
            coordinator_bind_address=bind_address(address.coordinator),
            heartbeat_timeout_seconds=heartbeat_s,
            shutdown_timeout_seconds=shutdown_s,
        )
    except ValueError as error:
        raise ValueError(
            f"config.placement=pod: the other processes are not known ({error}). Give "
            "--coordinator=HOST:PORT --num_processes=N --process_id=I, or start them with "
            "python -m tba_jax.launch_processes; --num_processes=1 is a pod of one host"
        ) from error
    except RuntimeError as error:  # jax's own error for every failure of the service is one
        raise PeerError(
            f"joining the other processes at {address.coordinator or 'the pod'} failed: "
            f"{_brief(error)}. Start the same command on every host"
        ) from error
    return Cluster(jax.process_index(), jax.process_count(), coordinator=address.coordinator)


def bind_address(coordinator: str) -> str | None:
    """Return the address on which process 0 listens; None: every interface, the default of JAX.

    Processes of one machine announce a loopback address, which nothing outside can reach.
    """
    host = coordinator.rpartition(":")[0].strip("[]")
    with contextlib.suppress(ValueError):  # a name
        if ipaddress.ip_address(host).is_loopback:
            return coordinator
    return coordinator if host == "localhost" else None


@contextlib.contextmanager
def peer_errors(cluster: Cluster) -> Iterator[None]:
    """Turn the failure of a collective operation into a PeerError that says what to do.

    Raises:
        PeerError: the transport lost a process.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if cluster.num_processes == 1 or not _is_transport(error):
            raise
        raise PeerError(
            f"process {cluster.process_id} of {cluster.num_processes} lost another process: "
            f"{_brief(error)}. That process's output has the cause. {CONTINUE}"
        ) from error


def _is_transport(error: BaseException) -> bool:
    text = str(error)
    return any(word in text for word in ("Gloo", "NCCL", "coordination service", "UNAVAILABLE"))


def _brief(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


class LastWords:
    """Says what to do when this process ends without being able to say it itself.

    When a peer dies, `jax.distributed` aborts the process from native code: no exception, no
    handler. So a shell waits beside it on a pipe; when the pipe closes without the word that all
    is said, it writes to the same standard error.

    Args:
        cluster: which process this is.
    """

    def __init__(self, cluster: Cluster) -> None:
        words = (
            f"error: process {cluster.process_id} of {cluster.num_processes} was ended from "
            "outside, or by JAX because it lost another process (its last lines above say which). "
            f"{CONTINUE}"
        )
        self._shell: subprocess.Popen[bytes] | None = None
        if cluster.num_processes > 1:
            self._shell = subprocess.Popen(
                ["sh", "-c", 'trap "" INT TERM; read -r word || printf "%s\\n" "$0" >&2', words],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=sys.stderr if _has_descriptor(sys.stderr) else None,
            )

    def unsay(self) -> None:
        """This process has said what there is to say, or ends well."""
        if self._shell is None:
            return
        assert self._shell.stdin is not None
        with contextlib.suppress(OSError):  # the shell was killed: nobody to tell
            self._shell.stdin.write(b"said\n")
            self._shell.stdin.close()
        self._shell.wait(5.0)
        self._shell = None


def _has_descriptor(stream: Any) -> bool:
    try:
        return stream.fileno() >= 0
    except (OSError, ValueError, AttributeError):
        return False
