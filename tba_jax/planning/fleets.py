# SPDX-License-Identifier: Apache-2.0
"""Placement of a fleet: the whole slice trains, and searchers run on similar devices elsewhere.

The slice belongs to the trainer: one host, or the hosts of a trainer group (`fleet.trainer_hosts`).
Searchers may run on any devices; the plan assumes chips of the trainer's kind.

Invariant: processes with these devices accept the placement chosen here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from tba_jax.config.devices import asked, validate_devices
from tba_jax.config.schema import Config, replace
from tba_jax.devices.config import parse_resources
from tba_jax.devices.placement import PlacementError, hosts_of
from tba_jax.devices.platform import platform_of
from tba_jax.devices.sharding import Placement
from tba_jax.models.transformer import TransformerConfig
from tba_jax.planning import estimates, fitting
from tba_jax.run.shared import place_run


def place_fleet(config: Config, devices: Sequence[Any]) -> Placement:
    """Return the trainer's mesh as configured, and the mesh of one searcher.

    Args:
        devices: devices of all processes of the trainer.

    Raises:
        PlacementError: the slice has another number of hosts, or a searcher needs more than one
            host.
        ConfigError: the mesh does not fit the devices.
    """
    hosts, wanted = hosts_of(devices), config.fleet.trainer_hosts
    if wanted != len(hosts):
        raise PlacementError(
            f"config.fleet.trainer_hosts = {wanted}: the trainer of a fleet uses all hosts of "
            f"its slice, and this slice has {len(hosts)}; set "
            f"--config.fleet.trainer_hosts={len(hosts)}, or plan for the trainer's hosts alone"
        )
    validate_devices(config, len(devices) // len(hosts), len(hosts))
    found = place_run(config, devices, hosts[0])
    # Plan a searcher on the last host: libtpu refuses groups that hold the first chip of a slice.
    own = [d for d in devices if d.process_index == hosts[-1]]
    each = asked(config).searcher_devices
    if each > len(own):
        raise PlacementError(
            f"config.search.num_devices = {each}: the plan assumes that a searcher runs on one "
            f"host with {len(own)} devices, like a host of the trainer; set "
            f"--config.search.num_devices={len(own)} or less"
        )
    return found._replace(searcher_meshes=(Mesh(np.array(own[:each]), ("model",)),))


def choose_fleet(
    config: Config,
    model_config: TransformerConfig,
    devices: Sequence[Any],
    hbm_bytes: float,
    judge_bytes: Callable[[int], float],
) -> tuple[Config, list[str]]:
    """Return (config with meshes and resources for a fleet, sentences about changes).

    A searcher process takes a whole host like the trainer's, or the accelerators that
    `fleet.searcher` names.

    Raises:
        PlacementError: no mesh of all these devices divides batch and model.
    """
    hosts, platform = len(hosts_of(devices)), platform_of(devices[0])
    per_host = len(devices) // hosts
    notes = [
        "the whole slice trains (fleet.trainer_hosts); searchers run on other devices, and the "
        "plan assumes devices like these"
    ]
    # A trainer group uses all devices of its processes.
    sizes = [len(devices)] if hosts > 1 else list(range(per_host, 0, -1))
    config, changes = fitting.with_divisible_prompts(config, model_config, sizes, 0)
    notes += changes
    size = next(n for n in sizes if fitting.mesh_exists(n, config, model_config, 0))
    mesh = fitting.mesh_shape(size, config, model_config, 0)
    kind = {"tpu": "TPU", "cuda": "GPU"}.get(platform, "CPU")
    asked_for = int((parse_resources(config.fleet.searcher) or {}).get(kind, 0))
    pool = asked_for if kind != "CPU" and 0 < asked_for <= per_host else per_host
    searching = estimates.searcher_bytes(config, model_config, devices, judge_bytes)
    group = fitting.group_size(model_config, pool, per_host, hbm_bytes, devices, searching)
    searchers = max(1, pool // group)
    fields: dict[str, Any] = {
        **fitting.mesh_fields(mesh),
        "fleet.trainer_hosts": hosts,
        "num_searchers": searchers,
        "search.num_devices": group,
        "fleet.max_searchers": -(-config.fleet.max_searchers // searchers) * searchers,
    }
    if kind != "CPU":
        fields |= {"fleet.trainer": f"{kind}={per_host}", "fleet.searcher": f"{kind}={pool}"}
    return replace(config, fields), notes
