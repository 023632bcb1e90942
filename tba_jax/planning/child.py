# SPDX-License-Identifier: Apache-2.0
"""Child processes that describe or compile a planned run, one process for each request.

A compiler may abort its process or take very long; the plan reports both and continues. A child
reads one pickled `Request` from standard input and writes its pickled answer to standard output.
"""

import ctypes
import dataclasses
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from tba_jax.config.resolved import cpu_devices, remat_of
from tba_jax.config.schema import Config, flatten, replace
from tba_jax.devices.platform import platform_of
from tba_jax.devices.sharding import batch_axes
from tba_jax.models.hf import families
from tba_jax.models.transformer import TransformerConfig, num_params
from tba_jax.planning import chips, choices, layouts, sizes
from tba_jax.planning.chips import Chip
from tba_jax.planning.programs import Planned, groups_of, plan_programs
from tba_jax.planning.shapes import judge_bytes
from tba_jax.planning.verdict import Facts, Program
from tba_jax.run.peers import divide_cpu

_CODE = "from tba_jax.planning.child import main; main()"
ROWS, SLOTS, REMAT = "batch.micro_batch_rows", "search.num_slots", "model.remat"
_TIMEOUT_S = 1800  # of each process
_REMEDY = "Set other mesh sizes or another --config.placement; docs/plan.md has those of each chip"
_ERROR = re.compile(r"[\w.]*(?:Error|Exception|Interrupt)(?::|$)")


class Request(NamedTuple):
    """Request to a child process.

    Attributes:
        topology: name of the slice; "" for the attached devices.
        model: contents of the model's config.json.
        judges: role -> contents of config.json of another model.
        cache: folder of the compilation cache, or "".
        fixed: settings that keep their values.
        config: config to describe, or the described config of a program.
        program: program to compile; None: describe the run.
        chooses: whether a description chooses the placement.
    """

    topology: str
    model: Mapping[str, Any]
    judges: Mapping[str, Mapping[str, Any]]
    cache: str
    fixed: Collection[str]
    config: Config
    program: Program | None = None
    chooses: bool = False


def ask(request: Request) -> Facts | Program:
    """Return the described run, or the compiled program, from a child process.

    Raises:
        ValueError: the request is invalid.
    """
    environment = dict(os.environ)
    if request.topology:
        environment |= chips.NO_TPU
    start = time.monotonic()
    try:
        child = subprocess.run(
            [sys.executable, "-c", _CODE],
            input=pickle.dumps(request),
            capture_output=True,
            env=environment,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return _failed(request, failure=f"not compiled within {_TIMEOUT_S} s")
    if child.returncode == 0:
        answer = pickle.loads(child.stdout)
        if isinstance(answer, str):
            raise ValueError(answer)
        return answer
    seconds = time.monotonic() - start
    return _failed(request, **_reason(child.returncode, child.stderr.decode(), seconds))


def _failed(request: Request, **fields: Any) -> Program:
    """Return the program of a request with its failure; a failed description is an error."""
    if request.program is None:
        raise ValueError(fields["failure"])
    return dataclasses.replace(request.program, **fields)


def _reason(returncode: int, stderr: str, seconds: float) -> dict[str, Any]:
    """Return the fields of a `Program` that describe why a child process failed."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()] or ["no output"]
    if returncode < 0:
        checks = [line for line in lines if "Check failed" in line or line.startswith("F0")]
        how = {-6: "aborted", -9: "was killed (host memory may have run out)"}
        name = how.get(returncode, f"ended with signal {-returncode}")
        reason = _brief([*checks, lines[-1]][0])
        remedy = f". {_REMEDY}" if returncode == -6 else ""
        return {"failure": f"the compiler {name} after {seconds:.0f} s: {reason}{remedy}"}
    if exhausted := [line for line in lines if "RESOURCE_EXHAUSTED" in line]:
        reason = exhausted[-1].split("RESOURCE_EXHAUSTED:")[-1].strip()
        return {"failure": _brief(reason), "is_too_large": True}
    errors = [line for line in lines if _ERROR.match(line)]
    return {"failure": _brief((errors or lines)[-1])}


def _brief(line: str) -> str:
    return line if len(line) <= 240 else f"{line[:160]} ... {line[-70:]}"


def answer(request: Request) -> Facts | Program:
    """Describe a run or compile a program in this process.

    Raises:
        ValueError: the request is invalid.
    """
    config, chip = request.config, None
    if request.cache:
        jax.config.update("jax_compilation_cache_dir", request.cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if request.topology:
        topology = chips.parse_topology(request.topology)
        chip, devices = topology.chip, topology.devices()
    else:
        divide_cpu(cpu_devices(config))
        devices = jax.local_devices()
    model_config = families.transformer_config(request.model)
    model_config = dataclasses.replace(model_config, attention=config.model.attention)
    config = choices.for_platform(config, platform_of(devices[0]))
    if request.program is None:
        chip = chip or chips.attached_chip(devices)
        return _describe(request, config, model_config, devices, chip)
    found = plan_programs(config, model_config, layouts.place(config, devices))
    return _compile(next(p for p in found if p.program.name == request.program.name))


def _describe(
    request: Request,
    config: Config,
    model_config: TransformerConfig,
    devices: Sequence[Any],
    chip: Chip,
) -> Facts:
    """Return placement, resident memory and programs of a run."""
    given = flatten(config)

    def of_judges(group_size: int) -> float:
        return sum(judge_bytes(config, request.judges, group_size)["searcher"].values())

    if request.chooses and config.placement != "hosts":
        if ROWS not in request.fixed:
            config = replace(config, {ROWS: 0})
        most = chip.usable_bytes
        config, found = layouts.choose(config, model_config, devices, most, of_judges)
    else:
        config = choices.on_devices(config, model_config, devices, chip.usable_bytes)
        found = layouts.place(config, devices)
    trainer, searcher = groups_of(config, model_config, found)
    judges = judge_bytes(config, request.judges, searcher.devices)
    return Facts(
        config=config,
        changed_fields={name: x for name, x in flatten(config).items() if given[name] != x},
        chip=chip,
        num_devices=len(devices),
        num_hosts=len({d.process_index for d in devices}),
        layout=found.placement,
        shares_devices=found.placement == "shared",
        num_params=num_params(model_config),
        trainer=trainer._replace(residents={**trainer.residents, **judges["trainer"]}),
        searcher=searcher._replace(
            count=found.num_searchers, residents={**searcher.residents, **judges["searcher"]}
        ),
        lower=lowered(config, found.trainer_mesh, request.fixed),
        programs=[p.program for p in plan_programs(config, model_config, found)],
    )


def lowered(config: Config, mesh: Mesh, fixed: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return group -> fields of the next smaller size that a run would choose; {}: there is none.

    The trainer gets fewer micro-batch rows; once they would be fewer than a group, it computes
    whole layers again instead. A searcher gets half of its decode slots.

    Args:
        mesh: mesh of the trainer.
        fixed: settings that keep their values.
    """
    found: dict[str, dict[str, Any]] = {"trainer": {}, "searcher": {}}
    if SLOTS not in fixed and config.search.slots > 1:
        found["searcher"] = {SLOTS: config.search.slots // 2}
    if ROWS in fixed:
        return found
    num_parts = math.prod(mesh.shape[axis] for axis in batch_axes(mesh))
    options = sizes.micro_batch_options(config, num_parts)
    now = config.batch.micro_batch_rows or config.batch.num_prompts * config.objective.group_size
    smaller, remat = [n for n in options if n < now], remat_of(config)
    if remat == "dots" and REMAT not in fixed:
        smaller = [n for n in smaller if n >= config.objective.group_size]
        if not smaller:
            smaller, remat = options, "layers"
    if smaller:
        found["trainer"] = {ROWS: smaller[-1], REMAT: remat}
    return found


def _compile(planned: Planned) -> Program:
    """Compile a program; return it with its memory on each device by kind, and the time."""
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
    return dataclasses.replace(planned.program, hbm=hbm, compile_s=seconds)


def main() -> None:
    """Answer the request on standard input; a refusal of it is a text."""
    if sys.platform == "linux":  # end with a killed plan, although the compiler may run for long
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    out = os.dup(1)
    os.dup2(2, 1)  # whatever libraries print goes to standard error
    request = pickle.load(sys.stdin.buffer)
    try:
        found = answer(request)
    except ValueError as error:
        found = str(error).splitlines()[0]
    with os.fdopen(out, "wb") as file:
        pickle.dump(found, file)
