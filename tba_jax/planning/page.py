# SPDX-License-Identifier: Apache-2.0
"""A page with plans of presets on some slices and GPU hosts, one row for each plan.

The page is written after each plan. Rows of other plans stay, and all are sorted by their names.
"""

import contextlib
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tba_jax.planning.table import seconds

CONFIGS = ("math:gsm8k", "math:math", "tldr:pythia410m")
TOPOLOGIES = ("h100:1", "h100:8", "v5e:2x4", "v5p:2x2x4")
_SIZES = ("batch.micro_batch_rows", "search.num_slots", "model.remat")
_HEAD = (
    "run",
    "devices",
    "placement, mesh, searchers x devices",
    "chosen sizes",
    "trainer, searcher, of (GiB)",
    "train step: temporaries (GiB)",
    "roofline",
    "with the preset's rows",
    "decode chunk",
    "steps an hour",
    "verdict",
)
_TEXT = """# Plans of the presets by their default choices

    python -m tba_jax.plan --page=docs/lab/plans.md [--config=CONFIG] [--topology=TOPOLOGY]

Each program is compiled for devices that are not attached; nothing ran on them. The command writes
this page. `--config` and `--topology` restrict it to some rows, and the others stay. How to read
the figures: [plan.md](../plan.md#how-to-read-it). "With the preset's rows" is the train step with
the rows of a micro-batch that the preset sets by hand. {versions}

"""

Plan = Callable[[Sequence[str]], int]


def write(path: Path, configs: Sequence[str], topologies: Sequence[str], plan: Plan) -> int:
    """Plan each config on each slice and write the page; return 1 if a run does not fit, else 0.

    Args:
        path: file of the page; its rows stay unless they are planned again.
        configs, topologies: values of --config and --topology of a plan.
        plan: makes one plan from the arguments of its command and prints it.
    """
    from tba_jax.config.command_line import versions

    rows = _rows_of(path)
    found = {name: x for name, x in versions().items() if name in ("jax", "jaxlib", "python")}
    text = _TEXT.format(versions=", ".join(f"{name} {x}" for name, x in found.items()) + ".")
    code = 0
    for config in configs:
        for topology in topologies:
            rows[config, topology], fits = _row(config, topology, plan)
            code = code or int(not fits)
            lines = [_line(_HEAD), _line(["---"] * len(_HEAD)), *map(_line, sorted(rows.values()))]
            path.write_text(text + "\n".join(lines) + "\n")
    return code


def _facts(plan: Plan, *argv: str) -> dict[str, Any]:
    """Return the JSON object of a plan; {} for a run that cannot be planned."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = plan([*argv, "--json"])
    return {} if code == 2 else json.loads(printed.getvalue().rstrip().splitlines()[-1])


def _with_own_rows(config: str, topology: str, plan: Plan, chosen: int | None) -> str:
    """Return the roofline of the train step with the micro-batch rows of the preset.

    The result is "" if the preset does not set the rows, or the plan chose the same number.
    """
    from tba_jax.config.command_line import override

    rows = override(None, [f"--config={config}"]).batch.micro_batch_rows
    if not rows or chosen in (None, rows):
        return ""
    argv = (f"--config={config}", f"--topology={topology}", "--programs=train_step")
    facts = _facts(plan, *argv, f"--config.{_SIZES[0]}={rows}")
    step = facts.get("programs", {}).get("train_step", {"failure": "not planned"})
    if step["failure"]:
        is_over = any(o["over_gib"] for o in facts.get("memory", {}).values())
        return f"{rows}: {'does not fit' if is_over else 'does not compile'}"
    verdict = "" if facts.get("fits") else ", does not fit"
    return f"{rows}: {seconds(step['roofline_s'])}{verdict}"


def _row(config: str, topology: str, plan: Plan) -> tuple[list[str], bool]:
    """Return the cells of a plan's row, and whether the run fits."""
    facts = _facts(plan, f"--config={config}", f"--topology={topology}")
    head = [f"`{config}`", f"`{topology}`"]
    if not facts:
        return [*head, *[""] * (len(_HEAD) - 3), "no plan"], False
    placed, step = facts["placement"], facts["programs"]["train_step"]
    mesh = ", ".join(x for x in placed["trainer_mesh"].split(" x ") if not x.endswith(" 1"))
    searchers = f"{placed['searcher_groups']} x {placed['searcher_devices']}"
    sizes = (f"{n}={placed['fields'][n]}" for n in _SIZES if n in placed["fields"])
    peaks = [f"{o['peak_gib']:.1f}" for o in facts["memory"].values()]
    capacity = next(iter(facts["memory"].values()))["capacity_gib"]
    over = max(o["over_gib"] for o in facts["memory"].values())
    hourly = facts["balance"]["steps_per_hour"] if facts["balance"] else None
    return [
        *head,
        f"{placed['layout']}, {mesh or 'one device'}, {searchers}",
        " ".join(f"`{x}`" for x in sizes),
        f"{', '.join(peaks)} of {capacity:.1f}",
        "" if step["failure"] else f"{step['hbm_gib'].get('temporaries', 0.0):.1f}",
        "" if step["failure"] else f"{seconds(step['roofline_s'])}, {step['bound']}",
        _with_own_rows(config, topology, plan, placed["fields"].get(_SIZES[0])),
        seconds(facts["programs"]["decode_chunk"]["roofline_s"]),
        "" if hourly is None else f"{hourly:,.0f}",
        "fits" if facts["fits"] else f"over by {over:.1f}" if over else "does not compile",
    ], bool(facts["fits"])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rows_of(path: Path) -> dict[tuple[str, str], list[str]]:
    """Return (config, slice) -> cells of the page; {} if there is no page."""
    if not path.exists():
        return {}
    lines = (line.strip("| ").split(" | ") for line in path.read_text().splitlines())
    rows = [row for row in lines if len(row) == len(_HEAD) and row[0].startswith("`")]
    return {(row[0].strip("`"), row[1].strip("`")): row for row in rows}
