# SPDX-License-Identifier: Apache-2.0
"""The first thing that a process of a run does: settings of jax, and joining the other processes.

Imports nothing heavy by itself. Invariant: what must precede the first use of a device does.
"""

import os
from typing import TYPE_CHECKING

from tba_jax.config.schema import Config
from tba_jax.devices.placement import MODES
from tba_jax.run.errors import UserError

if TYPE_CHECKING:
    from tba_jax.devices.cluster import Cluster


def start_cluster(
    config: Config,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> "Cluster":
    """Settings that must precede the first use of a device; joins the other processes of a pod."""

    from tba_jax.devices import cluster as clusters

    if MODES[config.placement].spans_hosts:
        address = clusters.resolve_address(coordinator, num_processes, process_id, os.environ)
        if address.num_processes != 1:
            return clusters.start(
                address,
                num_cpu_devices=config.num_cpu_devices,
                heartbeat_s=config.pod.heartbeat_s,
                shutdown_s=int(config.log.watchdog_s),
            )
    if config.num_cpu_devices > 1:
        _divide_cpu(config.num_cpu_devices)
    return clusters.Cluster()


def _divide_cpu(num_devices: int) -> None:
    """Have the CPU backend show several devices, at least, where jax runs already.

    Raises:
        UserError: it runs on fewer.
    """
    import jax

    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError as error:  # too late: what uses jax in this process came first
        found = jax.local_device_count()
        if jax.default_backend() == "cpu" and found < num_devices:
            raise UserError(
                f"config.num_cpu_devices = {num_devices}: jax runs in this process already, with "
                f"{found} CPU device(s). Restart it (the kernel of a notebook) and train before "
                f"anything else uses jax, or give num_cpu_devices={found}"
            ) from error
