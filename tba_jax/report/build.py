# SPDX-License-Identifier: Apache-2.0
"""The report of a run: report.html, plots/*.png and trace.json, built from its work directory.

Invariant: the page is a single file, replaced as a whole.
"""

from pathlib import Path

from tba_jax.report.figures import FIGURES, to_png
from tba_jax.report.files import Run
from tba_jax.report.page import render
from tba_jax.report.trace import render_trace
from tba_jax.storage.whole_files import write_whole


def write_report(run: Run) -> Path:
    """Write the report of a run; return the path of report.html."""
    folder = run.workdir / "plots"
    folder.mkdir(exist_ok=True)
    pictures: dict[str, bytes] = {}
    for name, draw in FIGURES.items():
        file = folder / f"{name}.png"
        if figure := draw(run):
            pictures[name] = to_png(figure)
            write_whole(file, pictures[name])
        else:
            file.unlink(missing_ok=True)
    write_whole(run.workdir / "trace.json", render_trace(run).encode())
    page = run.workdir / "report.html"
    write_whole(page, render(run, pictures).encode())
    return page
