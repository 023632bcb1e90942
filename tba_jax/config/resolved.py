# SPDX-License-Identifier: Apache-2.0
"""Values that follow from several settings: devices, and the values behind `auto`."""

import dataclasses
from typing import Literal

from tba_jax.config.schema import Config
from tba_jax.devices.placement import Asked, MeshShape
from tba_jax.flow.padding import SHORT


def writes_versions(config: Config) -> bool:
    """Return whether the trainer processes have no searchers and write weights to disk."""
    return config.placement in ("hosts", "fleet")


def shares_prompts(config: Config) -> bool:
    """Return whether a row has a prompt once before several responses to it.

    Short prompts, and the one-token prompts of episodes with a renderer, are repeated for each
    response, which saves the compilation of a program.
    """
    return config.task.max_prompt_tokens > SHORT and not config.task.renderer


def remat_of(config: Config) -> Literal["none", "dots", "layers"]:
    """Return what the backward pass recomputes; "auto" means "layers" until a choice is made."""
    return "layers" if config.model.remat == "auto" else config.model.remat


def dtypes_on(config: Config, platform: str) -> dict[str, str]:
    """Return model.compute_dtype for the platform of the devices, if the config leaves it open."""
    if config.model.compute_dtype != "auto":
        return {}
    return {"model.compute_dtype": "float32" if platform == "cpu" else "bfloat16"}


# Devices.


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
