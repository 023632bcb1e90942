# SPDX-License-Identifier: Apache-2.0
"""How long a whole RL step takes, in its parts, beside TRL's GRPO doing the same.

    python -m tba_jax.bench.rl_step --json
    python -m tba_jax.bench.rl_step --peers=trl --peer_python=trl/bin/python --json

A step draws responses to a batch of prompts, scores them under the reference, and trains on them
once, in one thread. Ours is the main command's synchronous driver, read from its schedule log, with
`batch.share_prompts` on, the default, and off. TRL
gets the same checkpoint, prompts, reward, optimiser and KL coefficient, without gradient
checkpointing, and micro-batches of its own. Responses are drawn, not given, so that the sides share
shapes and not texts; their mean length is told, as few end before the limit. Every side runs in a
fresh process per repeat, in turn; its first steps (which compile) are left out, and medians are
over the rest of all repeats. `rest` is publication, merge and whatever lies between. The machine
should be quiet: `step_s_of_repeats` tells where it was not.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tba_jax.bench import processes, reporting, rl_step_trl
from tba_jax.devices import xla

_SHAPES = ("39m", "1.5b", "tiny")
_SIZES = {"prompts": 8, "group": 16, "prompt_tokens": 256, "response_tokens": 81}
_PACKAGES = {"trl": rl_step_trl.PACKAGES}
# Fields of the config in which the forms of our own step differ.
_OURS: dict[str, dict[str, Any]] = {
    "tba_jax": {},
    "separate_prompts": {"batch.share_prompts": False},
}
_PARTS = ("step_s", "decode_s", "reference_s", "train_s", "rest_s")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tba_jax.bench.rl_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model_shape", default="39m", choices=_SHAPES, help="Qwen2 shapes")
    for name, value in _SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--micro_batch_rows", type=int, default=16, help="of our step")
    parser.add_argument("--peer_micro_batch_rows", type=int, default=16, help="of the peer's")
    parser.add_argument("--remat", default="layers", choices=("none", "dots", "layers"))
    parser.add_argument("--xla_preset", default="none", choices=tuple(xla.PRESETS), help="of ours")
    parser.add_argument("--peers", default="none", help="trl, or none")
    parser.add_argument("--peer_python", default=sys.executable, help="interpreter with the peer")
    parser.add_argument("--repeats", type=int, default=3, help="processes per side")
    parser.add_argument("--warm_steps", type=int, default=1, help="left out, per process")
    parser.add_argument("--steps", type=int, default=1, help="timed, per process")
    parser.add_argument("--seed", type=int, default=0)
    with tempfile.TemporaryDirectory(prefix="bench_rl_step_") as folder:
        return reporting.run_command(parser, argv, lambda args: measure(args, Path(folder)), _table)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All figures, by name.

    Args:
        args: of the command line.
        folder: empty, for the checkpoint, the runs and messages between processes.

    Raises:
        ValueError: an option or an environment that cannot be measured; a side failed.
    """
    _check(args)
    peers = [name for name in args.peers.split(",") if name not in ("", "none")]
    processes.check_peers(peers, _PACKAGES, args.peer_python)
    names = (*_SIZES, "micro_batch_rows", "peer_micro_batch_rows", "warm_steps", "steps", "seed")
    job = {name: getattr(args, name) for name in names} | {"folder": str(folder)}
    job |= {"beta": 0.05, "learning_rate": 1e-6}
    ours = (sys.executable, "-m", "tba_jax.bench.rl_step_sides")
    written = processes.run_side("write", job | {"shape": args.model_shape}, folder, command=ours)
    peer = (args.peer_python, "-P", rl_step_trl.__file__)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in (*_OURS, *peers)}
    for repeat in range(args.repeats):
        for side, found in reports.items():
            if side in peers:
                report = processes.run_side(side, job, folder, env, command=peer)
            else:
                overrides = _OURS[side] | {"xla.preset": args.xla_preset, "model.remat": args.remat}
                own = {"overrides": overrides, "workdir": str(folder / f"{side}-{repeat}")}
                report = processes.run_side(side, job | own, folder, command=ours)
            found.append(report)
            print(f"{side}: {_in_words(_medians([report]))}", file=sys.stderr)
    figures = {side: _figures(found) for side, found in reports.items()}
    mine = figures.pop("tba_jax")
    return {
        **mine,
        "forms": {name: figures[name] for name in figures if name in _OURS},
        "peers": {
            name: {
                **figures[name],
                "ratio": figures[name]["step_s"] / mine["step_s"],
                "ratios_of_forms": {
                    form: figures[name]["step_s"] / figures[form]["step_s"]
                    for form in figures
                    if form in _OURS
                },
            }
            for name in peers
        },
        "model_shape": args.model_shape,
        "num_params": written["num_params"],
        "workload": {name: getattr(args, name) for name in names},
        "remat": args.remat,
        "xla_preset": args.xla_preset,
        "repeats": args.repeats,
        "hardware": processes.hardware(reports["tba_jax"][0]),
    }


def _check(args: argparse.Namespace) -> None:
    least = dict.fromkeys((*_SIZES, "micro_batch_rows", "repeats", "warm_steps", "steps"), 1)
    for name, value in (least | {"group": 2, "peer_micro_batch_rows": 1}).items():
        if getattr(args, name) < value:
            raise ValueError(f"got --{name}={getattr(args, name)}; wanted at least {value}")
    rows = args.prompts * args.group
    for name in ("micro_batch_rows", "peer_micro_batch_rows"):
        if rows % getattr(args, name):
            raise ValueError(
                f"got --{name}={getattr(args, name)}, which does not divide the {rows} rows of a "
                "step; give a divisor of --prompts times --group"
            )


def _medians(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of every part over all timed steps."""
    steps = [step for report in reports for step in report["steps"]]
    return {part: statistics.median(step[part] for step in steps) for part in _PARTS}


def _figures(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of one side over all repeats."""
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
    """Return the results as text."""
    w, hw = result["workload"], result["hardware"]
    rows = [
        f"Qwen2 shape {result['model_shape']}, {result['num_params'] / 1e6:.1f}M parameters, "
        f"float32, remat {result['remat']}, XLA preset {result['xla_preset']}",
        f"{w['prompts']} prompts of {w['prompt_tokens']} tokens x {w['group']} responses of "
        f"{w['response_tokens']}; {result['repeats']} x {w['steps']} steps",
        f"{hw['processor']}, {hw['num_cores']} cores; {hw['device']}",
        "",
        f"{'':>16} {'step':>9} {'decode':>9} {'reference':>9} {'train':>9} {'rest':>7} "
        f"{'ratio':>7} {'tokens':>7} {'process':>9}",
    ]
    for name, x in {
        "tba_jax": {**result, "ratio": 1.0},
        **result["forms"],
        **result["peers"],
    }.items():
        ratio = x.get("ratio", x["step_s"] / result["step_s"])
        rows.append(
            f"{name:>16} "
            + " ".join(f"{x[part]:>7.2f} s" for part in _PARTS[:-1])
            + f" {x['rest_s']:>5.2f} s {ratio:>6.2f}x "
            f"{x['mean_response_tokens']:>7.1f} {x['max_rss_bytes'] / 2**20:>5.0f} MiB"
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
