# SPDX-License-Identifier: Apache-2.0
"""Checks of the devices and hosts that a config requests."""

import dataclasses

from tba_jax.config.schema import Config
from tba_jax.devices.placement import MODES, Asked, MeshShape, check


def asked(config: Config) -> Asked:
    """Return the devices that a config requests."""
    mesh = MeshShape(**dataclasses.asdict(config.mesh))
    num_searchers = config.num_searchers
    if MODES[config.placement].has_remote_searchers:
        num_searchers = config.fleet.max_searchers
    return Asked(mesh, num_searchers, config.search.num_devices, config.batch.num_prompts)


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
    if takes_turns or MODES[config.placement].has_remote_searchers:
        return max(trainer, searcher)
    return trainer + searcher


def validate_devices(config: Config, num_devices: int, num_hosts: int = 1) -> None:
    """Check the settings that depend on the number of devices.

    Args:
        num_devices: devices of this process.
        num_hosts: processes of the run.
    """
    check(config.placement, asked(config), num_devices, num_hosts)
