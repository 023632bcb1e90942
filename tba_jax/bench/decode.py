# SPDX-License-Identifier: Apache-2.0
"""Command: speed of the decoder, compared with the roofline of the machine.

    python -m tba_jax.bench.decode --workload=uniform --json

The model has random weights in a Qwen2 shape (--shape). Two workloads: `uniform`, 32 prompts of 64
tokens with 128 new tokens each and no EOS; `rl`, 16 samples of each of 8 prompts of 256 tokens,
which end after about a third of 256 tokens. Tokens per second count the tokens of responses up to
and including EOS, from submission to the last response on the host. Every repeat has a fresh
process and is warmed up before it is measured; figures are medians of the repeats. Use a quiet
machine: a large `cpu_s`, the processor time, shows disturbed repeats.

`first_token_s` is the end of the first chunk. `roofline_share` is the time that a decode step needs
at the measured memory bandwidth or matmul rate, whichever is slower, divided by its measured time.
"""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tba_jax.bench import processes, reporting

_SHAPES = ("39m", "1.5b", "tiny")
_SIDE = (sys.executable, "-m", "tba_jax.bench.decode_engine")


@dataclasses.dataclass(frozen=True)
class Workload:
    """Prompts and lengths of a decoding benchmark.

    Attributes:
        num_prompts, num_samples: p prompts, S responses to each.
        prompt_tokens: length of every prompt.
        max_new_tokens: length limit of responses.
        has_eos: whether responses may end before the length limit.
    """

    num_prompts: int
    num_samples: int
    prompt_tokens: int
    max_new_tokens: int
    has_eos: bool


WORKLOADS = {
    "uniform": Workload(32, 1, 64, 128, has_eos=False),
    "rl": Workload(8, 16, 256, 256, has_eos=True),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = reporting.make_parser("decode", __doc__)
    parser.add_argument("--shape", default="39m", choices=_SHAPES, help="shape of the model")
    parser.add_argument("--workload", default="uniform", choices=WORKLOADS)
    for name in ("num_prompts", "num_samples", "prompt_tokens", "max_new_tokens"):
        parser.add_argument(f"--{name}", type=int, help="default: that of the workload")
    parser.add_argument("--num_slots", type=int, default=0, help="decode slots; 0: all responses")
    parser.add_argument("--chunk_steps", type=int, default=8, help="decode steps of a chunk")
    reporting.add_process_flags(parser)
    return reporting.run_in_folder(parser, argv, measure, _table)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return all figures by name.

    Args:
        folder: empty folder for messages between processes.

    Raises:
        ValueError: an option cannot be measured, or a process failed.
    """
    least = {"num_prompts": 1, "num_samples": 1, "prompt_tokens": 1, "max_new_tokens": 8}
    reporting.check_least(args, {**least, "repeats": 1, "chunk_steps": 1})
    given = {name: getattr(args, name) for name in least if getattr(args, name) is not None}
    workload = dataclasses.replace(WORKLOADS[args.workload], **given)
    names = ("shape", "dtype", "chunk_steps", "num_slots")
    job = {name: getattr(args, name) for name in names} | dataclasses.asdict(workload)
    reports = []
    for repeat in range(args.repeats):
        # Each repeat draws other responses; one seed for its warm-up, one for what is measured.
        own = {"seed": args.seed + 1000 * repeat}
        reports.append(processes.run_side("engine", job | own, folder, command=_SIDE))
        print(f"{reports[-1]['tokens_per_s']:.1f} tokens/s", file=sys.stderr)
    return figures_of(reports) | {
        "shape": args.shape,
        "dtype": args.dtype,
        "workload": {"name": args.workload, **dataclasses.asdict(workload)},
        "repeats": args.repeats,
        "hardware": processes.hardware(reports[0]),
    }


def figures_of(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the medians of the figures over the reports of all repeats."""
    kept = ("num_slots", "num_params", "num_threads", "versions")
    numbers = [name for name, x in reports[0].items() if isinstance(x, float)]
    return {
        **{name: statistics.median(x[name] for x in reports) for name in numbers},
        "roofline_share": statistics.median(x["bound_step_s"] / x["step_s"] for x in reports),
        "tokens_per_s_of_repeats": [x["tokens_per_s"] for x in reports],
        "recompiled": max(x["recompiled"] for x in reports),
        **{name: reports[0][name] for name in kept},
    }


def _table(result: Mapping[str, Any]) -> list[str]:
    w, hw = result["workload"], result["hardware"]
    return [
        f"random weights, shape {result['shape']}, {result['num_params'] / 1e6:.1f}M parameters, "
        f"{result['dtype']}",
        f"{w['name']}: {w['num_prompts']} x {w['num_samples']} responses, prompts of "
        f"{w['prompt_tokens']}, up to {w['max_new_tokens']} new tokens; {result['repeats']} "
        "repeats",
        f"{hw['processor']}, {hw['num_cores']} cores; {hw['device']}",
        "",
        *reporting.columns(
            [result],
            {
                "tokens/s": "{tokens_per_s:.1f}",
                "first token": "{first_token_s:.3f} s",
                "prefill": "{prefill_s:.2f} s",
                "decode": "{decode_s:.2f} s",
                "CPU time": "{cpu_s:.2f} s",
                "mean length": "{response_length:.1f}",
            },
        ),
        "",
        f"decode step {1e3 * result['step_s']:.2f} ms of {result['num_slots']} slots, "
        f"{100 * result['slot_share']:.0f} % in use; roofline "
        f"{1e3 * result['bound_step_s']:.2f} ms, share {100 * result['roofline_share']:.0f} %",
        f"  {result['bytes_per_step'] / 1e6:.1f} MB at {result['bytes_per_s'] / 1e9:.1f} GB/s, "
        f"{result['flops_per_step'] / 1e9:.2f} GFLOP at {result['flops_per_s'] / 1e9:.1f} GFLOP/s",
        f"  {result['recompiled']} programs compiled after the warm-up",
    ]


if __name__ == "__main__":
    sys.exit(main())
