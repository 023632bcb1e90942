# SPDX-License-Identifier: Apache-2.0
"""Devices that a config requests."""

import dataclasses

from tba_jax.config.schema import Config
from tba_jax.devices.placement import Asked, MeshShape


def asked(config: Config) -> Asked:
    """Return the devices that a config requests."""
    mesh = MeshShape(**dataclasses.asdict(config.mesh))
    num_searchers = config.num_searchers
    if config.placement == "fleet":
        num_searchers = config.fleet.max_searchers
    return Asked(mesh, num_searchers, config.search.num_devices)


def cpu_devices(config: Config, num_processes: int = 1) -> int:
    """Return the number of devices into which a process divides its CPU.

    A CPU device runs one program at a time, so a trainer and searchers that work concurrently have
    devices of their own.

    Args:
        num_processes: processes over which the trainer's mesh is divided.
    """
    trainer = -(-asked(config).mesh.size // num_processes)
    searcher = config.search.num_devices
    if config.placement == "split":
        return trainer + searcher * max(1, config.num_searchers)
    takes_turns = config.driver == "sync" or config.placement == "shared"
    if takes_turns or config.placement == "fleet":
        return max(trainer, searcher)
    return trainer + searcher
