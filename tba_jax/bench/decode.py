# SPDX-License-Identifier: Apache-2.0
"""Command: speed of the decoder, compared with other decoders and with the roofline.

    python -m tba_jax.bench.decode --workload=uniform --peers=hf,tunix --json

Without --model it writes a Qwen2 checkpoint of random weights (--shape) that every side loads. Two
workloads: `uniform`, 32 prompts of 64 tokens with 128 new tokens each and no EOS; `rl`, 16 samples
of each of 8 prompts of 256 tokens, ended by EOS after a third of 256 tokens on average (see
`decode_engine.with_eos`). Tokens per second count the tokens of responses up to and including EOS,
from submission to the last response on the host. Every side runs in a fresh process per repeat,
one after the other, warmed up before it is measured; figures are medians of the repeats. Use
a quiet machine: a large `cpu_s`, the processor time, shows disturbed repeats.

`first_token_s` of the engine is the end of its first chunk. `roofline_share` is the time that a
decode step needs at the measured memory bandwidth or matmul rate, whichever is slower, divided by
its measured time. --queued=64,256,1024,4096 adds the cost per token by the length of the queue.

This module only starts processes and compares their reports. It does not import JAX, so it uses no
device.
"""

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.bench import decode_peers, processes, reporting

_VARIANTS = {"hf": ("dynamic", "static"), "tunix": ("sampler",)}
_SHAPES = ("39m", "1.5b", "tiny")
_QUEUE_STEP = 64


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

    @property
    def eos_prob(self) -> float:
        """Return the probability of EOS per token: the mean length is a third of the limit."""
        return 3 / self.max_new_tokens


WORKLOADS = {
    "uniform": Workload(32, 1, 64, 128, has_eos=False),
    "rl": Workload(8, 16, 256, 256, has_eos=True),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = reporting.make_parser("decode", __doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", help="Hugging Face model folder; default: random weights")
    which.add_argument(
        "--shape", default="39m", choices=_SHAPES, help="model shape for random weights"
    )
    parser.add_argument("--workload", default="uniform", choices=WORKLOADS)
    for name in ("num_prompts", "num_samples", "prompt_tokens", "max_new_tokens"):
        parser.add_argument(f"--{name}", type=int, help="default: that of the workload")
    parser.add_argument("--num_slots", type=int, default=0, help="decode slots; 0: all responses")
    parser.add_argument("--chunk_steps", type=int, default=8, help="decode steps of a chunk")
    parser.add_argument(
        "--quantization",
        default="none",
        choices=("none", "int8", "fp8"),
        help="quantization of the weights",
    )
    parser.add_argument(
        "--queued", default="", help="queue lengths to compare, such as 64,256,1024"
    )
    reporting.add_comparison_flags(parser, peers="hf, tunix")
    return reporting.run_in_folder(parser, argv, measure, _table)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return all figures by name.

    Args:
        folder: empty folder for checkpoints and messages between processes.

    Raises:
        ValueError: an option, a model or an environment cannot be measured, or a side failed.
    """
    workload = _workload(args)
    queued = _numbers(args.queued)
    peers = processes.peers_of(args.peers, decode_peers.PACKAGES, args.peer_python)
    base = {"dtype": args.dtype, "chunk_steps": args.chunk_steps, "num_slots": args.num_slots}
    base["quantization"] = args.quantization
    eos_prob: dict[str, float] = {}
    if args.model is None:
        base["model"] = str(folder / "model")
        job = base | {"shape": args.shape, "eos_prob": workload.eos_prob}
        eos_prob = _run("write", job, folder, os.environ | {"JAX_PLATFORMS": "cpu"})
    else:
        base["model"] = args.model
    vocab_size, eos_ids = _vocabulary(Path(base["model"]), is_ours=args.model is None)
    # Tunix treats the padding token as padding everywhere, so no prompt contains it.
    *words, pad_id = (i for i in range(vocab_size) if i not in eos_ids)
    base |= {
        "eos_ids": eos_ids if workload.has_eos else [],
        "pad_id": pad_id,
        "num_samples": workload.num_samples,
        "max_new_tokens": workload.max_new_tokens,
        "prompts": str(folder / "prompts.npy"),
    }
    if workload.has_eos and not eos_ids:
        raise ValueError(
            f"{args.model}: config.json names no eos_token_id, which --workload=rl needs. Use "
            "--workload=uniform, or a model that ends its responses"
        )
    shape = (workload.num_prompts, workload.prompt_tokens)
    np.save(base["prompts"], np.random.default_rng(args.seed).choice(words, shape).astype(np.int32))

    ours, others = _repeat(args, peers, base, folder)
    result = _our_figures(ours)
    result["response_length"] = _length_figures(_lengths(ours, "engine"), workload, eos_prob)
    result["peers"] = {
        name: _peer_figures(found, result["tokens_per_s"], workload, eos_prob)
        for name, found in others.items()
    }
    if queued:
        result["queued"] = _run("queue", base | {"queued": queued, "seed": args.seed}, folder)
    return result | {
        "model": args.model or f"random weights, shape {args.shape}",
        "dtype": args.dtype,
        "quantization": args.quantization,
        "workload": {"name": args.workload, **dataclasses.asdict(workload), **eos_prob},
        "repeats": args.repeats,
        "hardware": processes.hardware(ours[0]),
    }


def length_statistics(eos_prob: float, limit: int) -> tuple[float, float]:
    """Return (mean, standard deviation) of the length of a response.

    Args:
        eos_prob: probability that a token is the last one.
        limit: number of tokens after which every response is cut.
    """
    survival = (1 - eos_prob) ** np.arange(limit)  # P(length > i)
    mean = survival.sum()
    square = ((2 * np.arange(limit) + 1) * survival).sum()
    return float(mean), math.sqrt(square - mean**2)


def _workload(args: argparse.Namespace) -> Workload:
    least = {"num_prompts": 1, "num_samples": 1, "prompt_tokens": 1, "max_new_tokens": 8}
    reporting.check_least(args, {**least, "repeats": 1, "chunk_steps": 1})
    given = {name: getattr(args, name) for name in least if getattr(args, name) is not None}
    return dataclasses.replace(WORKLOADS[args.workload], **given)


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",") if word]
    except ValueError:
        numbers = [0]
    if any(n < 1 or n % _QUEUE_STEP for n in numbers):
        raise ValueError(
            f"--queued={text}: each queue length must be a positive multiple of {_QUEUE_STEP}. Set "
            "--queued=64,256,1024"
        )
    return numbers


def _vocabulary(folder: Path, *, is_ours: bool) -> tuple[int, list[int]]:
    """Return (vocabulary size, EOS IDs) of a model folder; [] for our checkpoint's EOS IDs."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"--model={folder}: no config.json there. Give a Hugging Face folder")
    config = json.loads(path.read_text())
    if is_ours:
        return config["vocab_size"], [config["vocab_size"] - 1]
    eos = config.get("eos_token_id")
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos = json.loads(generation.read_text()).get("eos_token_id", eos)
    return config["vocab_size"], eos if isinstance(eos, list) else [] if eos is None else [eos]


def _repeat(
    args: argparse.Namespace, peers: Sequence[str], base: Mapping[str, Any], folder: Path
) -> tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]]]:
    """Return (reports of tba_jax, reports of each peer), one per repeat; the sides alternate."""
    ours: list[dict[str, Any]] = []
    others: dict[str, list[dict[str, Any]]] = {name: [] for name in peers}
    for repeat in range(args.repeats):
        # Each repeat draws other responses; one seed for its warm-up, one for what is measured.
        job = {**base, "seed": args.seed + 1000 * repeat}
        ours.append(_run("engine", job, folder))
        for name in peers:
            # After the first repeat only the fastest variant runs; it is the one that counts.
            variants = [_fastest(others[name])] if repeat else _VARIANTS[name]
            job |= {"variants": variants, "platform": ours[0]["platform"]}
            script = [args.peer_python, "-P", decode_peers.__file__]
            others[name].append(_run(name, job, folder, command=script))
    return ours, others


def _run(
    side: str,
    job: Mapping[str, Any],
    folder: Path,
    env: Mapping[str, str] | None = None,
    *,
    command: Sequence[str] = (sys.executable, "-m", "tba_jax.bench.decode_engine"),
) -> dict[str, Any]:
    """Run one job in a fresh process and return its report."""
    report = processes.run_side(side, job, folder, env, command=command)
    for variant, run in report.get("runs", {}).items():
        run["tokens_per_s"] = sum(run["lengths"]) / run["wall_s"]
        figure = f"{run['tokens_per_s']:.1f} tokens/s"
        print(f"{side} {variant}: {figure}, {run['wall_s']:.2f} s", file=sys.stderr)
    return report


def _fastest(reports: Sequence[Mapping[str, Any]]) -> str:
    runs = reports[0]["runs"]
    return max(runs, key=lambda name: runs[name]["tokens_per_s"])


def _median(reports: Sequence[Mapping[str, Any]], variant: str, figure: str) -> float:
    return statistics.median(x["runs"][variant][figure] for x in reports)


def _lengths(reports: Sequence[Mapping[str, Any]], variant: str) -> list[int]:
    return [n for x in reports for n in x["runs"][variant]["lengths"]]


def _our_figures(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = reports[0]["runs"]["engine"]
    figures = {name: _median(reports, "engine", name) for name in first if name != "lengths"}
    shares = {
        share: statistics.median(
            x["runs"]["engine"][bound] / x["runs"]["engine"]["step_s"] for x in reports
        )
        for share, bound in (
            ("roofline_share", "bound_step_s"),
            ("roofline_share_of_sum", "sum_step_s"),
        )
    }
    kept = ("num_slots", "num_params", "num_threads", "versions")
    return {
        "tokens_per_s": figures["tokens_per_s"],
        **shares,
        **figures,
        "tokens_per_s_of_repeats": [x["runs"]["engine"]["tokens_per_s"] for x in reports],
        "recompiled": max(x["runs"]["engine"]["recompiled"] for x in reports),
        **{name: reports[0][name] for name in kept},
    }


def _peer_figures(
    reports: Sequence[Mapping[str, Any]],
    our_tokens_per_s: float,
    workload: Workload,
    eos_prob: Mapping[str, float],
) -> dict[str, Any]:
    variant = _fastest(reports)
    names = ("tokens_per_s", "wall_s", "cpu_s", "first_token_s", "prefill_s", "decode_s")
    figures = {name: _median(reports, variant, name) for name in names}
    return {
        "tokens_per_s": figures["tokens_per_s"],
        "ratio": our_tokens_per_s / figures["tokens_per_s"],
        "variant": variant,
        **figures,
        "tokens_per_s_of_repeats": [x["runs"][variant]["tokens_per_s"] for x in reports],
        "tokens_per_s_of_variants": {
            name: run["tokens_per_s"] for name, run in reports[0]["runs"].items()
        },
        "response_length": _length_figures(_lengths(reports, variant), workload, eos_prob),
        "num_threads": reports[0]["num_threads"],
        "device": reports[0]["device"],
        "versions": reports[0]["versions"],
    }


def _length_figures(
    lengths: Sequence[int], workload: Workload, eos_prob: Mapping[str, float]
) -> dict[str, float]:
    """Return the number of sampled tokens, and `z`, the deviation of their mean, if known.

    `z` is in standard errors: for correct sides, a value above 4 has a probability below 1 in
    10,000.
    """
    quartiles = np.percentile(lengths, (25, 50, 75))
    found = {"mean": float(np.mean(lengths)), "n": len(lengths), "max": max(lengths)}
    found |= {f"percentile_{q}": float(x) for q, x in zip((25, 50, 75), quartiles, strict=True)}
    if workload.has_eos and eos_prob:
        mean, deviation = length_statistics(eos_prob["eos_prob_mean"], workload.max_new_tokens)
        z = (found["mean"] - mean) / (deviation / math.sqrt(len(lengths)))
        found |= {"expected_mean": mean, "z": z}
    return found


def _table(result: Mapping[str, Any]) -> list[str]:
    w, hw = result["workload"], result["hardware"]
    sides = {"tba_jax": {**result, "ratio": 1.0}, **result["peers"]}
    rows = [
        f"{result['model']}, {result['num_params'] / 1e6:.1f}M parameters, {result['dtype']}",
        f"{w['name']}: {w['num_prompts']} x {w['num_samples']} responses, prompts of "
        f"{w['prompt_tokens']}, up to {w['max_new_tokens']} new tokens; {result['repeats']} "
        "repeats",
        f"{hw['processor']}, {hw['num_cores']} cores; {hw['device']}",
        "",
        *reporting.columns(
            ({"side": f"{name} {x.get('variant', '')}".strip(), **x} for name, x in sides.items()),
            {
                "": "{side}",
                "tokens/s": "{tokens_per_s:.1f}",
                "ratio": "{ratio:.2f}x",
                "first token": "{first_token_s:.3f} s",
                "prefill": "{prefill_s:.2f} s",
                "decode": "{decode_s:.2f} s",
                "CPU time": "{cpu_s:.2f} s",
                "mean length": "{response_length[mean]:.1f}",
            },
        ),
    ]
    expected = result["response_length"].get("expected_mean")
    rows += [f"(expected mean length {expected:.1f})"] if expected else []
    rows += [
        "",
        f"decode step {1e3 * result['step_s']:.2f} ms of {result['num_slots']} slots, "
        f"{100 * result['slot_share']:.0f} % in use; roofline "
        f"{1e3 * result['bound_step_s']:.2f} ms, share {100 * result['roofline_share']:.0f} % "
        f"({100 * result['roofline_share_of_sum']:.0f} % if memory and arithmetic do not overlap)",
        f"  {result['bytes_per_step'] / 1e6:.1f} MB at {result['bytes_per_s'] / 1e9:.1f} GB/s, "
        f"{result['flops_per_step'] / 1e9:.2f} GFLOP at {result['flops_per_s'] / 1e9:.1f} GFLOP/s",
        f"  {result['programs']:.0f} programs compiled in warm-up, {result['recompiled']} after it",
    ]
    queued = result.get("queued", {"by_length": {}})
    for length, x in queued["by_length"].items():
        rows.append(
            f"  {length:>6} queued: {x['us_per_token']:.1f} us/token, {x['recompiled']} recompiled"
        )
    if queued["by_length"]:
        rows.append(f"  spread {100 * queued['spread']:.1f} %")
    return rows


if __name__ == "__main__":
    sys.exit(main())
