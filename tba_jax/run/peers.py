# SPDX-License-Identifier: Apache-2.0
"""Processes of a run: joining, and the channels between the owner of the buffer and the others.

The first trainer process owns the replay buffer and runs a channel server. Its address and token
are exchanged once, when the processes join.
"""

import secrets
import socket
from collections.abc import Sequence

from tba_jax.config.resolved import cpu_devices
from tba_jax.config.schema import Config
from tba_jax.devices import cluster as clusters
from tba_jax.devices.cluster import Address, Cluster
from tba_jax.remote.channel import HEARTBEAT_S, Channel, ChannelServer, Endpoint, own_address
from tba_jax.remote.client import Client
from tba_jax.run.errors import UserError


def start_cluster(config: Config, address: Address | None = None) -> Cluster:
    """Set the options that JAX reads at its start, and join the job at `address`; None: no job.

    Raises:
        PeerError: the other processes do not join.
        UserError: JAX has started already, with too few devices.
    """
    address = address or Address()
    divide_cpu(cpu_devices(config, max(1, address.num_processes)))
    shutdown_s = int(config.log.watchdog_s)
    return clusters.start(address, heartbeat_s=HEARTBEAT_S, shutdown_s=shutdown_s)


def divide_cpu(num_devices: int) -> None:
    """Divide the CPU into devices, unless JAX_NUM_CPU_DEVICES does.

    Raises:
        UserError: JAX has started with fewer devices.
    """
    import jax

    if num_devices == 1 or jax.config.jax_num_cpu_devices > 0:
        return
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError as error:  # too late: what uses jax in this process came first
        found = jax.local_device_count()
        if jax.default_backend() == "cpu" and found < num_devices:
            raise UserError(
                f"the run divides the CPU into {num_devices} devices, and jax runs in this process "
                f"already, with {found} CPU device(s). Restart it (the kernel of a notebook) and "
                "train before anything else uses jax, or set --config.placement=shared"
            ) from error


def connect(
    config: Config, cluster: Cluster, trainers: Sequence[int], owner: ChannelServer | None = None
) -> ChannelServer | Client | None:
    """Connect the processes of a job with the owner of the buffer; every process calls this.

    Return the server in the owner's process, else a client; None if there is only one process.

    Args:
        trainers: numbers of the trainer processes; the first owns the buffer.
        owner: in the owner's process, a server that already listens; None: make one.
    """
    if cluster.num_processes > 1 and owner is None and cluster.number == trainers[0]:
        towards = cluster.coordinator.rpartition(":")[0]
        owner = ChannelServer(secrets.token_hex(16), own_address(towards))
    found = cluster.gather_json(None if owner is None else owner.endpoint)
    if owner is not None or cluster.num_processes == 1:
        return owner
    (endpoint,) = (Endpoint(*each) for each in found if each is not None)
    timeout_s = config.log.watchdog_s
    channel = Channel(lambda: endpoint, timeout_s=min(timeout_s, HEARTBEAT_S))
    host = f"process {cluster.number} on {socket.gethostname()}"
    return Client(channel, host, timeout_s=timeout_s)
