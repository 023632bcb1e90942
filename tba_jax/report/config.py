# SPDX-License-Identifier: Apache-2.0
"""Settings of the report."""

from dataclasses import dataclass

from tba_jax.settings import Section, field


@dataclass(frozen=True)
class ReportSettings(Section):
    """The report of a run."""

    period_s: float = field(
        300.0,
        "seconds between two rewrites of report.html during the run; 0: at the end only",
        at_least=0,
        on_resume=True,
    )
