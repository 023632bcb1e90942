# SPDX-License-Identifier: Apache-2.0
"""The report of a run: report.html and plots/*.png, made from what its work directory holds.

It owns one invariant: the page is a single file, replaced whole.
"""

import os
from pathlib import Path

from tba_jax.report import page as report_page
from tba_jax.report import plots
from tba_jax.report.figures import FIGURES
from tba_jax.report.files import Run, load_run
from tba_jax.storage.whole_files import write_whole


def build_report(workdir: str | os.PathLike[str]) -> Path:
    """Write plots/*.png and report.html from what the work directory holds; returns the page.

    Raises:
        ValueError: as `load_run`.
    """
    return write_report(load_run(workdir))


def write_report(run: Run) -> Path:
    """`build_report` of a run that is read already."""
    folder = run.workdir / "plots"
    folder.mkdir(exist_ok=True)
    pictures = draw_pictures(run)
    for figure in FIGURES:
        file = folder / f"{figure.name}.png"
        if figure.name in pictures:
            write_whole(file, pictures[figure.name][0])
        else:
            file.unlink(missing_ok=True)
    page = run.workdir / "report.html"
    write_whole(page, report_page.render(run, pictures).encode())
    return page


def draw_pictures(run: Run, dpi: int = 180) -> dict[str, tuple[bytes, bytes]]:
    """Figure -> PNG files of the light and the dark theme; without the figures that are empty."""
    pictures = {}
    for figure in FIGURES:
        light, dark = figure.draw(run, plots.LIGHT), figure.draw(run, plots.DARK)
        if light is not None and dark is not None:
            pictures[figure.name] = plots.to_png(light, dpi), plots.to_png(dark, dpi)
    return pictures
