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
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from tba_jax.config.devices import cpu_devices
from tba_jax.config.resolved import remat_of
from tba_jax.config.schema import (
    Config,
    ConfigError,
    default_config,
    freeze,
    get_field,
    plain,
    replace,
)
from tba_jax.devices.platform import platform_of
from tba_jax.devices.sharding import batch_axes
from tba_jax.models.hf import config_json
from tba_jax.models.transformer import TransformerConfig, num_params
from tba_jax.planning import chips, choices, estimates, fitting, layouts
from tba_jax.planning.programs import Planned, plan_programs, residents
from tba_jax.planning.shapes import judge_bytes
from tba_jax.run import model_parts
from tba_jax.run.peers import divide_cpu

_ROWS, _SLOTS, _REMAT = "batch.micro_batch_rows", "search.num_slots", "model.remat"


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to one request.

    Args:
        request: `config`, nested fields; `topology`, "" for the attached devices; `model`, a
            config.json; `judges`, role -> config.json of another model; `cache`, compilation
            cache folder or ""; `program`, a name, or "" for a description of the run;
            `chooses`, whether to choose the placement; `fixed`, settings that keep their values.

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
        divide_cpu(cpu_devices(config))
        devices = jax.local_devices()
        chip = chips.attached_chip(devices) if not request["program"] else None
    model_config = config_json.transformer_config(request["model"])
    model_config = model_parts.with_settings(model_config, config)
    if request["program"]:
        config = choices.for_platform(config, platform_of(devices[0]))
        placement = layouts.place(config, devices).placement
        found = plan_programs(config, model_config, placement)
        return _compile(next(p for p in found if p.name == request["program"]))
    assert chip is not None
    return describe(request, config, model_config, devices, chip)


def describe(
    request: Mapping[str, Any],
    config: Config,
    model_config: TransformerConfig,
    devices: Sequence[Any],
    chip: chips.Chip,
) -> dict[str, Any]:
    """Return placement, resident memory and programs of a run."""
    judges = functools.partial(_judge_bytes, config, request["judges"])
    given = config = choices.for_platform(config, platform_of(devices[0]))
    if request["chooses"] and config.placement != "whole_hosts":
        if _ROWS not in request["fixed"]:
            config = replace(config, {_ROWS: 0})
        config, choice = layouts.choose(config, model_config, devices, chip.usable_bytes, judges)
        choice = choice._replace(fields=layouts.changes(given, config))
    else:
        config = choices.on_devices(config, model_config, devices, chip.usable_bytes)
        fields = {name: get_field(config, name) for name, _ in config.chosen}
        choice = layouts.place(config, devices)._replace(fields=fields)
    placement = choice.placement
    group = placement.searcher_meshes[0].devices.size
    groups: dict[str, Any] = residents(config, model_config, placement)
    for name, held in judge_bytes(config, request["judges"], group).items():
        groups[name]["residents"] |= held
    mesh = placement.trainer_mesh
    groups["trainer"] |= {
        "count": 1,
        "devices": mesh.size,
        "mesh": " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items()),
    }
    groups["searcher"] |= {"count": choice.num_groups, "devices": group, "mesh": f"model {group}"}
    return {
        "config": plain(config),
        "chip": dataclasses.asdict(chip),
        "num_devices": len(devices),
        "num_hosts": len({d.process_index for d in devices}),
        "layout": choice.name,
        "shares_devices": choice.shares_devices,
        "changed_fields": choice.fields,
        "num_params": num_params(model_config),
        "groups": groups,
        "lower": lowered(config, _parts(mesh), list(mesh.devices.flat), request["fixed"]),
        "programs": [
            {
                "name": p.name,
                "group": p.group,
                "variants": p.variants,
                "with_cache": p.with_cache,
                "flops": p.work.num_flops,
                "num_bytes": p.work.num_bytes,
            }
            for p in plan_programs(config, model_config, placement)
        ],
    }


def _judge_bytes(config: Config, models: Mapping[str, Any], group_size: int) -> float:
    return sum(judge_bytes(config, models, group_size)["searcher"].values())


def _parts(mesh: Any) -> int:
    return math.prod(mesh.shape[axis] for axis in batch_axes(mesh))


def lowered(
    config: Config, num_parts: int, trainer: Sequence[Any], fixed: Collection[str]
) -> dict[str, dict[str, Any]]:
    """Return group -> fields of the next smaller size that a run would choose; {}: there is none.

    The trainer gets fewer micro-batch rows, or whole layers computed again once fewer rows with
    kept products would be slower. A searcher gets half of its decode slots.

    Args:
        num_parts: parts into which the trainer's mesh divides rows.
        trainer: devices of the trainer.
        fixed: settings that keep their values.
    """
    found: dict[str, dict[str, Any]] = {"trainer": {}, "searcher": {}}
    if _SLOTS not in fixed and (slots := estimates.num_slots(config)) > 1:
        found["searcher"] = {_SLOTS: slots // 2}
    if _ROWS in fixed:
        return found
    is_networked = fitting.crosses_network(trainer)
    useful = fitting.useful_rows(config, num_parts, is_networked=is_networked)
    now = config.batch.micro_batch_rows or config.batch.num_prompts * config.objective.group_size
    smaller, remat = [n for n in useful if n < now], remat_of(config)
    if remat == "dots" and _REMAT not in fixed:
        least = fitting.least_rows(config, num_parts, is_networked=is_networked)
        smaller = [n for n in smaller if n >= least]
        if not smaller:
            smaller, remat = useful, "layers"
    if smaller:
        found["trainer"] = {_ROWS: smaller[-1], _REMAT: remat}
    return found


def _compile(planned: Planned) -> dict[str, Any]:
    """Compile a program; return its memory on each device by kind, and the compiler's time."""
    lowered = planned.lower()
    start = time.perf_counter()
    memory = (compiled := lowered.compile()).memory_analysis()
    seconds = time.perf_counter() - start
    if memory is None:
        raise ValueError("this backend does not report the memory of compiled programs")
    del compiled
    hbm = dict(planned.resident)
    # Padding of resident arrays by the device's layout counts as input.
    hbm["inputs"] = max(0.0, memory.argument_size_in_bytes - sum(planned.resident.values()))
    hbm[planned.result] = max(0.0, memory.output_size_in_bytes - memory.alias_size_in_bytes)
    hbm["temporaries"] = float(memory.temp_size_in_bytes)
    hbm["code"] = float(memory.generated_code_size_in_bytes)
    return {"hbm": hbm, "compile_s": seconds}


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
