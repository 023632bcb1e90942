# SPDX-License-Identifier: Apache-2.0
"""The figures of a report: one record each, with section, title, text and drawing function.

To add a figure, write a function that draws it and add a record to `FIGURES`. The page, `plots/`
and `python -m tba_jax.report` then include it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from tba_jax.report import plots
from tba_jax.report.files import Run
from tba_jax.report.words import held_out, percent
from tba_jax.report.writers import is_share, metric_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEARNED = "What it learned"
HEALTHY = "Is the optimisation healthy?"


class ReportFigure(NamedTuple):
    """One figure of a report.

    Attributes:
        name: stem of the file plots/NAME.png.
        section: section of the page, one of the constants above.
        title, text: text above the figure, or a function from the run to that text; a single figure
            of a section has no title.
        draw: function from run to the figure; None if the run has nothing to draw.
    """

    name: str
    section: str
    title: str | Callable[[Run], str]
    text: str | Callable[[Run], str]
    draw: "Callable[[Run], Figure | None]"


def _headline(run: Run) -> str:
    name = metric_label(run.metric)
    return name[0].upper() + name[1:]


def _headline_title(run: Run) -> str:
    return "Accuracy" if run.metric == "pass_at_1" else _headline(run)


def _headline_text(run: Run) -> str:
    evals = run.evals
    has_both = len(evals) == 2
    problems = held_out(evals[-1]["n"]) if has_both and "n" in evals[-1] else "held-out problems"
    bars = " Bars: 90 % interval." if has_both and is_share(run.metric) else ""
    return f"{_headline(run)} on {problems}, {run.decoding}.{bars}"


def _habits_text(run: Run) -> str:
    evals = run.evals
    measured = ("kind_share", "response_length_mean")
    if not run.kind or len(evals) != 2 or not all(name in e for e in evals for name in measured):
        return "What the searchers sample, step by step."
    shares = [percent(e["kind_share"], 0) for e in evals]
    lengths = [f"{e['response_length_mean']:.0f}" for e in evals]
    return (
        f"Held out, {run.kind} answers went from {shares[0]} to {shares[1]}, the mean length from "
        f"{lengths[0]} to {lengths[1]} tokens."
    )


FIGURES = (
    ReportFigure("accuracy", LEARNED, _headline_title, _headline_text, plots.accuracy),
    ReportFigure(
        "reward", LEARNED, "Reward", "Mean reward of sampled responses, per step.", plots.reward
    ),
    ReportFigure("habits", LEARNED, "How it answers", _habits_text, plots.habits),
    ReportFigure(
        "staleness",
        LEARNED,
        "Staleness of the training data",
        "Share of the responses trained on, by the age of the weights that sampled them.",
        plots.staleness,
    ),
    ReportFigure(
        "optimisation",
        HEALTHY,
        "Optimisation",
        "Dots are steps, lines their moving mean.",
        plots.optimisation,
    ),
    ReportFigure(
        "by_staleness",
        HEALTHY,
        "By the age of the responses",
        "Moving means, one line for each range of age in steps. When the measures of old "
        "responses get worse, an objective with importance ratios learns less from them.",
        plots.by_staleness,
    ),
)
