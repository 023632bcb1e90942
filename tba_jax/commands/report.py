# SPDX-License-Identifier: Apache-2.0
"""Command: write the report of a run again."""

import argparse
import os
from collections.abc import Sequence

from tba_jax.commands.entry_point import end_with_parent, make_parser
from tba_jax.report.build import write_report
from tba_jax.report.files import load_run
from tba_jax.report.page import headline
from tba_jax.run.errors import UserError
from tba_jax.run.workdir import run_folder, saved_config


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report of a work directory; return the exit code."""
    parser = make_parser("report", __doc__)
    parser.add_argument("workdir", help="work directory of a run")
    parser.add_argument("--with_parent", action="store_true", help=argparse.SUPPRESS)  # of a run
    arguments = parser.parse_args(argv)
    if arguments.with_parent:
        end_with_parent()
        os.nice(19)  # the lowest priority, so that a run on this machine is not slowed
    folder = run_folder(arguments.workdir, "WORKDIR")
    saved_config(folder)  # refuses the folder of another program
    run = load_run(folder)
    steps = run.report.get("steps") or 0
    if run.logged_steps < steps and (folder / "report.html").exists():
        raise UserError(
            f"{folder / 'metrics.jsonl'} ends at step {run.logged_steps}, before step {steps} of "
            "report.json: lines are missing, so report.html is kept. Restore metrics.jsonl, or "
            "remove report.html to report on the remaining lines"
        )
    page = write_report(run)
    print(headline(run))
    print(page)
    return 0
