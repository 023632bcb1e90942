# SPDX-License-Identifier: Apache-2.0
"""Command: measure this machine's accelerator in ten minutes, most important parts first.

    python -m tba_jax.bench.accelerator --out=DIR [--budget_s=600] [--parts=NAME,...] [--dry_run]

Parts: device, versions and measured rates; results of every program against CPU; decoding against
the memory rate; the train step against the matmul rate, and its memory against the compiler's
figure; the main job with the asynchronous and the synchronous driver. Each part runs in its own
process with a time limit and writes its result to DIR/results.json when it ends, so a part that
fails, hangs or exceeds its limit does not affect the other parts. DIR has the output of every part.
--dry_run runs all parts at tiny sizes on CPU in a minute or two. --probe=NAME runs one of the first
two parts in this process and prints its result.
"""

import datetime
import functools
import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.bench import decode, harness, train_step
from tba_jax.bench.harness import SHAPES, Figures
from tba_jax.commands.entry_point import make_parser
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.devices.platform import prepare_process
from tba_jax.models.logprobs import Scoring, row_token_logprobs
from tba_jax.models.transformer import TransformerConfig, init_params
from tba_jax.planning import roofline
from tba_jax.report.files import flat

LIMIT_S = 150  # of a part
_PROBE = "tba_jax.bench.accelerator --probe"
_BENCH = "--repeats=1 --json --dtype=bfloat16"
_JOB = "tba_jax.main --config=math --config.num_steps=200 --workdir={out} --config.driver"
_DRY_JOB = "--config.num_steps=2 --config.task.num_eval_prompts=8"
PARTS: Mapping[str, tuple[str, str, str]] = {
    "device": ("Which device, versions and measured rates?", f"{_PROBE}=device", "--dry_run"),
    "parity": ("Do programs give the results of CPU?", f"{_PROBE}=parity", "--dry_run"),
    "decode": (
        "How close is decoding to the memory rate (1.5B, 128 responses, bfloat16)?",
        f"tba_jax.bench.decode {_BENCH} --shape=1.5b --num_prompts=128 --prompt_tokens=256",
        "--shape=tiny --num_prompts=2 --prompt_tokens=8 --max_new_tokens=8",
    ),
    "train_step": (
        "How close is the train step to the matmul rate (1.5B, bfloat16)?",
        f"tba_jax.bench.train_step {_BENCH} --model_shape=1.5b",
        "--model_shape=tiny --steps=1 --num_prompts=2 --prompt_tokens=8 --response_tokens=8",
    ),
    "async": ("How long does the main job take with driver=async?", f"{_JOB}=async", _DRY_JOB),
    "sync": ("How long does the main job take with driver=sync?", f"{_JOB}=sync", _DRY_JOB),
}
"""Name of a part, which is also the stem of its files -> (the question that it answers, its module
and arguments, as after `python -m`, arguments of a dry run, which override them). {out} stands for
the part's folder. The most important parts come first."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if every part succeeded."""
    parser = make_parser("bench.accelerator", __doc__)
    probes = {"device": device, "parity": parity}
    parser.add_argument("--out", type=Path, help="folder for results")
    parser.add_argument(
        "--budget_s", type=float, default=600.0, help="time limit of all parts together"
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to run, with commas")
    parser.add_argument("--probe", choices=probes, help="print the result of one part")
    parser.add_argument("--dry_run", action="store_true", help="run at tiny sizes on CPU")
    args = parser.parse_args(argv)
    prepare_process()
    if args.probe:
        try:
            print(json.dumps(probes[args.probe](args.dry_run)))
        except ValueError as error:
            print(f"accelerator: {error}", file=sys.stderr)
            return 1
        return 0
    wanted = args.parts.split(",")
    if strays := [n for n in wanted if n not in PARTS]:
        parser.error(f"--parts: no {strays[0]!r}; there are {', '.join(PARTS)}")
    if args.out is None:
        parser.error("--out is missing. Give a folder for the results")
    args.out.mkdir(parents=True, exist_ok=True)
    parts = {name: part for name, part in PARTS.items() if name in wanted}
    results = measure(parts, args.out.absolute(), args.budget_s, is_dry=args.dry_run)
    print(args.out / "results.json")
    return 0 if all(found["status"] == "done" for found in results.values()) else 1


def measure(
    parts: Mapping[str, tuple[str, str, str]], out: Path, budget_s: float, *, is_dry: bool
) -> dict[str, Figures]:
    """Run each part in its own process, and write all results when a part ends.

    Args:
        parts: some of `PARTS`.
        out: folder of the results.
        budget_s: time limit of all parts together; after it, no part is started.
        is_dry: run at tiny sizes on CPU.
    """
    results: dict[str, Figures] = {}
    env = os.environ | ({"JAX_PLATFORMS": "cpu"} if is_dry else {})
    end = time.monotonic() + budget_s
    for name, (question, words, dry) in parts.items():
        log, workdir = out / f"{name}.log", out / name
        log.unlink(missing_ok=True)
        words = shlex.split(f"{words} {dry}" if is_dry else words)
        command = ["-m", *(x.replace("{out}", str(workdir)) for x in words)]
        start, status, figures = time.monotonic(), "done", {}
        try:
            if start > end:
                raise ValueError(f"not started within {budget_s:.0f} s (--budget_s)")
            limit_s = min(end - start, LIMIT_S * (10 if is_dry else 1))  # CPUs may be slow
            harness.run_processes(name, [[sys.executable, *command]], log, env, limit_s)
            # a run writes a report, and other parts print a line
            report = workdir / "report.json"
            lines = [x for x in log.read_text().splitlines() if x.startswith("{")]
            figures = json.loads(report.read_text() if report.exists() else lines[-1])
        except ValueError as error:
            status = str(error)
        print(f"\n{name}: {status}. {question}")
        for figure, value in flat(figures).items():
            print(f"    {figure}: {value}")
        results[name] = {
            "question": question,
            "command": shlex.join(["python", *command]),
            "status": status,
            "seconds": round(time.monotonic() - start, 1),
            "figures": figures,
        }
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        found = {"date": date, "dry_run": is_dry, "parts": results}
        (out / "results.json").write_text(json.dumps(found, indent=1))
    return results


# --- probes ------------------------------------------------------------------

_ROWS, _PROMPT, _RESPONSE = 4, 96, 32
# Limit of relative differences. A float32 product on tensor cores keeps 10 bits of its factors,
# bfloat16 keeps 7.
_TOLERANCE = {"float32": 0.01, "bfloat16": 0.1}


def device(is_dry: bool) -> Figures:
    """Return versions, devices and measured rates of the first device."""
    found = jax.local_devices()
    rates = roofline.measure_rates("bfloat16", 2**24 if is_dry else 2**32)
    return {
        **harness.here(),
        "platform_version": found[0].client.platform_version,
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
        decoder = decode.make_decoder(config, "float32", _PROMPT, _RESPONSE, here, eos_ids=())
        decoded = decoder.decode(
            jax.device_put(params, here),
            list(prompts),
            num_samples=1,
            key=jax.random.key(2),
            settings=SamplingSettings(_RESPONSE),
        )
    tokens = np.array([[y.tokens for y in row] for row in decoded])
    logprobs = np.array([[y.token_logprobs for y in row] for row in decoded])
    rows = np.concatenate([prompts, tokens[:, 0]], axis=1)
    lengths = np.full(_ROWS, _PROMPT, np.int32), np.full((_ROWS, 1), _RESPONSE, np.int32)
    with jax.default_device(cpu):
        scored = jax.jit(
            functools.partial(
                row_token_logprobs, response_bucket=_RESPONSE, config=config, scoring=Scoring()
            )
        )(params, rows.astype(np.int32), *lengths)
    difference = logprobs - np.asarray(scored)
    return float(np.linalg.norm(difference) / np.linalg.norm(scored))


if __name__ == "__main__":
    sys.exit(main())
