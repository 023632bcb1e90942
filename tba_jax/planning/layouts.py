# SPDX-License-Identifier: Apache-2.0
"""Choice of the devices of a slice that train and of those that search.

`divide` builds the meshes of a given placement, and refuses placements that compilers or runs of
several hosts refuse. This module chooses a placement and returns it as config fields, so that a run
with these fields has the same placement. It compares estimated bytes, without compiling.

Invariant: `main` accepts the chosen placement on such devices.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tba_jax.config.resolved import asked
from tba_jax.config.rules import validate
from tba_jax.config.schema import Config, replace
from tba_jax.devices.placement import Division, PlacementError, divide, hosts_of, trainer_on
from tba_jax.devices.platform import platform_of
from tba_jax.models.transformer import TransformerConfig
from tba_jax.planning import estimates, sizes


def place(config: Config, devices: Sequence[Any]) -> Division:
    """Return the placement that a config sets on these devices, as the last host sees it.

    Raises:
        PlacementError: the placement does not fit the devices.
    """
    by_host = [divide(config.placement, devices, asked(config), host) for host in hosts_of(devices)]
    searching = [found for found in by_host if found.groups]
    if not searching:
        raise PlacementError(
            f"search.num_devices={config.search.num_devices}: a searcher does not fit on any "
            "host; set a smaller --config.search.num_devices"
        )
    # libtpu 0.0.52 refuses groups that hold the first chip of a slice, so plan for the last group.
    return searching[-1]


def choose(
    config: Config,
    model_config: TransformerConfig,
    devices: Sequence[Any],
    hbm_bytes: float,
    judge_bytes: Callable[[int], float] = lambda group_size: 0.0,
) -> tuple[Config, Division]:
    """Return the config with a placement for these devices, and that placement.

    One host gets `shared` if it has one device, and else `split`: half of the devices train. On
    several hosts half of the chips of each host train, if the chips allow it (v4 and v5p). Other
    divisions are tried if trainer or searchers do not fit. If no division has memory for both, all
    devices are shared.

    The fsdp axis of the trainer's mesh has as many devices as the rows of a batch permit; the other
    axis is tensor-parallel. Searcher groups are as small as weights and cache allow.

    Args:
        judge_bytes: group size -> memory of reward models on the first device of a searcher group.

    Raises:
        PlacementError: no mesh divides batch and model.
        ConfigError: a run on these devices would refuse the config.
    """
    hosts, platform = len(hosts_of(devices)), platform_of(devices[0])
    per_host = len(devices) // hosts
    options = sorted(_trainer_sizes(devices), key=lambda n: abs(n - len(devices) / 2))
    mode = "split" if len(devices) > 1 else "shared"
    config = replace(config, {"placement": mode})
    # If the slots for a round do not fit, fewer slots are chosen, but not far fewer.
    few = config.search.num_slots or -(-config.search.slots // 4)
    room = 1 - sizes.SHARE_FOR_PROGRAMS

    def of_searcher(config: Config) -> float:
        return estimates.searcher_bytes(config, model_config, devices[0], judge_bytes)

    @functools.cache
    def searching(group: int, slots: int) -> float:
        fields = {"search.num_devices": group, "search.num_slots": slots}
        return of_searcher(replace(config, fields))

    def holds(n: int) -> bool:
        groups = sizes.group_sizes(model_config, per_host - n // hosts, per_host, devices)
        has_searcher = any(searching(g, few) <= hbm_bytes * room for g in groups)
        return has_searcher and sizes.holds_trainer(
            n, config, model_config, hbm_bytes, hosts, platform
        )

    size = next(filter(holds, options), len(devices))
    shares_devices = size == len(devices)
    mesh = sizes.mesh_shape(size, config, model_config, hosts)
    pool = per_host if shares_devices else per_host - size // hosts
    free = hbm_bytes
    if shares_devices:
        free -= estimates.held_bytes(config, model_config) / size
    groups = sizes.group_sizes(model_config, pool, per_host, devices)
    if not groups:
        raise PlacementError(
            f"no group of up to {pool} devices divides a model of {model_config.num_heads} heads; "
            "set another --config.search.num_devices, or choose another slice"
        )
    # If no group fits, the verdict of the plan reports the missing memory.
    slots = config.search.num_slots
    group = next((g for g in groups if searching(g, slots) <= free * room), groups[-1])
    fields = {f"mesh.{axis}": n for axis, n in mesh._asdict().items()} | {
        "placement": "shared" if shares_devices else mode,
        "num_searchers": pool // group * hosts,
        "search.num_devices": group,
    }
    placed = replace(config, fields)
    found = sizes.choose(
        placed, model_config, mesh, devices, hbm_bytes, of_searcher, shares_devices=shares_devices
    )
    config = replace(placed, found)
    validate(config)
    return config, place(config, devices)


def _trainer_sizes(devices: Sequence[Any]) -> list[int]:
    """Return the possible numbers of trainer devices, equal on every host, that leave searchers."""
    sizes = range(1, len(devices))
    if len(hosts_of(devices)) == 1:
        return list(sizes)
    return [n for n in sizes if trainer_on("shared", devices, n) or trainer_on("split", devices, n)]
