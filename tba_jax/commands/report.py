# SPDX-License-Identifier: Apache-2.0
"""Command: rebuild the report of a run from what it left in its work directory."""

import argparse
import sys
from collections.abc import Sequence

from tba_jax.report.build import write_report
from tba_jax.report.files import Run, load_run
from tba_jax.report.page import headline
from tba_jax.run.errors import UserError
from tba_jax.run.mirroring import run_folder
from tba_jax.run.ownership import check_for_report


def _check_metrics(run: Run) -> None:
    """Refuse to replace a page by one with fewer steps.

    Raises:
        UserError: metrics.jsonl ends before the step that report.json names.
    """
    steps = run.report.get("steps") or 0
    if run.metrics.last_step < steps and (run.workdir / "report.html").exists():
        raise UserError(
            f"{run.workdir / 'metrics.jsonl'} ends at step {run.metrics.last_step}, and "
            f"report.json is of step {steps}: lines are missing. report.html is left as it is. Put "
            "metrics.jsonl back, or remove report.html to make a page of what is there"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Rebuild the report of a work directory; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tba_jax.report", description="Rebuild the report of a run."
    )
    parser.add_argument("workdir", help="work directory of a run")
    arguments = parser.parse_args(argv)
    try:
        folder = run_folder(arguments.workdir, "WORKDIR", lambda line: print(line, flush=True))
        check_for_report(folder)
        run = load_run(folder)
        _check_metrics(run)
        page = write_report(run)
    except (ValueError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(headline(run))
    print(page)
    return 0
