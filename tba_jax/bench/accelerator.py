# SPDX-License-Identifier: Apache-2.0
"""Command: measure this machine's accelerator in ten minutes, most important parts first.

    python -m tba_jax.bench.accelerator --out=DIR [--budget_s=600] [--parts=NAME,...] [--dry_run]

Parts: device, versions and measured rates; results of every program against CPU; planned against
measured memory; decoding against the memory rate; the train step against the matmul rate; the main
job with the asynchronous and the synchronous driver. Each part runs in its own process with a time
limit and writes its result to DIR when it ends, so a part that fails, hangs or exceeds its limit
does not affect the other parts. DIR contains results.json, page.md and the output of every part.
--dry_run runs all parts at tiny sizes on CPU in a minute or two. --probe=NAME runs one of the first
three parts in this process and prints its result.
"""

import dataclasses
import datetime
import functools
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.bench import harness, train_step
from tba_jax.bench.harness import SHAPES, Figures
from tba_jax.config.command_line import override
from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.devices.platform import platform_of, prepare_process
from tba_jax.devices.site import any_device
from tba_jax.models.hf import config_json
from tba_jax.models.logprobs import token_logprobs
from tba_jax.models.scoring import Scoring
from tba_jax.models.transformer import TransformerConfig, init_params
from tba_jax.planning import layouts, roofline
from tba_jax.planning.programs import Planned, plan_programs
from tba_jax.planning.shapes import config_of
from tba_jax.run.model_parts import model_path

_DRY_PATIENCE = 10  # a dry run must also pass on slow machines


class Part(NamedTuple):
    """One part of the measurement.

    Attributes:
        name: stem of the part's files.
        question: question that the part answers.
        limit_s: time limit of the part's process.
        command: module and arguments, as after `python -m`; {out} stands for the part's folder.
        dry: arguments of a dry run; later arguments override earlier ones.
    """

    name: str
    question: str
    limit_s: float
    command: str
    dry: str


def _probe(name: str, question: str, limit_s: float) -> Part:
    return Part(name, question, limit_s, f"tba_jax.bench.accelerator --probe={name}", "--dry_run")


def _bench(name: str, question: str, options: str, dry: str) -> Part:
    command = f"tba_jax.bench.{name} --repeats=1 --json --dtype=bfloat16 {options}"
    return Part(name, question, 150, command, dry)


def _job(driver: str) -> Part:
    question = f"How long does the main job take with driver={driver}?"
    command = "tba_jax.main --config=math:arithmetic --config.num_steps=200 --workdir={out}"
    dry = "--config.num_steps=2 --config.task.num_eval_prompts=8"
    return Part(driver, question, 120, f"{command} --config.driver={driver}", dry)


PARTS = (
    _probe("device", "Which device, which versions, and which measured rates?", 60),
    _probe("parity", "Do programs give the same results as on CPU?", 120),
    _probe("memory", "Does the device use as much memory as planned?", 120),
    _bench(
        "decode",
        "How close is decoding to the memory rate (1.5B, 128 responses, bfloat16)?",
        "--shape=1.5b --num_prompts=128 --prompt_tokens=256",
        "--shape=tiny --num_prompts=2 --prompt_tokens=8 --max_new_tokens=8",
    ),
    _bench(
        "train_step",
        "How close is the train step to the matmul rate (1.5B, bfloat16)?",
        "--model_shape=1.5b",
        "--model_shape=tiny --steps=1 --num_prompts=2 --prompt_tokens=8 --response_tokens=8",
    ),
    _job("async"),
    _job("sync"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if every part succeeded."""
    parser = harness.make_parser("accelerator", __doc__)
    names = [part.name for part in PARTS]
    probes = {"device": device, "parity": parity, "memory": memory}
    parser.add_argument("--out", type=Path, help="folder for results")
    parser.add_argument(
        "--budget_s", type=float, default=600.0, help="time limit of all parts together"
    )
    parser.add_argument("--parts", default=",".join(names), help="parts to run, with commas")
    parser.add_argument("--probe", choices=probes, help="print the result of one part")
    parser.add_argument("--dry_run", action="store_true", help="run at tiny sizes on CPU")
    args = parser.parse_args(argv)
    prepare_process()
    wanted = args.parts.split(",")
    try:
        if args.probe:
            print(json.dumps(probes[args.probe](args.dry_run)))
            return 0
        if strays := [n for n in wanted if n not in names]:
            raise ValueError(f"--parts: no {strays[0]!r}; there are {', '.join(names)}")
        if args.out is None:
            raise ValueError("--out is missing. Give a folder for the results")
    except ValueError as error:
        print(f"accelerator: {error}", file=sys.stderr)
        return 1 if args.probe else 2
    args.out.mkdir(parents=True, exist_ok=True)
    parts = [part for part in PARTS if part.name in wanted]
    results = measure(parts, args.out.absolute(), args.budget_s, is_dry=args.dry_run)
    print(args.out / "page.md")
    return 0 if all(found["status"] == "done" for found in results.values()) else 1


def measure(
    parts: Sequence[Part], out: Path, budget_s: float, *, is_dry: bool
) -> dict[str, Figures]:
    """Run the parts one after the other, and write each result when the part ends.

    Args:
        parts: parts, most important first.
        out: folder of the results.
        budget_s: time limit of all parts together; after it, no part is started.
        is_dry: run at tiny sizes on CPU.
    """
    results: dict[str, Figures] = {}
    end = time.monotonic() + budget_s
    for part in parts:
        left = end - time.monotonic()
        if left <= 0:
            status = f"not started within {budget_s:.0f} s (--budget_s)"
            results[part.name] = {"question": part.question, "status": status, "figures": {}}
        else:
            limit_s = part.limit_s * (_DRY_PATIENCE if is_dry else 1)
            results[part.name] = run_part(part, out, min(left, limit_s), is_dry=is_dry)
        print(f"{part.name}: {results[part.name]['status']}", flush=True)
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        found = {"date": date, "dry_run": is_dry, "parts": results}
        (out / "results.json").write_text(json.dumps(found, indent=1))
        (out / "page.md").write_text("\n".join(page(results, date, is_dry=is_dry)) + "\n")
    return results


def run_part(part: Part, out: Path, limit_s: float, *, is_dry: bool) -> Figures:
    """Run one part in its own process and return its result.

    Args:
        part: the part.
        out: folder for the part's files.
        limit_s: seconds after which the process and its children are ended.
        is_dry: run at tiny sizes on CPU.
    """
    log, run_folder = out / f"{part.name}.log", out / part.name
    log.unlink(missing_ok=True)
    words = f"{part.command} {part.dry}" if is_dry else part.command
    command = ["-m", *(x.replace("{out}", str(run_folder)) for x in shlex.split(words))]
    environment = os.environ | ({"JAX_PLATFORMS": "cpu"} if is_dry else {})
    start = time.monotonic()
    with harness.started([sys.executable, *command], log, environment) as process:
        try:
            code = process.wait(timeout=limit_s)
            status = "done" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            status = f"ended after its {limit_s:.0f} s"
    return {
        "question": part.question,
        "command": shlex.join(["python", *command]),
        "status": status,
        "seconds": round(time.monotonic() - start, 1),
        "figures": _figures(log, run_folder / "report.json"),
    }


def _figures(log: Path, report: Path) -> Figures:
    """Return the result of a part: the last JSON object in its log, or the report of a run."""
    if report.exists():
        return json.loads(report.read_text())
    for line in reversed(log.read_text(errors="replace").splitlines()):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except json.JSONDecodeError:  # the last object is incomplete
                continue
    return {}


def page(results: Mapping[str, Figures], date: str, *, is_dry: bool) -> Iterable[str]:
    """Yield the lines of the results as text; long lists are only in results.json."""
    yield "# One accelerator\n"
    if is_dry:
        yield "**A dry run on CPU at tiny sizes. Nothing here was measured on an accelerator.**\n"
    yield f"`python -m tba_jax.bench.accelerator`, {date}"
    for name, found in results.items():
        yield f"\n## {name}: {found['status']}\n"
        yield found["question"]
        if "command" in found:
            yield f"\n    {found['command']}\n\n{found['seconds']} s; it printed {name}.log"
        rows = dict(harness.flat(found["figures"]))
        if rows:
            yield "\n| | |\n|---|---|"
        for figure, value in rows.items():
            if isinstance(value, float):
                yield f"| {figure} | {value:,.4g} |"
            elif not isinstance(value, list) or len(value) <= 8:
                text = str(value).replace("|", "\\|")
                yield f"| {figure} | {text} |"


# --- probes ------------------------------------------------------------------

_ROWS, _PROMPT, _RESPONSE = 4, 96, 32
# Limit of relative differences. A float32 product on tensor cores keeps 10 bits of its factors,
# bfloat16 keeps 7.
_TOLERANCE = {"float32": 0.01, "bfloat16": 0.1}


def device(is_dry: bool) -> Figures:
    """Return versions, devices and measured rates of the first device."""
    found = jax.local_devices()
    names = ("jax", "jaxlib", "flax", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")
    rates = roofline.measure_rates("bfloat16", 2**24 if is_dry else 2**32)
    return {
        "versions": harness.versions(*names),
        "platform": platform_of(found[0]),
        "platform_version": found[0].client.platform_version,
        "device": found[0].device_kind,
        "num_devices": len(found),
        "memory_bytes": (found[0].memory_stats() or {}).get("bytes_limit"),
        "bytes_per_s": rates.bytes_per_s,
        "bfloat16_flops_per_s": rates.flops_per_s,
    }


def parity(is_dry: bool) -> Figures:
    """Compare a train step and the decoder at a small shape on the device with CPU in float32.

    Raises:
        ValueError: results differ by more than rounding; the message names them.
    """
    here, cpu = jax.local_devices()[0], jax.local_devices(backend="cpu")[0]
    shape = "tiny" if is_dry else "39m"
    job: dict[str, Any] = {"model_shape": shape, "dtype": "float32", "remat": "layers"}
    job |= {"num_prompts": 2, "group_size": 4, "prompt_tokens": 64, "response_tokens": 32}
    job |= {"micro_batch_rows": 4, "seed": 0, "side": "tba_jax"}
    wanted = train_step.first_update(job, cpu)
    found: Figures = {}
    for dtype in ("bfloat16",) if is_dry else _TOLERANCE:
        for name, value in train_step.first_update({**job, "dtype": dtype}, here).items():
            found[f"{name}.{dtype}"] = abs(value - wanted[name]) / abs(wanted[name])
    found["decoding.float32"] = _decoding_error(SHAPES[shape], here, cpu)
    far = [n for n, x in found.items() if not x <= _TOLERANCE[n.rsplit(".", 1)[1]]]
    if far:
        raise ValueError(f"{', '.join(far)} differ from CPU: {json.dumps(found)}")
    return {"device": here.device_kind, "difference_over_norm": found}


def _decoding_error(config: TransformerConfig, here: Any, cpu: Any) -> float:
    """Return the relative difference of the decoder's log-probs to those computed on CPU."""
    with jax.default_device(cpu):
        params = init_params(config, jax.random.key(0), jnp.float32)
    shape = (_ROWS, _PROMPT)
    prompts = np.random.default_rng(1).integers(0, config.vocab_size, shape).astype(np.int32)
    with jax.default_device(here):
        decoder = Decoder(
            config,
            compute_dtype=jnp.float32,
            eos_ids=(),
            pad_id=0,
            prompt_buckets=(_PROMPT,),
            max_length=_PROMPT + _RESPONSE,
            site=any_device(platform_of(here)),
        )
        decoded = decoder.decode(
            jax.device_put(params, here),
            list(prompts),
            num_samples=1,
            key=jax.random.key(2),
            settings=SamplingSettings(_RESPONSE),
        )
    rows = np.concatenate([prompts[:, None], decoded.tokens], axis=2)
    lengths = (np.full((_ROWS, 1), n, np.int32) for n in (_PROMPT, _RESPONSE))
    with jax.default_device(cpu):
        scored = jax.jit(
            functools.partial(
                token_logprobs, response_bucket=_RESPONSE, config=config, scoring=Scoring()
            )
        )(params, rows.astype(np.int32), *lengths)
    difference = np.asarray(decoded.token_logprobs) - np.asarray(scored)
    return float(np.linalg.norm(difference) / np.linalg.norm(scored))


def memory(is_dry: bool) -> Figures:
    """Return the estimated and the measured memory of a decode chunk and of a train step.

    The device reports the peak since the start of the process, so the smaller program runs first.
    """
    preset = "math:arithmetic" if is_dry else "math:gsm8k"
    devices = jax.local_devices()[:1]
    config = override(None, [f"--config={preset}", "--config.placement=shared"])
    config = dataclasses.replace(config, num_searchers=1)
    model_config = config_json.transformer_config(config_of(model_path(config)))
    placement = layouts.place(config, devices).placement
    planned = {p.program.name: p for p in plan_programs(config, model_config, placement)}
    names = ("decode_chunk", "train_step")
    return {
        "preset": preset,
        "device": devices[0].device_kind,
        "programs": {name: _measured(planned[name], devices[0]) for name in names},
    }


def _measured(planned: Planned, where: Any) -> Figures:
    """Compile a program, run it with zeros, and return both figures of its memory."""
    lowered = planned.lower()
    compiled = lowered.compile()
    compiled_bytes = harness.peak_bytes(compiled)
    args_info: Any = lowered.args_info
    arguments = jax.tree.map(
        lambda x, sharding: jax.device_put(jnp.zeros(x.shape, x.dtype), sharding),
        args_info[0],
        compiled.input_shardings[0],
    )
    jax.block_until_ready(compiled(*arguments))
    measured = (where.memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "compiled_bytes": compiled_bytes,
        "measured_bytes": measured,
        "measured_over_compiled": measured / compiled_bytes if measured else None,
    }


if __name__ == "__main__":
    sys.exit(main())
