# SPDX-License-Identifier: Apache-2.0
"""Child process of a plan: describes a run on a slice, or compiles one of its programs.

    python -m tba_jax.planning.compile_one PARENT_PID < REQUEST.json

The request contains config, topology, model shape and the task. The answer is the last line of
standard output; it may be a refusal of an invalid request. If the compiler aborts, this process
ends, and `children` reports the end.
"""

import dataclasses
import functools
import json
import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tba_jax.config.resolved import writes_versions
from tba_jax.config.schema import Config, ConfigError, default_config, freeze, plain
from tba_jax.devices.placement import MODES
from tba_jax.devices.platform import platform_of
from tba_jax.devices.sharding import batch_axes
from tba_jax.models.hf import config_json
from tba_jax.models.transformer import num_params
from tba_jax.planning import chips, choices, fitting, hlo_cost, layouts
from tba_jax.planning.judges import judge_residents, plan_judges
from tba_jax.planning.minimum import minima
from tba_jax.planning.programs import Planned, plan_programs, residents, sizes_of
from tba_jax.run import model_parts
from tba_jax.run.model_parts import with_settings


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to one request.

    Args:
        request: `config`, nested fields; `topology`, "" for the attached devices; `model`, a
            config.json; `judges`, role -> config.json of another model; `cache`, compilation
            cache folder or ""; `program`, a name, or "" for a description of the run;
            `chooses`, whether to choose the placement.

    Raises:
        ValueError: the request is invalid.
    """
    edited = default_config()
    edited.update(request["config"])
    config = freeze(edited)
    if request["cache"]:
        jax.config.update("jax_compilation_cache_dir", request["cache"])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if request["topology"]:
        topology = chips.parse_topology(request["topology"])
        chip, devices = topology.chip, topology.devices()
    else:
        if config.num_cpu_devices > 1:
            jax.config.update("jax_num_cpu_devices", config.num_cpu_devices)
        devices = chips.local_devices()
        chip = chips.attached_chip(devices) if not request["program"] else None
    model_config = with_settings(config_json.transformer_config(request["model"]), config)
    config, choice = _place(request, config, model_config, devices, chip)
    if request["program"]:
        planned = _programs(config, model_config, request["judges"], choice)
        wanted = next(p for p in planned if p.name == request["program"])
        mesh = choice.placement.trainer_mesh
        hosts = len({d.process_index for d in mesh.devices.flat})
        # The devices of a searcher belong to one host.
        return _compile(wanted, mesh.size // hosts if wanted.group == "trainer" else 0)
    assert chip is not None
    least = minima(config, model_config, choice.placement)
    return {
        "config": plain(config),
        "chip": dataclasses.asdict(chip),
        "platform": devices[0].platform,
        "num_devices": len(devices),
        "num_hosts": len({d.process_index for d in devices}),
        "layout": choice.name,
        "shares_devices": choice.shares_devices,
        "has_remote_searchers": MODES[config.placement].has_remote_searchers,
        "changed_fields": choice.fields,
        "notes": choice.notes,
        "num_params": num_params(model_config),
        "groups": _groups(config, model_config, request["judges"], choice),
        "sizes": _sizes(config, model_config, choice, devices),
        "trainer_options": layouts.usable_options(config, model_config, devices),
        "programs": [
            {
                "name": p.name,
                "group": p.group,
                "sizes": p.sizes,
                "variants": p.variants,
                "with_cache": p.with_cache,
                "calls_per_round": p.calls_per_round,
                "minimum": least[p.name]._asdict() if p.name in least else None,
            }
            for p in _programs(config, model_config, request["judges"], choice)
        ],
    }


def _place(
    request: Mapping[str, Any],
    config: Config,
    model_config: Any,
    devices: Sequence[Any],
    chip: chips.Chip | None,
) -> tuple[Config, layouts.Choice]:
    """Return the config and its placement, with the sizes that a run would choose."""
    config = choices.for_platform(config, model_config, platform_of(devices[0]))
    if request["program"]:
        return config, layouts.place(config, devices)
    assert chip is not None
    if request["chooses"] or not config.num_searchers:
        return layouts.choose(
            config,
            model_config,
            devices,
            chip.usable_bytes,
            functools.partial(_judge_bytes, config, request["judges"], devices),
            request.get("trainer_devices", 0.0),
        )
    config = choices.on_devices(config, model_config, devices, chip.usable_bytes)
    return config, layouts.place(config, devices)


def _judge_bytes(
    config: Config, judges: Mapping[str, Any], devices: Sequence[Any], group_size: int
) -> float:
    """Return the judges' memory on a group's first device; infinity if they do not fit."""
    mesh = Mesh(np.array(devices[:group_size]), ("model",))
    try:
        return sum(judge_residents(config, judges, mesh)["searcher"].values())
    # The group does not divide the judges. If no group does, `_groups` raises the reason.
    except ValueError:
        return math.inf


def _programs(
    config: Config, model_config: Any, judges: Mapping[str, Any], choice: layouts.Choice
) -> list[Planned]:
    return [
        *plan_programs(config, model_config, choice.placement),
        *plan_judges(config, model_config, judges, choice.placement),
    ]


def _groups(
    config: Config, model_config: Any, judges: Mapping[str, Any], choice: layouts.Choice
) -> dict[str, Any]:
    mesh = choice.placement.trainer_mesh
    found: dict[str, Any] = residents(config, model_config, choice.placement)
    judged = judge_residents(config, judges, choice.placement.searcher_meshes[0])
    for group, held in judged.items():
        found[group]["residents"] |= held
        found[group]["judges"] = list(held)
    found["trainer"] |= {
        "count": 1,
        "devices": mesh.devices.size,
        "mesh": " x ".join(f"{name} {size}" for name, size in mesh.shape.items()),
    }
    size = choice.placement.searcher_meshes[0].devices.size
    found["searcher"] |= {
        "count": choice.num_groups,
        "devices": size,
        "mesh": f"model {size}",
    }
    return found


def _sizes(
    config: Config, model_config: Any, choice: layouts.Choice, devices: Sequence[Any]
) -> dict[str, Any]:
    sizes = sizes_of(config)
    rows, k = sizes.prompts * sizes.group, sizes.group
    group = choice.placement.searcher_meshes[0].devices.size
    hosts = len({d.process_index for d in devices})
    per_host = len(devices) // hosts
    apart = choice.shares_devices or writes_versions(config)
    of_trainer = 0 if apart else choice.placement.trainer_mesh.size // hosts
    groups = fitting.group_sizes(model_config, per_host - of_trainer, per_host, devices)
    mesh = choice.placement.trainer_mesh
    parts = math.prod(mesh.shape[x] for x in batch_axes(mesh))
    is_networked = fitting.crosses_network(list(mesh.devices.flat))
    return sizes._asdict() | {
        "batch_rows": rows,
        "round_rows": sizes.round_prompts * sizes.samples,
        "prompts_per_round": sizes.round_prompts,
        "response_tokens": config.search.max_new_tokens / 2,
        "wanted_ratio": config.replay.recency_prob * sizes.samples / k,
        "micro_batch_rows": model_parts.micro_batch_rows(config) or rows,
        "micro_batch_options": fitting.micro_batch_options(config, parts),
        "useful_rows": fitting.useful_rows(config, parts, is_networked=is_networked),
        "least_rows": fitting.least_rows(config, parts, is_networked=is_networked),
        "next_group": min((g for g in groups if g > group), default=0),
    }


def _compile(planned: Planned, devices_per_host: int) -> dict[str, Any]:
    lowered = planned.lower()
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    memory, text = compiled.memory_analysis(), compiled.as_text()
    if memory is None or text is None:
        raise ValueError("this backend does not report the memory of compiled programs")
    cost = hlo_cost.program_cost(
        text, unknown_trips=planned.unknown_trips, devices_per_host=devices_per_host
    )
    hbm = dict(planned.resident)
    # Padding of resident arrays by the device's layout counts as input.
    hbm["inputs"] = max(0.0, memory.argument_size_in_bytes - sum(planned.resident.values()))
    hbm[planned.result] = max(0.0, memory.output_size_in_bytes - memory.alias_size_in_bytes)
    hbm["temporaries"] = float(memory.temp_size_in_bytes)
    hbm["code"] = float(memory.generated_code_size_in_bytes)
    return {
        "hbm": hbm,
        "flops": cost.flops,
        "num_bytes": cost.num_bytes,
        "collective_bytes": cost.collective_bytes,
        "network_bytes": cost.network_bytes,
        "launches": cost.launches,
        "uncounted": list(cost.uncounted),
        "compile_s": seconds,
    }


def main() -> int:
    """Answer the request on standard input."""
    parent = int(sys.argv[1])

    def exit_with_parent() -> None:
        # A killed plan cannot stop its children, whose compiler may run for minutes.
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=exit_with_parent, name="exit-with-parent", daemon=True).start()
    request = json.loads(sys.stdin.read())
    try:
        out = answer(request)
    except (ConfigError, ValueError) as error:
        out = {"refusal": str(error).splitlines()[0]}
    print(json.dumps(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
