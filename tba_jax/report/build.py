# SPDX-License-Identifier: Apache-2.0
"""The report of a run: report.html and plots/*.png, built from its work directory.

Invariant: the page is a single file, replaced as a whole.
"""

import os
import traceback
from pathlib import Path

from tba_jax.report import page as report_page
from tba_jax.report import plots
from tba_jax.report.figures import FIGURES
from tba_jax.report.files import Run, load_run
from tba_jax.settings import load_function
from tba_jax.storage.whole_files import write_whole


def build_report(workdir: str | os.PathLike[str], own: str = "") -> Path:
    """Write plots/*.png and report.html of a work directory; return the path of the page.

    Args:
        own: figures of the user, in the format of `report.figures`.
    """
    return write_report(load_run(workdir), own)


def write_report(run: Run, own: str = "") -> Path:
    """Write the report of a run that is already loaded."""
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
    write_whole(page, report_page.render(run, pictures, draw_own(run, own)).encode())
    return page


def draw_pictures(run: Run) -> dict[str, tuple[bytes, bytes]]:
    """Return figure name -> PNG files (light theme, dark theme); empty figures are left out."""
    pictures = {}
    for figure in FIGURES:
        light, dark = figure.draw(run, plots.LIGHT), figure.draw(run, plots.DARK)
        if light is not None and dark is not None:
            pictures[figure.name] = plots.to_png(light), plots.to_png(dark)
    return pictures


def draw_own(run: Run, names: str, dpi: int = 180) -> dict[str, tuple[bytes, bytes] | str]:
    """Return the user's figures by name: PNG files of both themes, or the error as text."""
    drawn: dict[str, tuple[bytes, bytes] | str] = {}
    for name in filter(None, map(str.strip, names.split(","))):
        title = name.rpartition(":")[2]
        try:
            draw = load_function("report.figures", name)
            light, dark = (plots.to_png(draw(run, x), dpi) for x in (plots.LIGHT, plots.DARK))
            drawn[title] = light, dark
        except Exception as error:  # The traceback shows the line of the user's code.
            where = "".join(traceback.format_exception(error)).rstrip()
            drawn[title] = f"report.figures={name} raised {type(error).__name__}: {error}\n{where}"
    return drawn
