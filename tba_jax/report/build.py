# SPDX-License-Identifier: Apache-2.0
"""The report of a run: report.html and plots/*.png.

It reads what the run left in its work directory: report.json, metrics.jsonl, schedule.jsonl,
config.json, each of which may be missing. It does not know how any of it was made,
nor what the page looks like. It owns one invariant: the page is a single file, replaced whole.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba_jax.report import page as report_page
from tba_jax.report import plots
from tba_jax.report.page import Run
from tba_jax.report.writers import read_jsonl

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def load_run(workdir: str | os.PathLike[str]) -> Run:
    """Read a work directory.

    Raises:
        ValueError: when it is not a work directory, or one of its files is damaged.
    """
    workdir = Path(workdir)
    if not any((workdir / name).exists() for name in ("metrics.jsonl", "report.json")):
        raise ValueError(
            f"{workdir}: found neither metrics.jsonl nor report.json, wanted the work directory "
            "of a run. Give the directory that was named by --workdir"
        )
    resolved = _read_json(workdir / "config.json")
    return Run(
        workdir=workdir,
        report=_read_json(workdir / "report.json"),
        config=report_page.flat(resolved.get("config", {})),
        versions=resolved.get("versions", {}),
        metrics=read_jsonl(workdir / "metrics.jsonl"),
        schedule=read_jsonl(workdir / "schedule.jsonl"),
    )


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}). Remove the file to go without it") from error
    if not isinstance(facts, dict):
        raise ValueError(f"{path}: got {type(facts).__name__}, wanted a JSON object")
    return facts


def build_report(workdir: str | os.PathLike[str]) -> Path:
    """Write plots/*.png and report.html from what the work directory holds; returns the page.

    Raises:
        ValueError: as `load_run`.
    """
    run = load_run(workdir)
    drawings: dict[str, Callable[[plots.Theme], Figure | None]] = {
        "accuracy": lambda theme: plots.accuracy(run.metrics, run.metric, theme),
        "reward": lambda theme: plots.reward(run.metrics, theme),
        "habits": lambda theme: plots.habits(run.metrics, run.kind, theme),
        "staleness": lambda theme: plots.staleness(run.metrics, theme),
        "timeline": lambda theme: plots.timeline(run.schedule, theme),
        "optimisation": lambda theme: plots.optimisation(run.metrics, theme),
    }
    folder = run.workdir / "plots"
    folder.mkdir(exist_ok=True)
    pictures: dict[str, tuple[bytes, bytes]] = {}
    for name, draw in drawings.items():
        light, dark = draw(plots.LIGHT), draw(plots.DARK)
        if light is not None and dark is not None:
            pictures[name] = plots.to_png(light), plots.to_png(dark)
            (folder / f"{name}.png").write_bytes(pictures[name][0])
        else:
            (folder / f"{name}.png").unlink(missing_ok=True)
    page = run.workdir / "report.html"
    new_page = run.workdir / "report.html.new"
    new_page.write_text(report_page.render(run, pictures), encoding="utf-8")
    os.replace(new_page, page)
    return page
