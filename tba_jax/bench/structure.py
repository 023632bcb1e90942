# SPDX-License-Identifier: Apache-2.0
"""Command: launches, bytes and FLOPs of compiled programs, for devices that need not be attached.

python -m tba_jax.bench.structure [--config=math:gsm8k] [--targets=h100:8,v5e:2x4,v5p:2x2x1]
    [--programs=decode_chunk,...] [--json] [--config.FIELD=VALUE ...]

Unlike times, these counts are exact and equal on every machine. Each program of a plan is compiled
for each target in its own process. Its optimised HLO is compared with the minimum that follows from
shapes (`planning.minimum`). A launch is a kernel, a library call or a collective; on TPU, one
instruction. Counts of a decode chunk are per step.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from tba_jax.bench.reporting import make_parser, run_command
from tba_jax.config.command_line import override
from tba_jax.config.schema import plain
from tba_jax.planning.command import Planner
from tba_jax.planning.model_shapes import published_config
from tba_jax.planning.verdict import Program

PROGRAMS = ("decode_chunk", "admit", "prefill", "train_step", "score_reference", "publish")


def row(planned: dict[str, Any], found: Program, num_layers: int) -> dict[str, Any]:
    """Return the counts per device of one execution, or of one step of a decode chunk.

    Args:
        planned: the program's entry in the plan of a run.
        found: the compiled program.
        num_layers: layers of the model.
    """
    least = planned["minimum"]
    steps = least["steps"]

    def ratio(value: float, minimum: float) -> float | None:
        return value / minimum if minimum else None

    return {
        "program": found.name,
        "sizes": planned["sizes"],
        "failure": found.failure,
        "launches": found.launches / steps,
        "launches_per_layer": found.launches / steps / num_layers,
        "bytes": found.num_bytes / steps,
        "min_bytes": least["num_bytes"] / steps,
        "bytes_ratio": ratio(found.num_bytes, least["num_bytes"]),
        "flops": found.flops / steps,
        "min_flops": least["flops"] / steps,
        "flops_ratio": ratio(found.flops, least["flops"]),
        "temporaries": found.hbm.get("temporaries", 0.0),
        "roofline_s": found.roofline_s / steps,
        "bound": found.bound,
        "uncounted": list(found.uncounted),
    }


def measure(args: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    """Compile every program for every target and return the figures.

    Raises:
        ValueError: a target or a program does not exist.
    """
    from tba_jax.models.hf import config_json
    from tba_jax.run.model_parts import model_path

    config = override(None, [f"--config={args.config}", *overrides])
    model, _ = published_config(model_path(config))
    num_layers = config_json.transformer_config(model).num_layers
    targets = {}
    for target in args.targets.split(","):
        request = {"topology": target, "model": model, "judges": {}, "cache": ""}
        planner = Planner(request, args.timeout_s)
        facts = planner.describe(plain(config), chooses=True)
        planned = {p["name"]: p for p in facts["programs"] if p["minimum"]}
        if strays := [n for n in args.programs.split(",") if n not in PROGRAMS]:
            raise ValueError(f"--programs={strays[0]}: unknown. Choose from {', '.join(PROGRAMS)}")
        rows = []
        for name in args.programs.split(","):
            if name in planned:
                print(f"{target}: compiling {name}", file=sys.stderr, flush=True)
                rows.append(row(planned[name], planner.compile(facts, name), num_layers))
        targets[target] = {
            "chip": facts["chip"]["name"],
            "placement": facts["changed_fields"],
            "programs": rows,
        }
    return {"model": model_path(config), "num_layers": num_layers, "targets": targets}


def table(result: dict[str, Any]) -> Iterable[str]:
    """Return the result as a Markdown table."""
    yield f"`{result['command']}`, {result['date']}; {result['model']}"
    yield ""
    yield (
        "| target | program | launches | per layer | GB | minimum | ratio | TFLOP | minimum | "
        "ratio | temporaries, GB | bound |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|"
    for target, found in result["targets"].items():
        for r in found["programs"]:
            if r["failure"]:
                yield f"| `{target}` | `{r['program']}` | {r['failure']} |" + " |" * 9
                continue
            cells = (
                f"`{target}`",
                f"`{r['program']}`",
                f"{r['launches']:,.0f}",
                f"{r['launches_per_layer']:.1f}",
                f"{r['bytes'] / 1e9:.3g}",
                f"{r['min_bytes'] / 1e9:.3g}",
                _ratio(r["bytes_ratio"]),
                f"{r['flops'] / 1e12:.3g}",
                f"{r['min_flops'] / 1e12:.3g}",
                _ratio(r["flops_ratio"]),
                f"{r['temporaries'] / 1e9:.3g}",
                r["bound"],
            )
            yield f"| {' | '.join(cells)} |"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command."""
    parser = make_parser("structure", __doc__)
    parser.add_argument("--config", default="math:gsm8k", help="value of --config of tba_jax.plan")
    parser.add_argument(
        "--targets",
        default="h100:8,v5e:2x4,v5p:2x2x1",
        help="values of --topology of tba_jax.plan, with commas",
    )
    parser.add_argument(
        "--programs", default=",".join(PROGRAMS), help="programs to compile, with commas"
    )
    parser.add_argument(
        "--timeout_s", type=float, default=1800.0, help="time limit of each compilation"
    )
    argv = sys.argv[1:] if argv is None else list(argv)
    overrides = [x for x in argv if x.startswith("--config.")]
    own = [x for x in argv if not x.startswith("--config.")]
    return run_command(parser, own, lambda args: measure(args, overrides), table)


if __name__ == "__main__":
    sys.exit(main())
