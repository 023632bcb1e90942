# SPDX-License-Identifier: Apache-2.0
"""Choice of the devices of a slice that train and of those that search.

`place_run` builds the meshes of a given placement, and refuses placements that compilers or runs of
several hosts refuse. This module chooses a placement and returns it as config fields, so that a run
with these fields has the same placement. It compares estimated bytes, without compiling.

Invariant: `main` accepts the chosen placement on such devices.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tba_jax.config.devices import asked, validate_devices
from tba_jax.config.rules import validate
from tba_jax.config.schema import Config, flatten, replace
from tba_jax.devices.placement import (
    MODES,
    POD_LAYOUTS,
    MeshShape,
    PlacementError,
    divide,
    on_hosts,
)
from tba_jax.devices.platform import platform_of
from tba_jax.devices.sharding import Placement
from tba_jax.devices.slices import hosts_of
from tba_jax.models.transformer import TransformerConfig
from tba_jax.planning import estimates, fitting
from tba_jax.run.shared import place_run


class Choice(NamedTuple):
    """A placement of a run on a slice.

    Attributes:
        name: name of the layout.
        placement: meshes of the run; the searchers' meshes are those on the last host.
        num_groups: number of searchers on the whole slice.
        shares_devices: whether trainer and searchers share devices.
        fields: config fields that the choice changed, with their values.
    """

    name: str
    placement: Placement
    num_groups: int
    shares_devices: bool
    fields: dict[str, Any]


def trainer_options(devices: Sequence[Any]) -> list[int]:
    """Return the possible numbers of trainer devices, equal on every host, that leave searchers."""
    if len(hosts_of(devices)) == 1:
        return list(range(1, len(devices)))
    # With fewer devices than all of them the trainer shares none.
    sizes = range(1, len(devices))
    return [n for n in sizes if any(on_hosts(x, devices, n) for x in POD_LAYOUTS)]


def place(config: Config, devices: Sequence[Any]) -> Choice:
    """Return the placement that a config sets, on these devices.

    Raises:
        PlacementError: the placement does not fit the devices.
    """
    hosts, mode = hosts_of(devices), MODES[config.placement]
    if len(hosts) > 1 and not mode.spans_hosts:
        raise PlacementError(
            f"config.placement = {config.placement!r} is for the devices of one host, and this "
            f"slice has {len(hosts)} hosts; set --config.placement=pod"
        )
    validate_devices(config, len(devices) // len(hosts), len(hosts))
    by_host = [place_run(config, devices, process) for process in hosts]
    searching = [p for p in by_host if p.searcher_meshes]
    if not searching:
        raise PlacementError(
            f"search.num_devices={config.search.num_devices}: a searcher does not fit on any "
            "host; set a smaller --config.search.num_devices"
        )
    # libtpu 0.0.52 refuses groups that hold the first chip of a slice, so plan for the last group.
    chosen = searching[-1]
    found = divide(config.placement, devices, asked(config))
    groups = {tuple(d.id for d in m.devices.flat) for p in searching for m in p.searcher_meshes}
    return Choice(found.layout, chosen, len(groups), found.shares_devices, {})


def choose(
    config: Config,
    model_config: TransformerConfig,
    devices: Sequence[Any],
    hbm_bytes: float,
    judge_bytes: Callable[[int], float] = lambda group_size: 0.0,
) -> tuple[Config, Choice]:
    """Return the config with a placement for these devices, and that placement.

    One host gets `shared` if it has one device, and else `split`, balanced by
    `estimates.trainer_share`. On several hosts the trainer gets that share of each host if the
    chips allow it (v4 and v5p). If no division has memory for trainer and searchers, both share all
    devices.

    The fsdp axis of the trainer's mesh has as many devices as the rows of a batch permit; the other
    axis is tensor-parallel. Searcher groups are as small as weights and cache allow.

    Args:
        judge_bytes: group size -> memory of reward models on the first device of a searcher group.

    Raises:
        PlacementError: no mesh divides batch and model.
        ConfigError: a run on these devices would refuse the config.
    """
    hosts = len(hosts_of(devices))
    per_host = len(devices) // hosts
    share, platform = 0.5, platform_of(devices[0])  # CPU devices share their cores
    if platform != "cpu":
        share = estimates.trainer_share(config, model_config)
    wanted = share * len(devices)
    sizes = sorted(trainer_options(devices), key=lambda n: abs(n - wanted))
    fields: dict[str, Any] = {
        "placement": "pod" if hosts > 1 else "split" if len(devices) > 1 else "shared"
    }
    given, config = config, replace(config, fields)
    searching = estimates.searcher_bytes(config, model_config, devices, judge_bytes)
    # If the slots for a round do not fit, fewer slots are chosen, but not far fewer.
    few = -(-estimates.num_slots(config) // 4)
    least = replace(config, {"search.num_slots": config.search.num_slots or few})
    least_searching = estimates.searcher_bytes(least, model_config, devices, judge_bytes)

    def holds(n: int) -> bool:
        pool = per_host - n // hosts
        room = hbm_bytes * (1 - fitting.SHARE_FOR_PROGRAMS)
        groups = fitting.group_sizes(model_config, pool, per_host, devices)
        return any(least_searching(g) <= room for g in groups) and fitting.holds_trainer(
            n, config, model_config, hbm_bytes, hosts, platform
        )

    size = next(filter(holds, sizes), len(devices))
    shares_devices = size == len(devices)
    mesh = fitting.mesh_shape(size, config, model_config, hosts)
    pool = per_host if shares_devices else per_host - size // hosts
    held = estimates.held_bytes(config, model_config) / size
    free = hbm_bytes - held if shares_devices else hbm_bytes
    group = fitting.group_size(model_config, pool, per_host, free, devices, searching)
    fields |= {
        "placement": "pod" if hosts > 1 else "shared" if shares_devices else "split",
        **fitting.mesh_fields(mesh),
        "num_searchers": pool // group * hosts,
        "search.num_devices": group,
    }
    config = replace(config, fields)
    sizes = open_sizes(config, model_config, mesh, devices, hbm_bytes, judge_bytes, shares_devices)
    config = replace(config, sizes)
    validate(config)
    return config, place(config, devices)._replace(fields=changes(given, config))


def open_sizes(
    config: Config,
    model_config: TransformerConfig,
    mesh: MeshShape,
    devices: Sequence[Any],
    hbm_bytes: float,
    judge_bytes: Callable[[int], float],
    shares_devices: bool,
) -> dict[str, Any]:
    """Return the sizes that a config leaves open, for its final placement (`fitting.sizes`)."""

    def of_searcher(config: Config) -> float:
        found = estimates.searcher_bytes(config, model_config, devices, judge_bytes)
        return found(config.search.num_devices)

    return fitting.sizes(
        config,
        model_config,
        mesh,
        devices,
        hbm_bytes,
        of_searcher,
        shares_devices=shares_devices,
    )


def changes(given: Config, config: Config) -> dict[str, Any]:
    """Return the fields of a config that differ from those of another."""
    before, after = flatten(given), flatten(config)
    return {name: x for name, x in after.items() if before[name] != x}
