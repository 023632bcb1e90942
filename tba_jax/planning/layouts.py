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
from tba_jax.config.resolved import writes_versions
from tba_jax.config.rules import validate
from tba_jax.config.schema import Config, flatten, replace
from tba_jax.devices.placement import (
    MODES,
    POD_LAYOUTS,
    WHOLE_HOSTS,
    MeshShape,
    PlacementError,
    arrange,
    hosts_of,
)
from tba_jax.devices.platform import platform_of
from tba_jax.devices.sharding import Placement
from tba_jax.devices.slices import left_to_search, on_whole_hosts
from tba_jax.models.transformer import TransformerConfig
from tba_jax.planning import estimates, fitting, fleets
from tba_jax.run.shared import place_run


class Choice(NamedTuple):
    """A placement of a run on a slice.

    Attributes:
        name: name of the layout.
        placement: meshes of the run; the searchers' meshes are those on the last host.
        num_groups: number of searchers on the whole slice.
        shares_devices: whether trainer and searchers share devices.
        fields: config fields that the choice changed, with their values.
        notes: sentences on changes beyond the placement.
    """

    name: str
    placement: Placement
    num_groups: int
    shares_devices: bool
    fields: dict[str, Any]
    notes: tuple[str, ...] = ()


def trainer_options(devices: Sequence[Any], *, whole_hosts: bool = False) -> list[int]:
    """Return the possible numbers of trainer devices, with devices left for searchers.

    Args:
        whole_hosts: whether the trainer has all devices of some hosts; otherwise it has the same
            number of devices on every host.
    """
    if len(hosts_of(devices)) == 1:
        return list(range(1, len(devices)))
    layouts = [WHOLE_HOSTS] if whole_hosts else [x for x in POD_LAYOUTS if not x.shares_devices]
    return [n for n in range(1, len(devices)) if any(x.accepts(devices, n) for x in layouts)]


def usable_options(
    config: Config, model_config: TransformerConfig, devices: Sequence[Any]
) -> list[int]:
    """Return the `trainer_options` for which a mesh divides batch and model.

    The list is empty if searchers run on other devices.
    """
    if MODES[config.placement].has_remote_searchers:
        return []
    apart = writes_versions(config)
    hosts = 0 if apart else len(hosts_of(devices))
    options = trainer_options(devices, whole_hosts=apart)
    return [n for n in options if fitting.mesh_exists(n, config, model_config, hosts)]


def place(config: Config, devices: Sequence[Any]) -> Choice:
    """Return the placement that a config sets, on these devices.

    Raises:
        PlacementError: the placement does not fit the devices.
    """
    hosts, mode = hosts_of(devices), MODES[config.placement]
    if mode.has_remote_searchers:
        placement = fleets.place_fleet(config, devices)
        return Choice(mode.name, placement, asked(config).num_searchers, False, {})
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
    layout = arrange(config.placement, devices, asked(config)).layout
    groups = {tuple(d.id for d in m.devices.flat) for p in searching for m in p.searcher_meshes}
    return Choice(layout.name, chosen, len(groups), layout.shares_devices, {})


def choose(
    config: Config,
    model_config: TransformerConfig,
    devices: Sequence[Any],
    hbm_bytes: float,
    judge_bytes: Callable[[int], float] = lambda group_size: 0.0,
    trainer_devices: float = 0.0,
) -> tuple[Config, Choice]:
    """Return the config with a placement for these devices, and that placement.

    The placements `fleet` (see `fleets`) and `whole_hosts` stay. Otherwise one host gets `shared`
    if it has one device, and else `split`, balanced by `estimates.trainer_share`. On several hosts
    the trainer gets that share of each host if the chips allow it (v4 and v5p). If no division has
    memory for trainer and searchers, both share all devices.

    The fsdp axis of the trainer's mesh has as many devices as the rows of a batch permit; the other
    axis is tensor-parallel. Searcher groups are as small as weights and cache allow. In a pod, a
    batch whose prompts no mesh divides gets more prompts, with a note in `notes`.

    Args:
        judge_bytes: group size -> memory of reward models on the first device of a searcher group;
            infinity if the group does not divide them.
        trainer_devices: approximate number of trainer devices for a placement in which some hosts
            train and the others search. 0: every host does both, or, if the config asks for whole
            hosts, half of them train.

    Raises:
        PlacementError: no mesh divides batch and model.
        ConfigError: a run on these devices would refuse the config.
    """
    if MODES[config.placement].has_remote_searchers:
        given = config
        config, notes = fleets.choose_fleet(config, model_config, devices, hbm_bytes, judge_bytes)
        mesh = asked(config).mesh
        config = replace(
            config, open_sizes(config, model_config, mesh, devices, hbm_bytes, judge_bytes, False)
        )
        return config, _placed(given, config, devices, notes)
    if config.placement == WHOLE_HOSTS.name and len(hosts_of(devices)) > 1:
        trainer_devices = trainer_devices or len(devices) / 2
    if trainer_devices:
        return _choose_whole_hosts(
            config, model_config, devices, hbm_bytes, judge_bytes, trainer_devices
        )
    return _choose_every_host(config, model_config, devices, hbm_bytes, judge_bytes)


def _choose_every_host(
    config: Config,
    model_config: TransformerConfig,
    devices: Sequence[Any],
    hbm_bytes: float,
    judge_bytes: Callable[[int], float],
) -> tuple[Config, Choice]:
    """Choose a placement in which every host trains and searches."""
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
    given, config, notes = config, replace(config, fields), []
    if hosts > 1:
        config, notes = fitting.with_divisible_prompts(
            config, model_config, [*sizes, len(devices)], hosts
        )
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
    return config, _placed(given, config, devices, notes)


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


def _choose_whole_hosts(
    config: Config,
    model_config: TransformerConfig,
    devices: Sequence[Any],
    hbm_bytes: float,
    judge_bytes: Callable[[int], float],
    wanted: float,
) -> tuple[Config, Choice]:
    """Choose a placement in which some whole hosts, with about `wanted` devices, train."""
    per_host = len(devices) // len(hosts_of(devices))
    sizes = trainer_options(devices, whole_hosts=True)
    given = config
    config, notes = fitting.with_divisible_prompts(config, model_config, sizes, 0)
    platform = platform_of(devices[0])
    holding = [
        n for n in sizes if fitting.holds_trainer(n, config, model_config, hbm_bytes, 0, platform)
    ]
    existing = [n for n in sizes if fitting.mesh_exists(n, config, model_config, 0)]
    # If no size holds the trainer, take the largest; the verdict reports the missing memory.
    size = min(holding, key=lambda n: abs(n - wanted)) if holding else max(existing)
    mesh = fitting.mesh_shape(size, config, model_config, 0)
    of_searcher = estimates.searcher_bytes(config, model_config, devices, judge_bytes)
    group = fitting.group_size(model_config, per_host, per_host, hbm_bytes, devices, of_searcher)
    searching = len(left_to_search(devices, on_whole_hosts(devices, size)))
    fields = {
        "placement": "whole_hosts",
        **fitting.mesh_fields(mesh),
        "num_searchers": per_host // group * searching,
        "search.num_devices": group,
    }
    config = replace(config, fields)
    config = replace(
        config, open_sizes(config, model_config, mesh, devices, hbm_bytes, judge_bytes, False)
    )
    idle = len(devices) - size - searching * per_host
    if idle:
        notes.append(
            f"{idle} chips of the first host are idle: above 16 chips of v5e, neither a trainer "
            "nor a searcher of several chips may use them"
        )
    return config, _placed(given, config, devices, notes)


def _placed(given: Config, config: Config, devices: Sequence[Any], notes: Sequence[str]) -> Choice:
    """Return the placement of a chosen config, with the fields that differ from `given`."""
    validate(config)
    before, after = flatten(given), flatten(config)
    changed = {name: x for name, x in after.items() if before[name] != x}
    return place(config, devices)._replace(fields=changed, notes=tuple(notes))
