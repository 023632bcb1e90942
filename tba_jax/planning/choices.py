# SPDX-License-Identifier: Apache-2.0
"""Settings that a run chooses itself, from its data, its model and the memory of its devices.

A setting of 0 asks for the choice. What a run chose is in its config.json, and a run that is
resumed takes it from there: on other hardware, too, it goes on with the same batches.
"""

import os
from collections.abc import Mapping
from typing import Any

from tba_jax.config.devices import asked
from tba_jax.config.schema import Config, replace
from tba_jax.devices.placement import MODES, arrange
from tba_jax.devices.platform import platform_of
from tba_jax.models.transformer import TransformerConfig
from tba_jax.planning import estimates, fitting
from tba_jax.run.lengths import with_lengths
from tba_jax.run.model_parts import describe_model
from tba_jax.run.peers import start_cluster

_SHARE_OF_MEMORY = 0.8  # programs and the allocator need the rest
_LENGTHS = (
    "task.max_prompt_tokens",
    "search.max_new_tokens",
    "eval.max_new_tokens",
    "task.num_eval_prompts",
)
_ROWS = "batch.micro_batch_rows"


def choose(config: Config, saved: Mapping[str, Any]) -> tuple[Config, list[str]]:
    """Return a config in which everything is chosen, and a line for each choice.

    Args:
        config: validated.
        saved: the config of the run that is resumed, field by field; empty for a new run.

    Raises:
        ValueError: data or model are not usable.
    """
    lines, mode = [], MODES[config.placement]
    if not config.task.max_prompt_tokens:
        if saved:
            config = replace(config, {name: saved[name] for name in _LENGTHS})
        else:
            config, line = with_lengths(config)
            lines.append(line)
    if not config.batch.micro_batch_rows:
        if saved:
            config = replace(config, {_ROWS: saved[_ROWS]})
        elif not (mode.spans_hosts or mode.searches_elsewhere):  # their devices are not seen here
            start_cluster(config)
            import jax

            model_config = describe_model(config, with_weights=False).config
            rows, line = fitting_rows(config, model_config, jax.local_devices())
            config = replace(config, {_ROWS: rows})
            lines += [line] if line else []
    return config, lines


def fitting_rows(
    config: Config, model_config: TransformerConfig, devices: list[Any], memory_bytes: float = 0.0
) -> tuple[int, str]:
    """Return the rows of a micro-batch that fit the trainer's devices, 0 for all; and why.

    Args:
        config, model_config: of the run.
        devices: of this process.
        memory_bytes: of each; 0: as they report.

    Raises:
        PlacementError: the devices cannot be divided as the placement says.
    """
    found = arrange(config.placement, devices, asked(config))
    memory_bytes = memory_bytes or _memory_bytes(devices)
    parts = found.mesh.data * found.mesh.fsdp
    free = _SHARE_OF_MEMORY * memory_bytes
    free -= estimates.held_bytes(config, model_config) / found.mesh.size
    if found.layout.shares_devices:
        of_searcher = estimates.searcher_bytes(config, model_config, devices, lambda group: 0.0)
        free -= of_searcher(config.search.num_devices)
    options = fitting.micro_batch_options(config, parts)
    platform = platform_of(devices[0])
    fits = [
        n
        for n in options
        if estimates.step_bytes(n // parts, config, model_config, found.mesh, platform) <= free
    ]
    rows = max(fits, default=options[0])
    if rows == options[-1]:
        return 0, ""
    return rows, (
        f"chosen for devices of {memory_bytes / 2**30:.1f} GiB: {_ROWS}={rows} of {options[-1]} "
        f"rows at a time (--config.{_ROWS}=N chooses another number)"
    )


def _memory_bytes(devices: list[Any]) -> float:
    """Return the memory of a device; of the CPU backend its share of the machine's."""
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    if limit:
        return float(limit)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(devices)
