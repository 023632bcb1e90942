# SPDX-License-Identifier: Apache-2.0
"""Sizes that divide a model and a batch, and those of them that fit: meshes, groups, micro-batches.

By hand from shapes, for whoever chooses a placement (`layouts`, `fleets`); it knows no hosts but
their number, and no config fields but those that it is asked about. The invariant it owns: what it
returns divides what it must, and where nothing fits it is the nearest, of which the verdict says by
how much it is too large.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tba_jax.config.schema import Config, replace
from tba_jax.devices.placement import MeshShape, PlacementError
from tba_jax.devices.platform import Platform
from tba_jax.models.transformer import TransformerConfig
from tba_jax.planning import estimates

# Weights of the next version arrive beside those in use, and programs need room: a group is made
# larger where weights and cache would leave less than this share of the memory.
_SHARE_FOR_PROGRAMS = 0.15


def mesh_shape(size: int, config: Config, model_config: TransformerConfig, hosts: int) -> MeshShape:
    """Return a trainer's mesh of this size: fsdp as far as rows permit, the rest is `model`.

    Rows need not divide over the devices, some are then empty: at most a fifth of them.

    Args:
        size: devices.
        config, model_config: of the run.
        hosts: that have equal parts of the mesh; 0: the trainer has whole hosts.

    Raises:
        PlacementError: no such mesh divides batch and model.
    """
    rows, prompts = _rows(config), config.batch.num_prompts
    for fsdp in range(size, 0, -1):
        model = size // fsdp
        divides = (
            size % fsdp == 0
            and 4 * (-rows % fsdp) <= rows
            # Attention heads and MLPs are divided within a host, where links are fast.
            and (not hosts or (size // hosts) % model == 0)
            and model_config.hidden_size % fsdp == 0
            and model_config.num_heads % model == 0
            and model_config.mlp_size % model == 0
        )
        if divides:
            return MeshShape(1, fsdp, model)
    raise PlacementError(
        f"no mesh of {size} devices divides a batch of {prompts} prompts and a model of "
        f"{model_config.num_heads} heads; set --config.batch.num_prompts={size} or a multiple"
    )


def mesh_exists(size: int, config: Config, model_config: TransformerConfig, hosts: int) -> bool:
    """Whether `mesh_shape` finds one."""
    try:
        mesh_shape(size, config, model_config, hosts)
    except PlacementError:
        return False
    return True


def divisible_prompts(
    config: Config, model_config: TransformerConfig, sizes: Sequence[int], hosts: int
) -> int:
    """Return the next larger number of prompts for which a mesh of these sizes exists.

    Raises:
        PlacementError: the model itself does not divide over them.
    """
    for prompts in range(config.batch.num_prompts + 1, config.batch.num_prompts + max(sizes) + 1):
        trial = replace(config, {"batch.num_prompts": prompts})
        if any(mesh_exists(n, trial, model_config, hosts) for n in sizes):
            return prompts
    raise PlacementError(
        f"no mesh of {' or '.join(map(str, sizes))} devices divides a model of hidden size "
        f"{model_config.hidden_size} with {model_config.num_heads} heads; take another slice"
    )


def holds_state(
    size: int, config: Config, model_config: TransformerConfig, hbm_bytes: float, hosts: int
) -> bool:
    """Return whether a mesh of this size exists and leaves memory besides the state."""
    if not mesh_exists(size, config, model_config, hosts):
        return False
    held = estimates.held_bytes(config, model_config) / size
    return held <= hbm_bytes * (1 - _SHARE_FOR_PROGRAMS)


def micro_batch_options(config: Config, num_parts: int) -> list[int]:
    """Rows of a micro-batch that divide a batch and, over `num_parts` devices, themselves.

    Packed rows need not divide the batch: powers of two, and what holds whole groups. Padded rows
    are filled up with empty ones as far as devices divide them. Where a pass over a batch makes
    several updates, each has its part of a micro-batch.
    """
    k, of_update = config.objective.group_size, num_parts * config.objective.built.minibatches
    responses = config.batch.num_prompts * k
    if config.batch.packed_length:
        rows = -(-responses // of_update) * of_update
        options = {of_update * 2**i for i in range(rows.bit_length())} | {rows}
        options |= {n for n in range(k, rows + 1, k) if n % of_update == 0}
        return sorted(n for n in options if n <= rows)
    rows = -(-_rows(config) // num_parts) * num_parts * (responses // _rows(config))
    found = [n for n in range(of_update, rows + 1, of_update) if rows % n == 0]
    return found or [of_update]  # which the run fills up as well


def micro_batch_rows(
    config: Config,
    model_config: TransformerConfig,
    mesh: MeshShape,
    free_bytes: float,
    platform: Platform,
) -> int:
    """Return the config's own size if the mesh divides it, else the nearest divisible one.

    Where memory allows, of padded rows whole groups on each device, if whole groups were asked for
    (their rows are scored once and not twice) or rows share prompts; of groups that share prompts
    else as much as fits, since each part of one computes the prompt again. Of packed rows as many
    whole groups as fit: weights, gradients and their sum are read once for each micro-batch, and
    rows that all fit one are no more than they need to be. What does not fit by hand is made
    smaller: the most that does.
    """
    wanted, num_parts = config.batch.micro_batch_rows, mesh.data * mesh.fsdp
    options, k = micro_batch_options(config, num_parts), config.objective.group_size

    def distance(n: int) -> float:
        return max(n / wanted, wanted / n)

    if not wanted:
        return 0
    larger, room = list[int](), free_bytes
    shares = config.batch.share_prompts
    if not config.batch.packed_length and (shares or wanted % k == 0):
        larger = sorted((n for n in options if n % (k * num_parts) == 0), key=distance)[:1]
        if shares:
            larger += [n for n in reversed(options) if wanted < n < k * num_parts]
    elif config.batch.packed_length:
        whole = config.batch.num_prompts * k
        larger = [n for n in reversed(options) if (n % k == 0 or n >= whole) and n > wanted]
        room *= 1 - _SHARE_FOR_PROGRAMS  # which no other choice here nearly fills
    is_possible = wanted % (num_parts * config.objective.built.minibatches) == 0 and (
        config.batch.packed_length or wanted in options
    )
    nearest = wanted if is_possible else min(options, key=distance)
    smaller = [nearest, *(n for n in reversed(options) if n < nearest)]
    for n, free in [*((n, room) for n in larger), *((n, free_bytes) for n in smaller)]:
        needed = estimates.step_bytes(n // num_parts, config, model_config, mesh, platform)
        if needed <= free:
            return n
    return nearest  # too much all the same: the verdict says by how much


def _rows(config: Config) -> int:
    """Rows of a batch whose responses are all distinct, packed ones with one each."""
    shares = config.batch.share_prompts and not config.batch.packed_length
    return config.batch.num_prompts * (1 if shares else config.objective.group_size)


def group_size(
    model_config: TransformerConfig,
    pool: int,
    per_host: int,
    free_bytes: float,
    devices: Sequence[Any],
    bytes_of: Callable[[int], float],
) -> int:
    """Devices of a searcher group: the fewest that hold what they must."""
    sizes = group_sizes(model_config, pool, per_host, devices)
    for g in sizes:
        if bytes_of(g) <= free_bytes * (1 - _SHARE_FOR_PROGRAMS):
            return g
    if not sizes:
        raise PlacementError(
            f"no group of {pool} devices divides a model of {model_config.num_heads} heads"
        )
    return sizes[-1]  # too little all the same: the verdict says by how much


def group_sizes(
    model_config: TransformerConfig, pool: int, per_host: int, devices: Sequence[Any]
) -> list[int]:
    """Numbers of devices that a searcher may have, ascending.

    Args:
        model_config: of the policy.
        pool: devices of a host that search.
        per_host: devices of a host.
        devices: of the slice.
    """
    sizes = [g for g in range(1, pool + 1) if pool % g == 0 and model_config.num_heads % g == 0]
    # What compilers accept of the chips of one host: one or all on v5e and v6e.
    kind = getattr(devices[0], "device_kind", "")
    if devices[0].platform == "tpu" and ("lite" in kind or "v6" in kind):
        sizes = [g for g in sizes if g in (1, per_host)]
    return sizes
