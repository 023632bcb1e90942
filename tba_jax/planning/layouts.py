# SPDX-License-Identifier: Apache-2.0
"""Which devices of a slice train and which search, where the config does not say it for this slice.

`place_run` makes meshes of a decision and refuses what compilers or a run of several hosts
refuse; this module makes the decision and says it as config fields, so that a run given those
fields is placed the same way. It weighs bytes by hand, without compiling. The invariant it owns:
what it chooses, `main` accepts on such devices.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tba_jax.config.devices import asked, validate_devices
from tba_jax.config.resolved import has_trainer_group, writes_versions
from tba_jax.config.rules import validate
from tba_jax.config.schema import Config, flatten, replace
from tba_jax.devices.placement import (
    MODES,
    POD_LAYOUTS,
    WHOLE_HOSTS,
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
        name: of its layout.
        placement: meshes; searchers are those of the last host.
        num_groups: searcher groups on the whole slice.
        shares_devices: trainer and searchers share devices.
        fields: config fields that were changed for it, with their values.
        notes: changes that are more than a placement, a sentence each.
    """

    name: str
    placement: Placement
    num_groups: int
    shares_devices: bool
    fields: dict[str, Any]
    notes: tuple[str, ...] = ()


def trainer_options(devices: Sequence[Any], *, whole_hosts: bool = False) -> list[int]:
    """Numbers of trainer devices that leave some for searchers, and that such a run accepts.

    Args:
        devices: of the slice.
        whole_hosts: the trainer has all devices of some hosts; else as many of every host.
    """
    if len(hosts_of(devices)) == 1:
        return list(range(1, len(devices)))
    layouts = [WHOLE_HOSTS] if whole_hosts else [x for x in POD_LAYOUTS if not x.shares_devices]
    return [n for n in range(1, len(devices)) if any(x.accepts(devices, n) for x in layouts)]


def usable_options(
    config: Config, model_config: TransformerConfig, devices: Sequence[Any]
) -> list[int]:
    """Those of `trainer_options` over which a mesh divides this batch and this model.

    None where searchers are elsewhere.
    """
    if MODES[config.placement].searches_elsewhere:
        return []
    apart = writes_versions(config)
    hosts = 0 if apart else len(hosts_of(devices))
    options = trainer_options(devices, whole_hosts=apart)
    return [n for n in options if fitting.mesh_exists(n, config, model_config, hosts)]


def place(config: Config, devices: Sequence[Any]) -> Choice:
    """Return the config's own placement on these devices.

    Raises:
        PlacementError: it does not suit them.
    """
    hosts, mode = hosts_of(devices), MODES[config.placement]
    if mode.searches_elsewhere:
        placement = fleets.place_fleet(config, devices)
        # The process of a trainer without peers evaluates, on the trainer's devices.
        turns = not has_trainer_group(config)
        return Choice(mode.name, placement, asked(config).num_searchers, turns, {})
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
            f"searchers of {config.search.num_devices} devices do not fit on any host; lower "
            "search.num_devices"
        )
    # libtpu 0.0.52 refuses groups that hold the first chip of a slice, and takes the others.
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

    A fleet stays one (`fleets`), and so do whole hosts. One host: `shared` on one device, else
    `split` in halves. Several: the trainer gets half of the chips of each host where the chips
    allow it (v4 and v5p), elsewhere all of them in turns with the searchers; rows are padded, since
    hosts cannot pack rows together. Its mesh divides parameters over as many devices as the rows of
    a batch can be divided over (of a pod: its prompts), the rest is tensor-parallel. Groups of
    searchers are as small as weights and cache allow.

    A batch whose prompts no mesh of a pod divides gets more of them, which `notes` says.

    Args:
        config: of the run.
        model_config: of the policy.
        devices: all of the slice.
        hbm_bytes: memory of each.
        judge_bytes: what models that give rewards take of the first device of a searcher group of
            a size; infinity where they cannot be divided over it.
        trainer_devices: of several hosts some train and the others search, about as many; 0: every
            host does both, unless the config asks for whole hosts: then half.

    Raises:
        PlacementError: no mesh divides batch and model.
        ConfigError: a run on these devices would refuse the config.
    """
    if MODES[config.placement].searches_elsewhere:
        given = config
        config, notes = fleets.choose_fleet(config, model_config, devices, hbm_bytes, judge_bytes)
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
    """`choose`, where every host trains and searches."""
    hosts, platform = len(hosts_of(devices)), platform_of(devices[0])
    per_host = len(devices) // hosts
    half = len(devices) / 2
    sizes = [n for n in trainer_options(devices) if n >= len(devices) / 4]
    sizes = [*sorted(sizes, key=lambda n: abs(n - half)), len(devices)]
    fields: dict[str, Any] = {
        "placement": "pod" if hosts > 1 else "split" if len(devices) > 1 else "shared"
    }
    notes = []
    if hosts > 1 and not any(fitting.mesh_exists(n, config, model_config, hosts) for n in sizes):
        fields["batch.num_prompts"] = fitting.divisible_prompts(config, model_config, sizes, hosts)
        notes.append(
            f"batch.num_prompts is {fields['batch.num_prompts']} instead of "
            f"{config.batch.num_prompts}, which no mesh of {hosts} hosts divides: batches of "
            "another size are another experiment"
        )
    given, config = config, replace(config, fields)
    size = next(
        (n for n in sizes if fitting.holds_state(n, config, model_config, hbm_bytes, hosts)),
        len(devices),
    )
    shares_devices = size == len(devices)
    mesh = fitting.mesh_shape(size, config, model_config, hosts)
    pool = per_host if shares_devices else per_host - size // hosts
    held = estimates.held_bytes(config, model_config) / size
    searching = estimates.searcher_bytes(config, model_config, devices, judge_bytes)
    free = hbm_bytes - held if shares_devices else hbm_bytes
    group = fitting.group_size(model_config, pool, per_host, free, devices, searching)
    free = hbm_bytes - held - (searching(group) if shares_devices else 0.0)
    fields |= {
        "placement": "pod" if hosts > 1 else "shared" if shares_devices else "split",
        "mesh.data": mesh.data,
        "mesh.fsdp": mesh.fsdp,
        "mesh.model": mesh.model,
        "num_searchers": pool // group * hosts,
        "search.num_devices": group,
        "batch.micro_batch_rows": fitting.micro_batch_rows(
            config, model_config, mesh, free, platform
        ),
    }
    config = replace(config, fields)
    return config, _placed(given, config, devices, notes)


def _choose_whole_hosts(
    config: Config,
    model_config: TransformerConfig,
    devices: Sequence[Any],
    hbm_bytes: float,
    judge_bytes: Callable[[int], float],
    wanted: float,
) -> tuple[Config, Choice]:
    """`choose`, where the trainer has all devices of about as many hosts as `wanted` needs."""
    per_host, platform = len(devices) // len(hosts_of(devices)), platform_of(devices[0])
    sizes = trainer_options(devices, whole_hosts=True)
    given = config
    notes = []
    if not any(fitting.mesh_exists(n, config, model_config, 0) for n in sizes):
        fields = {"batch.num_prompts": fitting.divisible_prompts(config, model_config, sizes, 0)}
        notes.append(
            f"batch.num_prompts is {fields['batch.num_prompts']} instead of "
            f"{config.batch.num_prompts}, which no mesh of whole hosts divides: batches of another "
            "size are another experiment"
        )
        config = replace(config, fields)
    holding = [n for n in sizes if fitting.holds_state(n, config, model_config, hbm_bytes, 0)]
    existing = [n for n in sizes if fitting.mesh_exists(n, config, model_config, 0)]
    # Where nothing holds the state, the largest, of which the verdict says how much is missing.
    size = min(holding, key=lambda n: abs(n - wanted)) if holding else max(existing)
    mesh = fitting.mesh_shape(size, config, model_config, 0)
    of_searcher = estimates.searcher_bytes(config, model_config, devices, judge_bytes)
    group = fitting.group_size(model_config, per_host, per_host, hbm_bytes, devices, of_searcher)
    free = hbm_bytes - estimates.held_bytes(config, model_config) / size
    searching = len(left_to_search(devices, on_whole_hosts(devices, size)))
    fields = {
        "placement": "whole_hosts",
        "mesh.data": mesh.data,
        "mesh.fsdp": mesh.fsdp,
        "mesh.model": mesh.model,
        "num_searchers": per_host // group * searching,
        "search.num_devices": group,
        "batch.num_prompts": config.batch.num_prompts,
        "batch.micro_batch_rows": fitting.micro_batch_rows(
            config, model_config, mesh, free, platform
        ),
    }
    config = replace(config, fields)
    idle = len(devices) - size - searching * per_host
    if idle:
        notes.append(
            f"{idle} chips of the first host are idle: on v5e above 16 chips neither a trainer nor "
            "a searcher of several chips may hold them"
        )
    return config, _placed(given, config, devices, notes)


def _placed(given: Config, config: Config, devices: Sequence[Any], notes: Sequence[str]) -> Choice:
    """Return the placement of a chosen config, and the fields that differ from the given one."""
    validate(config)
    before, after = flatten(given), flatten(config)
    changed = {name: x for name, x in after.items() if before[name] != x}
    return place(config, devices)._replace(fields=changed, notes=tuple(notes))
