# SPDX-License-Identifier: Apache-2.0
"""Command: one page that compares runs, finished or in progress."""

from collections.abc import Sequence
from pathlib import Path

from tba_jax.commands.entry_point import make_parser
from tba_jax.report.comparison import render_comparison, summary
from tba_jax.report.files import load_run
from tba_jax.report.groups import group_runs
from tba_jax.run.workdir import run_folder
from tba_jax.storage.whole_files import write_whole


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page that compares work directories; return the exit code."""
    parser = make_parser("compare", __doc__)
    parser.add_argument("workdir", nargs="+", help="work directories of runs")
    about = "config fields: runs with equal values are one curve with a band; default: all but seed"
    parser.add_argument("--group", default="", metavar="FIELD,...", help=about)
    parser.add_argument("--out", type=Path, help="default: compare.html beside the runs")
    arguments = parser.parse_args(argv)
    fields = [field for field in arguments.group.split(",") if field]
    folders = dict.fromkeys(arguments.workdir)
    runs = [load_run(run_folder(folder, "WORKDIR")) for folder in folders]
    grouped = group_runs(runs, fields)
    parents = {run.workdir.resolve().parent for run in runs}
    folder = parents.pop() if len(parents) == 1 else Path.cwd()
    page = arguments.out or folder / "compare.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    write_whole(page, render_comparison(grouped).encode())
    for group in grouped:
        print(summary(group))
    print(page)
    return 0
