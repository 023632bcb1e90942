# SPDX-License-Identifier: Apache-2.0
"""Which devices of a slice train and which search, where the config does not say it for this slice.

`sharding.place` makes meshes of a decision and refuses what compilers refuse; this module makes the
decision and says it as config fields, so that a run given those fields is placed the same way. It
weighs bytes by hand, without compiling. The invariant it owns: what it chooses, `sharding.place`
accepts.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tba_jax import lora, parts, sharding
from tba_jax.config import Config, get_field
from tba_jax.decoding.engine import cache_lengths
from tba_jax.models.transformer import TransformerConfig, abstract_params, num_params
from tba_jax.sharding import MeshShape, Placement, PlacementError
from tba_jax.train_step import TrainState

# Weights of the next version arrive beside those in use, and programs need room: a group is made
# larger where weights and cache would leave less than this share of the memory.
_SHARE_FOR_PROGRAMS = 0.15


class Choice(NamedTuple):
    """A placement of a run on a slice.

    Attributes:
        name: shared, split, per_host, whole_hosts or interleaved.
        placement: meshes; searchers are those of the last host that has any.
        num_groups: searcher groups on the whole slice.
        takes_turns: trainer and searchers share devices.
        fields: config fields that were changed for it, with their values.
    """

    name: str
    placement: Placement
    num_groups: int
    takes_turns: bool
    fields: dict[str, Any]


def trainer_options(devices: Sequence[Any]) -> list[int]:
    """Numbers of trainer devices that leave some for searchers and that this slice accepts."""
    if len(_hosts(devices)) == 1:
        return list(range(1, len(devices)))
    options = []
    for n in range(1, len(devices)):
        try:
            sharding.pod_layout(devices, n)
        except PlacementError:
            continue
        options.append(n)
    return options


def usable_options(
    config: Config, model_config: TransformerConfig, devices: Sequence[Any]
) -> list[int]:
    """Those of `trainer_options` over which a mesh divides this batch and this model."""
    return [n for n in trainer_options(devices) if _mesh_exists(n, config, model_config)]


def place(config: Config, devices: Sequence[Any]) -> Choice:
    """The config's own placement on these devices.

    Raises:
        PlacementError: it does not suit them.
    """
    hosts = _hosts(devices)
    mesh = MeshShape(config.mesh.data, config.mesh.fsdp, config.mesh.model)
    if len(hosts) > 1 and config.placement != "pod":
        raise PlacementError(
            f"config.placement = {config.placement!r} is for the devices of one host, and this "
            f"slice has {len(hosts)} hosts; set --config.placement=pod"
        )

    def on(process: int) -> Placement:
        return sharding.place(
            config.placement,
            devices,
            mesh=mesh,
            num_searchers=config.num_searchers,
            searcher_devices=config.search.num_devices,
            process_index=process,
        )

    by_host = [on(process) for process in sorted(hosts)]
    searching = [p for p in by_host if p.searcher_meshes]
    if not searching:
        raise PlacementError(
            f"searchers of {config.search.num_devices} devices do not fit on any host; lower "
            "search.num_devices"
        )
    chosen = searching[-1]
    trainer = set(chosen.trainer_mesh.devices.flat)
    searchers = {d for p in searching for m in p.searcher_meshes for d in m.devices.flat}
    takes_turns = bool(trainer & searchers)
    if len(hosts) > 1:
        name = sharding.pod_layout(devices, mesh.size)
    else:
        name = "shared" if takes_turns else "split"
    groups = {tuple(d.id for d in m.devices.flat) for p in searching for m in p.searcher_meshes}
    return Choice(name, chosen, len(groups), takes_turns, {})


def choose(
    config: Config,
    model_config: TransformerConfig,
    devices: Sequence[Any],
    hbm_bytes: float,
) -> Choice:
    """A placement of this config on these devices, all of which are used.

    One host: `shared` on one device, else `split` in halves. Several: the trainer gets half of
    them (of the chips of each host on v4 and v5p, of the hosts elsewhere), or all of them in turn
    with the searchers where the chips allow nothing between. Its mesh divides parameters over as
    many devices as the prompts of a batch can be divided over, the rest is tensor-parallel.
    Searcher groups are as small as weights and cache allow.

    Raises:
        PlacementError: no mesh divides batch and model, or no group holds the weights.
    """
    hosts = _hosts(devices)
    per_host = len(devices) // len(hosts)
    half = len(devices) / 2
    # Of v5e slices above 16 chips one host is the only proper part: too little to train on.
    sizes = [n for n in trainer_options(devices) if n >= len(devices) / 4]
    sizes = [*sorted(sizes, key=lambda n: abs(n - half)), len(devices)]
    size = next(
        (n for n in sizes if _holds_state(n, config, model_config, hbm_bytes)), len(devices)
    )
    takes_turns = size == len(devices)
    mesh = _mesh_shape(size, config, model_config)
    if takes_turns or (len(hosts) > 1 and sharding.pod_layout(devices, size) == "whole_hosts"):
        pool = per_host
    else:
        pool = per_host - size // len(hosts)
    reserved = _held_bytes(config, model_config) / size if takes_turns else 0.0
    group = _group_size(config, model_config, pool, per_host, hbm_bytes - reserved, devices)
    fields: dict[str, Any] = {
        "placement": "pod" if len(hosts) > 1 else "shared" if takes_turns else "split",
        "mesh.data": mesh.data,
        "mesh.fsdp": mesh.fsdp,
        "mesh.model": mesh.model,
        "num_searchers": pool // group,
        "search.num_devices": group,
        "batch.micro_batch_rows": _micro_batch_rows(config, mesh.data * mesh.fsdp),
    }
    changed = {name: x for name, x in fields.items() if get_field(config, name) != x}
    with config.unlocked():
        config.update_from_flattened_dict(fields)
    return place(config, devices)._replace(fields=changed)


def _hosts(devices: Sequence[Any]) -> list[int]:
    return sorted({d.process_index for d in devices})


def _mesh_shape(size: int, config: Config, model_config: TransformerConfig) -> MeshShape:
    prompts = config.batch.num_prompts
    for fsdp in range(size, 0, -1):
        model = size // fsdp
        divides = (
            size % fsdp == 0
            and prompts % fsdp == 0
            and model_config.hidden_size % fsdp == 0
            and model_config.num_heads % model == 0
            and model_config.mlp_size % model == 0
        )
        if divides:
            return MeshShape(1, fsdp, model)
    raise PlacementError(
        f"no mesh of {size} devices divides {prompts} prompts and a model of "
        f"{model_config.num_heads} heads; set --config.batch.num_prompts={size} or a multiple"
    )


def _mesh_exists(size: int, config: Config, model_config: TransformerConfig) -> bool:
    try:
        _mesh_shape(size, config, model_config)
    except PlacementError:
        return False
    return True


def _holds_state(
    size: int, config: Config, model_config: TransformerConfig, hbm_bytes: float
) -> bool:
    """A mesh of this size exists, and leaves room beside the state and a copy of it."""
    if not _mesh_exists(size, config, model_config):
        return False
    held = _held_bytes(config, model_config) / size
    return held <= hbm_bytes * (1 - _SHARE_FOR_PROGRAMS)


def micro_batch_options(config: Config, parts: int) -> list[int]:
    """Rows of a micro-batch that divide a batch and, over `parts` devices, themselves; ascending.

    Padded rows of a group lie on one device, so micro-batches of whole groups are divided by
    groups; packed rows are divided one by one.
    """
    rows, k = config.batch.num_prompts * config.objective.group_size, config.objective.group_size
    if config.batch.packed_length:
        return [parts * 2**i for i in range(rows.bit_length()) if parts * 2**i <= rows] or [parts]
    return [
        n for n in range(1, rows + 1) if rows % n == 0 and (n if n % k else n // k) % parts == 0
    ]


def _micro_batch_rows(config: Config, parts: int) -> int:
    """The config's own where the mesh divides it, else the nearest that it does."""
    wanted, options = config.batch.micro_batch_rows, micro_batch_options(config, parts)
    unit = config.objective.group_size
    if config.batch.packed_length or wanted % unit:
        unit = 1
    if not wanted or wanted // unit % parts == 0:
        return wanted
    return min(options, key=lambda n: max(n / wanted, wanted / n))


def _held_bytes(config: Config, model_config: TransformerConfig) -> float:
    """Train state and its copy while it is saved, or what adapters leave frozen; about."""
    params = num_params(model_config) * jnp.dtype(config.model.param_dtype).itemsize
    if config.lora.rank:
        return params  # the adapters are few
    # Parameters, two moments, perhaps a reference.
    return 2 * (4 if config.reference.placement == "trainer" else 3) * params


def _weight_copies(config: Config, model_config: TransformerConfig) -> float:
    """How many times a searcher holds what it decodes with: in use, and the next version."""
    policy = parts.policy_config(config, model_config)
    if policy.adapters is None:
        return 2.0
    # The base, and what is merged of either.
    kernels = lora.adapted(abstract_params(model_config), policy)
    return 1 + 2 * sum(x.size for x in jax.tree.leaves(kernels)) / num_params(model_config)


def _group_size(
    config: Config,
    model_config: TransformerConfig,
    pool: int,
    per_host: int,
    hbm_bytes: float,
    devices: Sequence[Any],
) -> int:
    """Devices of a searcher group: the fewest that hold weights twice, a reference and a cache."""
    weights = num_params(model_config) * jnp.dtype(config.model.rollout_dtype).itemsize
    copies = _weight_copies(config, model_config)
    if config.reference.placement == "searcher":
        copies += (
            jnp.dtype(config.model.param_dtype).itemsize
            / jnp.dtype(config.model.rollout_dtype).itemsize
        )
    columns = cache_lengths(config.task.max_prompt_tokens + config.search.max_new_tokens + 8)[-1]
    cache_dtype = jnp.dtype(config.search.cache_dtype or config.model.rollout_dtype)
    cache = (
        2
        * model_config.num_layers
        * model_config.num_kv_heads
        * model_config.head_dim
        * columns
        * num_slots(config)
        * cache_dtype.itemsize
    )
    # What compilers accept of the chips of one host: one or all on v5e and v6e.
    kind = getattr(devices[0], "device_kind", "")
    all_or_one = devices[0].platform == "tpu" and ("lite" in kind or "v6" in kind)
    sizes = [g for g in range(1, pool + 1) if pool % g == 0 and model_config.num_heads % g == 0]
    if all_or_one:
        sizes = [g for g in sizes if g in (1, per_host)]
    for g in sizes:
        held = copies * weights / g + cache / math.gcd(g, model_config.num_kv_heads)
        if held <= hbm_bytes * (1 - _SHARE_FOR_PROGRAMS):
            return g
    if not sizes:
        raise PlacementError(
            f"no group of {pool} devices divides a model of {model_config.num_heads} heads"
        )
    return sizes[-1]  # too little all the same: the verdict says by how much


def num_slots(config: Config) -> int:
    """Unfinished responses of a searcher at a time."""
    rows = config.search.prompts_per_round * config.search.samples_per_prompt
    return min(rows, config.search.num_slots or rows)


def shard_bytes(tree: Any) -> float:
    """Bytes of a tree of ShapeDtypeStructs on each device, without the padding of its layout."""
    total = 0.0
    for x in jax.tree.leaves(tree):
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        total += math.prod(shape) * jnp.dtype(x.dtype).itemsize
    return total


def state_bytes_by_kind(state: TrainState) -> dict[str, float]:
    """Bytes of an abstract train state on each device."""
    kinds = {
        "parameters": shard_bytes(state.params),
        "optimiser state": shard_bytes(state.opt_state),
    }
    if state.reference_params is not None:
        kinds["reference parameters"] = shard_bytes(state.reference_params)
    return kinds
