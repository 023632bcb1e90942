# SPDX-License-Identifier: Apache-2.0
"""Command: time of a whole RL step and its parts, compared with TRL's GRPO on the same work.

    python -m tba_jax.bench.rl_step --json
    python -m tba_jax.bench.rl_step --peers=trl --peer_python=trl/bin/python --json

A step samples responses to a batch of prompts, scores them under the reference, and trains on them
once, in one thread. Our side is the main command's synchronous driver, read from its metrics,
with its own choices unless flags say otherwise. TRL gets the same checkpoint, prompts, reward,
optimiser and KL coefficient, without gradient checkpointing, and its own micro-batches. Responses
are sampled, so the sides have equal shapes and not equal texts; their mean length is reported.
Every repeat of a side runs in a fresh process, and sides alternate; first steps (which compile) are
excluded, and medians are over all other steps. `rest` is publication, merge and other work. Use a
quiet machine: `step_s_of_repeats` shows disturbed repeats.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tba_jax.bench import processes, reporting, trl_peer

_SHAPES = ("39m", "1.5b", "tiny")
_SIZES = {"prompts": 8, "group": 16, "prompt_tokens": 256, "response_tokens": 81}
_OURS_SIDE = (sys.executable, "-m", "tba_jax.bench.rl_step_sides")
_PACKAGES = {"trl": trl_peer.PACKAGES}
_PARTS = ("step_s", "decode_s", "reference_s", "train_s", "rest_s")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = reporting.make_parser("rl_step", __doc__)
    parser.add_argument(
        "--model_shape", default="39m", choices=_SHAPES, help="shape of a Qwen2 model"
    )
    for name, value in _SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument(
        "--micro_batch_rows",
        type=int,
        default=0,
        help="rows of a micro-batch of tba_jax; 0: chosen by the run",
    )
    parser.add_argument(
        "--peer_micro_batch_rows", type=int, default=16, help="rows of a micro-batch of the peer"
    )
    parser.add_argument("--remat", default="auto", choices=("auto", "none", "dots", "layers"))
    parser.add_argument("--peers", default="", help="peer to compare with: trl; empty: none")
    parser.add_argument("--peer_python", default=sys.executable, help="interpreter with the peer")
    parser.add_argument("--repeats", type=int, default=3, help="processes per side")
    parser.add_argument("--warm_steps", type=int, default=1, help="steps per process before timing")
    parser.add_argument("--steps", type=int, default=1, help="timed steps per process")
    parser.add_argument("--seed", type=int, default=0)
    return reporting.run_in_folder(parser, argv, measure, _table)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return all figures by name.

    Args:
        folder: empty folder for the checkpoint, the runs and files between processes.

    Raises:
        ValueError: an option or an environment cannot be measured, or a side failed.
    """
    _check(args)
    peers = processes.peers_of(args.peers, _PACKAGES, args.peer_python)
    names = (*_SIZES, "micro_batch_rows", "peer_micro_batch_rows", "warm_steps", "steps", "seed")
    job = {name: getattr(args, name) for name in names} | {"folder": str(folder)}
    job |= {"beta": 0.05, "learning_rate": 1e-6}
    shape = {"shape": args.model_shape}
    written = processes.run_side("write", job | shape, folder, command=_OURS_SIDE)
    peer = (args.peer_python, "-P", trl_peer.__file__)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in ("tba_jax", *peers)}
    for repeat in range(args.repeats):
        for side, found in reports.items():
            if side in peers:
                report = processes.run_side(side, job, folder, env, command=peer)
            else:
                overrides = {"model.remat": args.remat}
                own = {"overrides": overrides, "workdir": str(folder / f"{side}-{repeat}")}
                report = processes.run_side(side, job | own, folder, command=_OURS_SIDE)
            found.append(report)
            print(f"{side}: {_in_words(_medians([report]))}", file=sys.stderr)
    figures = {side: _figures(found) for side, found in reports.items()}
    mine = figures.pop("tba_jax")
    return {
        **mine,
        "peers": {
            name: {**x, "ratio": x["step_s"] / mine["step_s"]} for name, x in figures.items()
        },
        "model_shape": args.model_shape,
        "num_params": written["num_params"],
        "workload": {name: job[name] for name in job if hasattr(args, name)},
        "remat": args.remat,
        "chosen": reports["tba_jax"][0]["chosen"],
        "repeats": args.repeats,
        "hardware": processes.hardware(reports["tba_jax"][0]),
    }


def _check(args: argparse.Namespace) -> None:
    least = dict.fromkeys((*_SIZES, "peer_micro_batch_rows", "repeats", "warm_steps", "steps"), 1)
    reporting.check_least(args, least | {"group": 2, "micro_batch_rows": 0})
    rows = args.prompts * args.group
    for name in ("micro_batch_rows", "peer_micro_batch_rows"):
        if rows % (getattr(args, name) or rows):
            raise ValueError(
                f"got --{name}={getattr(args, name)}, which does not divide the {rows} rows of a "
                "step; give a divisor of --prompts times --group"
            )


def _medians(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the median of every part over all timed steps."""
    steps = [step for report in reports for step in report["steps"]]
    return {part: statistics.median(step[part] for step in steps) for part in _PARTS}


def _figures(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of one side of the comparison over all repeats."""
    return {
        **_medians(reports),
        "step_s_of_repeats": [_medians([report])["step_s"] for report in reports],
        "mean_response_tokens": statistics.mean(x["mean_response_tokens"] for x in reports),
        "max_rss_bytes": max(x["max_rss_bytes"] for x in reports),
        "versions": reports[0]["versions"],
    }


def _in_words(x: Mapping[str, float]) -> str:
    return ", ".join(f"{part.removesuffix('_s')} {x[part]:.1f} s" for part in _PARTS)


def _table(result: Mapping[str, Any]) -> list[str]:
    w, hw = result["workload"], result["hardware"]
    sides = {"tba_jax": result, **result["peers"]}
    return [
        f"Qwen2 shape {result['model_shape']}, {result['num_params'] / 1e6:.1f}M parameters, "
        f"float32, remat {result['remat']}",
        f"{w['prompts']} prompts of {w['prompt_tokens']} tokens x {w['group']} responses of "
        f"{w['response_tokens']}; {result['repeats']} x {w['steps']} steps",
        f"{hw['processor']}, {hw['num_cores']} cores; {hw['device']}",
        "",
        *reporting.columns(
            (
                {"side": side, "over": x["step_s"] / result["step_s"], "mib": _mib(x), **x}
                for side, x in sides.items()
            ),
            {
                "": "{side}",
                **{part.removesuffix("_s"): f"{{{part}:.2f}} s" for part in _PARTS},
                "ratio": "{over:.2f}x",
                "tokens": "{mean_response_tokens:.1f}",
                "process": "{mib:.0f} MiB",
            },
        ),
    ]


def _mib(side: Mapping[str, Any]) -> float:
    return side["max_rss_bytes"] / 2**20


if __name__ == "__main__":
    sys.exit(main())
