# SPDX-License-Identifier: Apache-2.0
"""Table and figure of a study on enumerable problems.

The first half of the seeds selects the learning rate of an objective in a case; the second half is
reported. Slopes are least-squares fits; no other value is fitted.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from tba_jax.report.figures import to_png
from tba_jax.report.groups import mean_interval
from tba_jax.studies.problems import Measures
from tba_jax.studies.sweeps import Study

# A run has collapsed if it ends below this share of its best success.
COLLAPSED = 0.5


class Row(NamedTuple):
    """Results of an objective in one case: arrays [rates, seeds, evaluations]."""

    objective: str
    case: str
    measures: Measures
    wall_s: float


def ends_of(row: Row, study: Study) -> tuple[int, Measures]:
    """Return the index of the selected learning rate, and the final measures of the other seeds.

    The best end in the first half of the seeds selects it: the lowest distance to the target in a
    study of the target, else the highest success.
    """
    success = np.nan_to_num(row.measures.success)
    half = success.shape[1] // 2
    distance = np.nan_to_num(row.measures.target_kl, nan=np.inf)
    score = -distance if study.is_of_target else success
    at = int(np.argmax(score[:, :half, -1].mean(1)))
    ends = row.measures._replace(success=success)
    return at, Measures(*(np.asarray(x)[at, half:, -1] for x in ends))


def table(study: Study, rows: Sequence[Row]) -> str:
    """Return the results of a study as Markdown."""
    columns = (
        "objective",
        study.axis,
        "success, 90 % interval",
        "deviation over seeds",
        "entropy",
        "modes of correct strings",
        "KL(target, policy), mean",
        "worst seed",
        "collapsed at this rate",
        "at any rate",
        "rate",
        "s",
    )
    lines = [" | ".join(columns), "|".join("---" for _ in columns)]
    ends: dict[str, list[Measures]] = {}
    for row in rows:
        at, end = ends_of(row, study)
        ends.setdefault(row.objective, []).append(end)
        kl, success, entropy, modes = map(np.asarray, end)
        of_run = np.nan_to_num(row.measures.success)
        collapsed = of_run[..., -1] < COLLAPSED * of_run.max(-1)
        here = collapsed[at, -len(success) :].mean()
        lines.append(
            f"{row.objective} | {row.case} | {_spread(success)} | {np.std(success, ddof=1):.3f} | "
            f"{entropy.mean():.2f} | {modes.mean():.2f} | {kl.mean():.2g} | {kl.max():.2g} | "
            f"{here:.0%} | {collapsed.mean():.0%} | {study.rates[at]:g} | {row.wall_s:.0f}"
        )
    text = "\n".join(f"| {line} |" for line in lines)
    if study.has_slopes:
        lags = np.array([float(case) for case in study.cases])
        text += "\n\n| objective | slope of success per 10 steps of lag |\n|---|---|"
        for name, of_name in ends.items():
            if len(of_name) == len(lags):
                slopes = np.polyfit(lags / 10, np.stack([end.success for end in of_name]), 1)[0]
                text += f"\n| {name} | {_spread(slopes, '+')} |"
    return text


def _spread(values: np.ndarray, sign: str = "") -> str:
    mean, _, high = mean_interval(values.tolist())
    return f"{mean:{sign}.3f} ± {high - mean:.3f}"


def figure(study: Study, rows: Sequence[Row]) -> bytes:
    """Return the figure of a study as PNG: one dot for each objective and case.

    Dots are success with its 90 % interval, or the worst distance to the target. Either objectives
    or cases have a line each, whichever are more; the others have a colour each.
    """
    names = list(dict.fromkeys(row.objective for row in rows))
    lines, colours = names, [x for x in study.cases if any(row.case == x for row in rows)]
    if len(colours) > len(lines):
        lines, colours = colours, lines
    picture = Figure(figsize=(7.0, 0.27 * len(lines) + 1.2), layout="constrained")
    axes = picture.subplots()
    axes.set_ylim(len(lines) - 0.5, -0.5)  # the first line on top
    axes.set_yticks(range(len(lines)), lines)
    axes.grid(axis="x")
    for i, colour in enumerate(colours):
        dots = []
        for row in (x for x in rows if colour in (x.objective, x.case)):
            line = row.case if colour == row.objective else row.objective
            ends = ends_of(row, study)[1]
            x, _, high = mean_interval(np.asarray(ends.success).tolist())
            if study.is_of_target:
                x = high = max(np.max(ends.target_kl), 1e-6)
            dots.append((x, high - x, lines.index(line) + 0.16 * (i - 1)))
        x, half, y = zip(*dots, strict=True)
        axes.errorbar(x, y, xerr=half, fmt="o", markersize=5, capsize=2, label=colour)
    axes.set_xlabel("success at the end")
    if study.is_of_target:
        axes.set_xscale("log")
        axes.set_xlabel("KL(target || policy) at the end, worst seed, nats")
    picture.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    return to_png(picture, dpi=130)
