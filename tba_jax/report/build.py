# SPDX-License-Identifier: Apache-2.0
"""The report of a run: report.html and plots/*.png, built from its work directory.

Invariant: the page is a single file, replaced as a whole.
"""

import os
from pathlib import Path

from tba_jax.report import page as report_page
from tba_jax.report import plots
from tba_jax.report.figures import FIGURES
from tba_jax.report.files import Run, load_run
from tba_jax.storage.whole_files import write_whole


def build_report(workdir: str | os.PathLike[str]) -> Path:
    """Write plots/*.png and report.html of a work directory; return the path of the page."""
    return write_report(load_run(workdir))


def write_report(run: Run) -> Path:
    """Write the report of a run that is already loaded."""
    folder = run.workdir / "plots"
    folder.mkdir(exist_ok=True)
    pictures = draw_pictures(run)
    for figure in FIGURES:
        file = folder / f"{figure.name}.png"
        if figure.name in pictures:
            write_whole(file, pictures[figure.name])
        else:
            file.unlink(missing_ok=True)
    page = run.workdir / "report.html"
    write_whole(page, report_page.render(run, pictures).encode())
    return page


def draw_pictures(run: Run) -> dict[str, bytes]:
    """Return figure name -> PNG file; empty figures are left out."""
    drawn = {figure.name: figure.draw(run) for figure in FIGURES}
    return {name: plots.to_png(figure) for name, figure in drawn.items() if figure is not None}
