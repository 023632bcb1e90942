# SPDX-License-Identifier: Apache-2.0
"""Meshes, searcher groups, micro-batches and decode slots that divide a run and fit the memory.

The sizes are computed from estimates, without compiling. If no size fits the memory, the nearest
size is returned, and the verdict of the plan reports the missing memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tba_jax.config.resolved import remat_of, shares_prompts
from tba_jax.config.schema import Config, replace
from tba_jax.devices.placement import MeshShape, PlacementError
from tba_jax.devices.platform import Platform, platform_of
from tba_jax.models.logprobs import KEPT_BYTES
from tba_jax.models.transformer import TransformerConfig
from tba_jax.planning import estimates

SHARE_FOR_PROGRAMS = 0.15
"""Share of a device's memory for programs, which weights, cache and train state must leave."""
_SHARE_FOR_CHOICES = 0.1  # a run, unlike a plan, does not compile before it chooses
_MOST_EMPTY = 1 / 8  # of the rows of a batch, in its last micro-batch


def mesh_shape(size: int, config: Config, model_config: TransformerConfig, hosts: int) -> MeshShape:
    """Return a trainer's mesh: as much fsdp as the rows permit, the rest tensor-parallel (`model`).

    The axis `expert` has the size that the config says. Rows need not divide evenly
    over the devices: up to a fifth of the padded rows may be empty.

    Args:
        hosts: number of hosts that have equal parts of the mesh; 0: the trainer has whole hosts.

    Raises:
        PlacementError: no such mesh divides batch and model.
    """
    rows, expert = _rows(config), config.mesh.expert
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
        f"no mesh of {size} devices divides a batch of {config.batch.num_prompts} prompts and a "
        f"model of hidden size {model_config.hidden_size} with {model_config.num_heads} heads; set "
        f"--config.batch.num_prompts={size} or a multiple, or choose another slice"
    )


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
    if config.model.remat == "auto":
        config = replace(config, {"model.remat": "layers"})
    needed = estimates.held_bytes(config, model_config) / (mesh.size // mesh.data)
    needed += estimates.step_bytes(rows, config, model_config, mesh, platform)
    return needed <= hbm_bytes * (1 - SHARE_FOR_PROGRAMS)


def micro_batch_options(config: Config, num_parts: int) -> list[int]:
    """Return the possible numbers of rows of a micro-batch, ascending.

    `num_parts` devices divide each option, and each option divides the batch, padded up to a
    multiple of the devices. Packed rows are also taken by powers of two and whole groups, if few
    rows of the last micro-batch are then empty.
    """
    k = config.objective.group_size
    responses = config.batch.num_prompts * k
    if config.batch.packed_length:
        rows = -(-responses // num_parts) * num_parts
        options = {num_parts * 2**i for i in range(rows.bit_length())} | {rows}
        options |= {n for n in range(k, rows + 1, k) if n % num_parts == 0}
        return sorted(n for n in options if n <= rows and -rows % n <= _MOST_EMPTY * rows)
    rows = -(-_rows(config) // num_parts) * num_parts * (responses // _rows(config))
    found = [n for n in range(num_parts, rows + 1, num_parts) if rows % n == 0]
    return found or [num_parts]  # The run pads the batch to this size too.


def choose(
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
    devices, a small micro-batch must fit in addition. A micro-batch has the most rows that fit. On
    CPUs its logits must also fit the memory that is kept for the backward pass, if one group per
    device does. `model.remat`, if auto, is `dots` where products limit a step, and a micro-batch
    with kept products holds a whole group: fewer rows would score each group twice.

    Args:
        config: config of the run, with its final placement.
        of_searcher: config -> bytes that a searcher needs on each device.
    """
    fields: dict[str, Any] = {}
    held = estimates.held_bytes(config, model_config) / (mesh.size // mesh.data)
    platform, parts = platform_of(devices[0]), mesh.num_parts
    wanted = config.batch.micro_batch_rows
    options = [wanted] if wanted else micro_batch_options(config, parts)
    group = min(config.objective.group_size, options[-1])
    least = min(config.objective.group_size * parts, options[-1])  # a group on each device

    def needed(n: int, remat: str) -> float:
        trial = replace(config, {"model.remat": remat})
        rows = -(-n // parts)  # fewer rows than devices are padded
        return estimates.step_bytes(rows, trial, model_config, mesh, platform)

    if not config.search.num_slots:
        # Decoding is bound by memory: more slots save more time than more rows of a micro-batch.
        kept = (least, options[0]) if shares_devices else ()
        most = hbm_bytes * (1 - SHARE_FOR_PROGRAMS)
        rooms = [most - held - needed(n, remat_of(config)) for n in kept] or [most]
        while config.search.slots > 1 and of_searcher(config) > max(rooms):
            fields["search.num_slots"] = -(-config.search.slots // 2)
            config = replace(config, fields)
    free = hbm_bytes - held - (of_searcher(config) if shares_devices else 0.0)
    if not wanted:
        free -= _SHARE_FOR_CHOICES * hbm_bytes
    room = free * (1 - SHARE_FOR_PROGRAMS)
    of_trainer = devices[: mesh.size] if config.placement == "hosts" else devices
    remats = [(remat_of(config), 1)]  # with the fewest rows that each is chosen for
    if config.model.remat == "auto" and _keeps_products(config, model_config, of_trainer):
        remats.insert(0, ("dots", group))
    fitting = []
    for remat, fewest in remats:
        fitting = [n for n in options if n >= fewest and needed(n, remat) <= room]
        if fitting:
            if remat != remat_of(config):
                fields["model.remat"] = remat
            break
    if not wanted:
        if platform == "cpu":
            # Kept logits save a product; more rows at a time save nothing there.
            tokens = config.batch.packed_length or config.search.max_new_tokens
            most = KEPT_BYTES / (4 * model_config.vocab_size * tokens)
            fitting = [n for n in fitting if least <= n <= most] or fitting
        rows = [options[0], *fitting][-1]
        fields["batch.micro_batch_rows"] = 0 if rows >= options[-1] else rows
    return fields


def _keeps_products(
    config: Config, model_config: TransformerConfig, devices: Sequence[Any]
) -> bool:
    """Return whether a step is faster with kept products, if their memory suffices.

    Memory bandwidth limits float32 steps. Products of experts are computed again in any case. The
    network of GPU hosts carries the weights for each micro-batch, so more rows are faster there.
    """
    is_networked = len({device.process_index for device in devices}) > 1
    platform = platform_of(devices[0])
    return (
        config.model.compute_dtype == "bfloat16"
        and not model_config.num_experts
        and (platform == "tpu" or (platform != "cpu" and not is_networked))
    )


def _rows(config: Config) -> int:
    """Return the number of rows of a batch; a packed row counts as one response."""
    shares = shares_prompts(config) and not config.batch.packed_length
    return config.batch.num_prompts * (1 if shares else config.objective.group_size)


def group_sizes(
    model_config: TransformerConfig, pool: int, per_host: int, devices: Sequence[Any]
) -> list[int]:
    """Return the possible numbers of devices of a searcher, ascending.

    Args:
        pool: number of devices of a host that search.
        per_host: number of devices of a host.

    Raises:
        PlacementError: no number divides the model.
    """
    sizes = [g for g in range(1, pool + 1) if pool % g == 0 and model_config.num_heads % g == 0]
    # Compilers for v5e and v6e accept one chip of a host, or all of them.
    kind = getattr(devices[0], "device_kind", "")
    if devices[0].platform == "tpu" and ("lite" in kind or "v6" in kind):
        sizes = [g for g in sizes if g in (1, per_host)]
    return sizes
