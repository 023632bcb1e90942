# SPDX-License-Identifier: Apache-2.0
"""Meshes, searcher groups and micro-batches that divide a model and a batch and fit the memory.

The sizes are computed from shapes, for `layouts`, which chooses a placement.

Invariant: every returned size satisfies its divisibility rules. If no size fits the memory, the
nearest size is returned, and the verdict of the plan reports the missing memory.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from tba_jax.config.resolved import allows_forks, remat_of, shares_prompts
from tba_jax.config.schema import Config
from tba_jax.devices.placement import MeshShape, PlacementError
from tba_jax.devices.platform import Platform, platform_of
from tba_jax.flow import layout
from tba_jax.models.scoring import KEPT_BYTES
from tba_jax.models.transformer import TransformerConfig
from tba_jax.planning import estimates

SHARE_FOR_PROGRAMS = 0.15
"""Share of a device's memory for programs, which weights, cache and train state must leave."""
_SHARE_FOR_CHOICES = 0.1  # a run, unlike a plan, does not compile before it chooses
# Tokens that a device computes while it gathers and reads the weights of a micro-batch and adds its
# gradients: about 30 bytes and 7 FLOPs of a token for each parameter, at 500 FLOPs a byte.
_TOKENS_OF_WEIGHTS = 2000
# If a network of GPU hosts carries them: about 8 bytes a parameter, at 20,000 FLOPs a byte.
_TOKENS_OF_SENT_WEIGHTS = 20_000
_ROWS = "batch.micro_batch_rows"


def mesh_shape(size: int, config: Config, model_config: TransformerConfig, hosts: int) -> MeshShape:
    """Return a trainer's mesh: as much fsdp as the rows permit, the rest tensor-parallel (`model`).

    The axis `expert` has the size that the config says. Rows need not divide evenly
    over the devices: up to a fifth of the padded rows may be empty.

    Args:
        hosts: number of hosts that have equal parts of the mesh; 0: the trainer has whole hosts.

    Raises:
        PlacementError: no such mesh divides batch and model.
    """
    rows, prompts = _rows(config), config.batch.num_prompts
    expert = config.mesh.expert
    for fsdp in range(size, 0, -1):
        model = size // fsdp
        divides = (
            size % fsdp == 0
            and 4 * (-rows % fsdp) <= rows
            # Only devices of one host divide attention heads and MLPs, because of its fast links.
            and (not hosts or (size // hosts) % model == 0)
            and model_config.hidden_size % fsdp == 0
            and model_config.num_heads % model == 0
            and model_config.mlp_size % model == 0
            and fsdp % expert == 0
        )
        if divides:
            return MeshShape(1, fsdp // expert, model, expert)
    raise PlacementError(
        f"no mesh of {size} devices divides a batch of {prompts} prompts and a model of hidden "
        f"size {model_config.hidden_size} with {model_config.num_heads} heads; set "
        f"--config.batch.num_prompts={size} or a multiple, or choose another slice"
    )


def mesh_fields(mesh: MeshShape) -> dict[str, Any]:
    """Return the config fields of a trainer's mesh."""
    return {f"mesh.{axis}": size for axis, size in mesh._asdict().items()}


def holds_trainer(
    size: int,
    config: Config,
    model_config: TransformerConfig,
    hbm_bytes: float,
    hosts: int,
    platform: Platform,
) -> bool:
    """Return whether a mesh of this size exists and holds the train state and the smallest step.

    The smallest step has the fewest rows of a micro-batch and the most recomputation.
    """
    try:
        mesh = mesh_shape(size, config, model_config, hosts)
    except PlacementError:
        return False
    rows = -(-micro_batch_options(config, mesh.num_parts)[0] // mesh.num_parts)
    trial = _with(config, "model", remat=_remats(config, wants_products=False)[-1])
    needed = estimates.held_bytes(config, model_config) / mesh.num_param_parts
    needed += estimates.step_bytes(rows, trial, model_config, mesh, platform)
    return needed <= hbm_bytes * (1 - SHARE_FOR_PROGRAMS)


def micro_batch_options(config: Config, num_parts: int) -> list[int]:
    """Return the possible numbers of rows of a micro-batch, ascending.

    Each option divides the batch, and `num_parts` devices divide each option. For packed rows,
    which need not divide the batch, powers of two and whole groups are options. Padded rows are
    filled with empty rows up to a multiple of the devices.
    """
    k = config.objective.group_size
    responses = config.batch.num_prompts * k
    if config.batch.packed_length:
        rows = -(-responses // num_parts) * num_parts
        options = {num_parts * 2**i for i in range(rows.bit_length())} | {rows}
        options |= {n for n in range(k, rows + 1, k) if n % num_parts == 0}
        return sorted(n for n in options if n <= rows)
    rows = -(-_rows(config) // num_parts) * num_parts * (responses // _rows(config))
    found = [n for n in range(num_parts, rows + 1, num_parts) if rows % n == 0]
    return found or [num_parts]  # The run pads the batch to this size too.


def crosses_network(devices: Sequence[Any]) -> bool:
    """Return whether these are GPUs of several hosts, whose network is slower than TPU links."""
    hosts = {device.process_index for device in devices}
    return platform_of(devices[0]) in ("cuda", "rocm") and len(hosts) > 1


def useful_rows(config: Config, num_parts: int, *, is_networked: bool = False) -> list[int]:
    """Return the options for rows of a micro-batch that are faster than all smaller ones.

    Args:
        is_networked: as `crosses_network` of the trainer's devices.
    """
    useful, best = list[int](), math.inf
    for n in micro_batch_options(config, num_parts):
        if (cost := _cost(n, "layers", config, num_parts, is_networked)) < best:
            useful, best = [*useful, n], cost
    return useful


def least_rows(config: Config, num_parts: int, *, is_networked: bool = False) -> int:
    """Return the rows of a micro-batch from which kept products are worth their memory.

    A step with `model.remat=dots` and this number of rows is faster than every step with `layers`.
    """
    options = useful_rows(config, num_parts, is_networked=is_networked)
    best = _cost(options[-1], "layers", config, num_parts, is_networked)
    return next(n for n in options if _cost(n, "dots", config, num_parts, is_networked) < best)


def _cost(rows: int, remat: str, config: Config, num_parts: int, is_networked: bool) -> float:
    """Return the cost of a step on one device: tokens, times the passes over the layers.

    Reading the weights costs as much as `_TOKENS_OF_WEIGHTS` for each micro-batch. Small
    micro-batches repeat prompts, and score each group twice if a group does not fit. The last
    micro-batch may have empty rows.
    """
    k, p = config.objective.group_size, config.batch.num_prompts
    x, t = config.task.max_prompt_tokens, config.search.max_new_tokens
    is_all = rows >= p * k
    of_row, length = 1, config.batch.packed_length or x + t
    if shares_prompts(config) and not config.batch.packed_length:
        of_row = k if is_all else min(k, -(-rows // num_parts))
        length = x + of_row * t
    pieces, is_whole = -(-k // of_row), rows >= k and not allows_forks(config)
    if is_all:
        num_rows = at_once = -(-p * pieces // num_parts) * num_parts
    else:
        at_once = layout.rows_at_once(rows, of_row, num_parts)
        num_rows = layout.most_rows(p, pieces, at_once=at_once, is_whole=is_whole)
    passes = 3 + estimates.REPEATED_SHARE * (remat == "layers") + (not is_all and not is_whole)
    tokens = at_once * length / num_parts
    of_weights = _TOKENS_OF_SENT_WEIGHTS if is_networked else _TOKENS_OF_WEIGHTS
    if config.lora.rank:  # no gradients of the weights
        of_weights /= 2
    return passes * num_rows / at_once * (tokens + of_weights)


def sizes(
    config: Config,
    model_config: TransformerConfig,
    mesh: MeshShape,
    devices: Sequence[Any],
    hbm_bytes: float,
    of_searcher: Callable[[Config], float],
    *,
    shares_devices: bool,
) -> dict[str, Any]:
    """Return the sizes that the config leaves open.

    The decode slots are the responses of a round, halved until they fit the memory. On shared
    devices, a small micro-batch must fit in addition. A micro-batch has the largest number of
    `useful_rows` that fits. On CPUs its logits must also fit the memory that is kept for the
    backward pass, if one group per device does. `model.remat`, if auto, is the value of `_remats`
    with the faster step.

    Args:
        config: config of the run, with its final placement.
        of_searcher: config -> bytes that a searcher needs on each device.
    """
    fields: dict[str, Any] = {}
    held = estimates.held_bytes(config, model_config) / mesh.num_param_parts
    platform, parts = platform_of(devices[0]), mesh.num_parts
    of_trainer = mesh.size if config.placement == "whole_hosts" else len(devices)
    is_networked = crosses_network(devices[:of_trainer])
    wanted = config.batch.micro_batch_rows
    options = [wanted] if wanted else useful_rows(config, parts, is_networked=is_networked)
    k = config.objective.group_size
    least = min(k * parts, options[-1])

    def needed(n: int, remat: str) -> float:
        trial = _with(config, "model", remat=remat)
        rows = -(-n // parts)  # fewer rows than devices are padded
        return estimates.step_bytes(rows, trial, model_config, mesh, platform)

    if not config.search.num_slots:
        # Decoding is bound by memory: more slots save more time than more rows of a micro-batch.
        kept = (least, options[0]) if shares_devices else ()
        most = hbm_bytes * (1 - SHARE_FOR_PROGRAMS)
        rooms = [most - held - needed(n, remat_of(config)) for n in kept] or [most]
        slots = max(_open_slots(config, of_searcher, room) for room in rooms)
        if slots < estimates.num_slots(config):
            fields["search.num_slots"] = slots
            config = _with(config, "search", num_slots=slots)
    free = hbm_bytes - held - (of_searcher(config) if shares_devices else 0.0)
    if not wanted:
        free -= _SHARE_FOR_CHOICES * hbm_bytes
    room = free * (1 - SHARE_FOR_PROGRAMS)

    def rows_with(remat: str) -> tuple[bool, float, int, str]:
        """Return (whether no rows fit, cost of a step, rows of a micro-batch, remat)."""
        possible = [n for n in options if needed(n, remat) <= room]
        if platform == "cpu" and not wanted:
            possible = _with_kept_logits(possible, least, config, model_config) or possible
        rows = max(possible, default=options[0])
        return not possible, _cost(rows, remat, config, parts, is_networked), rows, remat

    # Products of experts are computed again in any case.
    keeps = platform != "cpu" and not model_config.num_experts
    found = [rows_with(remat) for remat in _remats(config, wants_products=keeps)]
    does_not_fit, _, rows, remat = min(found)
    if does_not_fit:
        *_, rows, remat = found[-1]
    if not wanted:
        fields[_ROWS] = 0 if rows >= config.batch.num_prompts * k else rows
    if config.model.remat == "auto" and remat != remat_of(config):
        fields["model.remat"] = remat
    return fields


def _with_kept_logits(
    options: Sequence[int], least: int, config: Config, model_config: TransformerConfig
) -> list[int]:
    """Return the options from `least` whose logits a CPU keeps for the backward pass.

    Kept logits save a product; more rows at a time save nothing there.
    """
    tokens = config.batch.packed_length or config.search.max_new_tokens
    row = 4 * model_config.vocab_size * tokens
    return [n for n in options if n >= least and n * row <= KEPT_BYTES]


def _open_slots(config: Config, of_searcher: Callable[[Config], float], room: float) -> int:
    """Return the number of responses of a round, halved until their slots fit; at least 1."""
    slots = estimates.num_slots(config)
    while slots > 1 and of_searcher(_with(config, "search", num_slots=slots)) > room:
        slots = -(-slots // 2)
    return slots


def _remats(config: Config, *, wants_products: bool) -> list[str]:
    """Return the values of model.remat to try, from least to most recomputation."""
    if config.model.remat != "auto":
        return [config.model.remat]
    # Memory bandwidth limits float32 steps, and all steps with `none`.
    is_bound_by_products = wants_products and config.model.compute_dtype == "bfloat16"
    return ["dots", "layers"] if is_bound_by_products else ["layers"]


def _with(config: Config, section: str, **fields: Any) -> Config:
    """Return a config with other values in one section."""
    changed = dataclasses.replace(getattr(config, section), **fields)
    return dataclasses.replace(config, **{section: changed})


def _rows(config: Config) -> int:
    """Return the number of rows of a batch of distinct responses; a packed row counts as one."""
    shares = shares_prompts(config) and not config.batch.packed_length
    return config.batch.num_prompts * (1 if shares else config.objective.group_size)


def group_size(
    model_config: TransformerConfig,
    pool: int,
    per_host: int,
    free_bytes: float,
    devices: Sequence[Any],
    bytes_of: Callable[[int], float],
) -> int:
    """Return the smallest number of devices that holds weights, cache and reward models."""
    sizes = group_sizes(model_config, pool, per_host, devices)
    for g in sizes:
        if bytes_of(g) <= free_bytes * (1 - SHARE_FOR_PROGRAMS):
            return g
    if not sizes:
        raise PlacementError(
            f"no group of up to {pool} devices divides a model of {model_config.num_heads} heads; "
            "set another --config.search.num_devices, or choose another slice"
        )
    return sizes[-1]  # does not fit either; the verdict of the plan reports the missing memory


def group_sizes(
    model_config: TransformerConfig, pool: int, per_host: int, devices: Sequence[Any]
) -> list[int]:
    """Return the possible numbers of devices of a searcher, ascending.

    Args:
        pool: number of devices of a host that search.
        per_host: number of devices of a host.
    """
    sizes = [g for g in range(1, pool + 1) if pool % g == 0 and model_config.num_heads % g == 0]
    # Compilers for v5e and v6e accept one chip of a host, or all of them.
    kind = getattr(devices[0], "device_kind", "")
    if devices[0].platform == "tpu" and ("lite" in kind or "v6" in kind):
        sizes = [g for g in sizes if g in (1, per_host)]
    return sizes
