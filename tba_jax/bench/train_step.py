# SPDX-License-Identifier: Apache-2.0
"""Command: speed of the train step, compared with a naive step and the roofline.

    python -m tba_jax.bench.train_step --model_shape=39m --json

Workload: groups of full rows, one Trajectory Balance step with AdamW and clipping. `tba_jax` is our
step, which computes every prompt once for all its responses. `naive` is a plain JAX step of the
same model (full logits, no recomputation). Both sides load one checkpoint of random weights and
report the loss of their first step; the command fails if the losses differ. Every repeat of a side
runs in a fresh process, one after the other; `step_s` is the median over the steps of all repeats.
Tokens per second count prompt and response. `mfu` is the share of the measured matmul rate that the
operations of a side use, without recomputation. Use a quiet machine: a large `cpu_s` (processor
time) shows disturbed runs.
"""

import argparse
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tba_jax.bench import processes, reporting

_SHAPES = ("39m", "1.5b", "tiny")
_SIZES = {"num_prompts": 2, "group_size": 4, "prompt_tokens": 64, "response_tokens": 128}
_SIDES = ("tba_jax", "naive")
# smaller than differences between models, larger than rounding of sums of log-probs
_LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = reporting.make_parser("train_step", __doc__)
    parser.add_argument(
        "--model_shape", default="39m", choices=_SHAPES, help="shape of a Qwen2 model"
    )
    for name, value in _SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--remat", default="layers", choices=("none", "dots", "layers"))
    parser.add_argument(
        "--micro_batch_rows", type=int, default=0, help="rows of a micro-batch; 0: all rows"
    )
    parser.add_argument("--steps", type=int, default=5, help="timed steps per process")
    reporting.add_process_flags(parser)
    return reporting.run_in_folder(parser, argv, measure, _table)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return all figures by name.

    Args:
        folder: empty folder for the checkpoint and messages between processes.

    Raises:
        ValueError: an option cannot be measured, a side failed, or the losses of the sides differ.
    """
    least = {**dict.fromkeys((*_SIZES, "repeats", "steps"), 1), "group_size": 2}
    reporting.check_least(args, least | {"micro_batch_rows": 0})
    names = (*_SIZES, "dtype", "remat", "micro_batch_rows", "steps", "seed")
    job = {name: getattr(args, name) for name in names}
    job |= {"model": str(folder / "model"), "batch": str(folder / "batch.npz")}
    job |= {"beta": 0.05, "learning_rate": 1e-6, "weight_decay": 0.01, "clip_norm": 1.0}
    ours = (sys.executable, "-m", "tba_jax.bench.train_step_sides")
    cpu = os.environ | {"JAX_PLATFORMS": "cpu"}
    written = processes.run_side(
        "write", job | {"shape": args.model_shape}, folder, cpu, command=ours
    )
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in _SIDES}
    for _ in range(args.repeats):
        for side, found in reports.items():
            found.append(processes.run_side(side, job, folder, command=ours))
            step_s = statistics.median(found[-1]["step_s"])
            print(f"{side}: {step_s:.3f} s, loss {found[-1]['loss']:.4f}", file=sys.stderr)
    _check_losses({name: x[0]["loss"] for name, x in reports.items()}, args.dtype)
    tokens = args.num_prompts * args.group_size * (args.prompt_tokens + args.response_tokens)
    figures = {name: _figures(x, tokens, written["flops"][name]) for name, x in reports.items()}
    rate = statistics.median(x["flops_per_s"] for x in reports["tba_jax"])
    for x in figures.values():
        x["mfu"] = x["flops_per_s"] / rate
    mine, naive = figures["tba_jax"], figures["naive"]
    return {
        **mine,
        "naive": naive | {"ratio": naive["step_s"] / mine["step_s"]},
        "matmul_flops_per_s": rate,
        "model_flops": written["flops"]["tba_jax"],
        "num_params": written["num_params"],
        "model_shape": args.model_shape,
        "dtype": args.dtype,
        "workload": {name: getattr(args, name) for name in _SIZES},
        "remat": args.remat,
        "micro_batch_rows": args.micro_batch_rows,
        "repeats": args.repeats,
        "steps": args.steps,
        "hardware": processes.hardware(reports["tba_jax"][0]),
    }


def _check_losses(losses: Mapping[str, float], dtype: str) -> None:
    wanted = losses["tba_jax"]
    for name, loss in losses.items():
        if not math.isclose(loss, wanted, rel_tol=_LOSS_TOLERANCE[dtype]):
            raise ValueError(
                f"the first step of {name} has the loss {loss}, ours {wanted}: the sides do not "
                "compute the same, so their times cannot be compared. Report this with the versions"
            )


def _figures(
    reports: Sequence[Mapping[str, Any]], tokens: int, model_flops: float
) -> dict[str, Any]:
    """Return the measurements of one side over all repeats."""
    first, times = reports[0], [x for report in reports for x in report["step_s"]]
    step_s = statistics.median(times)
    kept = (
        "loss",
        "temporary_bytes",
        "compiled_peak_bytes",
        "device_peak_bytes",
        "num_threads",
        "device",
        "versions",
    )
    return {
        "tokens_per_s": tokens / step_s,
        "step_s": step_s,
        "min_step_s": min(times),
        "step_s_of_repeats": [statistics.median(x["step_s"]) for x in reports],
        "cpu_s": statistics.median(x["cpu_s"] for x in reports),
        "flops_per_s": model_flops / step_s,
        "max_rss_bytes": max(x["max_rss_bytes"] for x in reports),
        **{name: first[name] for name in kept if name in first},
    }


def _table(result: Mapping[str, Any]) -> list[str]:
    w, hw = result["workload"], result["hardware"]
    sides = {"tba_jax": {**result, "ratio": 1.0}, "naive": result["naive"]}
    rows = [
        f"Qwen2 shape {result['model_shape']}, {result['num_params'] / 1e6:.1f}M parameters, "
        f"{result['dtype']}, remat {result['remat']}",
        f"{w['num_prompts']} x {w['group_size']} rows of {w['prompt_tokens']} + "
        f"{w['response_tokens']} tokens; {result['repeats']} x {result['steps']} steps",
        f"{hw['processor']}, {hw['num_cores']} cores; {hw['device']}",
        "",
        *reporting.columns(
            ({"side": side, **_mib(x), **x} for side, x in sides.items()),
            {
                "": "{side}",
                "tokens/s": "{tokens_per_s:.1f}",
                "step": "{step_s:.3f} s",
                "least": "{min_step_s:.3f} s",
                "CPU time": "{cpu_s:.2f} s",
                "ratio": "{ratio:.2f}x",
                "MFU": "{mfu:.0%}",
                "temporaries": "{temporary_mib:.0f} MiB",
                "process": "{process_mib:.0f} MiB",
            },
        ),
    ]
    rate, flops = result["matmul_flops_per_s"], result["model_flops"]
    rows += ["", f"{flops / 1e9:.1f} GFLOP per step; matmul rate {rate / 1e9:.1f} GFLOP/s"]
    return rows


def _mib(side: Mapping[str, Any]) -> dict[str, float]:
    found = {"process_mib": side["max_rss_bytes"] / 2**20}
    if side.get("temporary_bytes") is not None:
        found["temporary_mib"] = side["temporary_bytes"] / 2**20
    return found


if __name__ == "__main__":
    sys.exit(main())
