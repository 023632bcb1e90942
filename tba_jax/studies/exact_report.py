# SPDX-License-Identifier: Apache-2.0
"""Table and figure of a study on enumerable problems.

The first half of the seeds selects the learning rate of an objective in a case; the second half is
reported. Slopes are least-squares fits; no other value is fitted.
"""

import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from tba_jax.studies.problems import Measures
from tba_jax.studies.sweeps import Study

# A run has collapsed if it ends below this share of its best success.
COLLAPSED = 0.5
CONFIDENCE = 0.9


class Row(NamedTuple):
    """Results of an objective in one case: arrays [rates, seeds, evaluations]."""

    objective: str
    case: str
    measures: Measures
    wall_s: float


class End(NamedTuple):
    """Final results of an objective in one case at its selected rate: arrays over the test seeds.

    Attributes:
        rate: selected learning rate.
        measures: success, entropy, modes and target_kl.
        collapsed: share of collapsed runs at that rate.
        collapsed_any: share of collapsed runs over all rates.
    """

    rate: float
    measures: Measures
    collapsed: float
    collapsed_any: float


def end_of(row: Row, study: Study) -> End:
    """Return the results at the learning rate with the best end in the first half of the seeds.

    Best is the lowest distance to the target in a study of the target, else the highest success.
    """
    success = np.nan_to_num(row.measures.success)
    half = success.shape[1] // 2
    distance = np.nan_to_num(row.measures.target_kl, nan=np.inf)
    score = -distance if study.is_of_target else success
    at = int(np.argmax(score[:, :half, -1].mean(1)))
    collapsed = success[:, :, -1] < COLLAPSED * success.max(-1)
    ends = row.measures._replace(success=success)
    return End(
        study.rates[at],
        Measures(*(np.asarray(x)[at, half:, -1] for x in ends)),
        collapsed=float(collapsed[at, half:].mean()),
        collapsed_any=float(collapsed.mean()),
    )


def interval(values: np.ndarray) -> tuple[float, float]:
    """Return the mean, and half the width of its Student interval (nan for a single value)."""
    n = len(values)
    if n < 2:
        return float(np.mean(values)), float("nan")
    half = stats.t.ppf((1 + CONFIDENCE) / 2, n - 1) * np.std(values, ddof=1) / np.sqrt(n)
    return float(np.mean(values)), float(half)


def slopes(ends: Sequence[End], lags: Sequence[float]) -> np.ndarray:
    """Return each seed's least-squares slope of success per ten steps of lag."""
    return np.polyfit(np.array(lags) / 10, np.stack([end.measures.success for end in ends]), 1)[0]


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
    ends: dict[str, list[End]] = {}
    for row in rows:
        end = end_of(row, study)
        ends.setdefault(row.objective, []).append(end)
        success, entropy, modes, kl = (
            getattr(end.measures, name) for name in ("success", "entropy", "modes", "target_kl")
        )
        deviation = np.std(success, ddof=1) if len(success) > 1 else np.nan
        lines.append(
            f"{row.objective} | {row.case} | {_spread(success)} | {deviation:.3f} | "
            f"{entropy.mean():.2f} | {modes.mean():.2f} | {kl.mean():.2g} | {kl.max():.2g} | "
            f"{end.collapsed:.0%} | {end.collapsed_any:.0%} | {end.rate:g} | {row.wall_s:.0f}"
        )
    text = "\n".join(f"| {line} |" for line in lines)
    if study.has_slopes:
        lags = [float(case) for case in study.cases]
        text += "\n\n| objective | slope of success per 10 steps of lag |\n|---|---|"
        for name, of_name in ends.items():
            if len(of_name) == len(lags):
                text += f"\n| {name} | {_spread(slopes(of_name, lags), '+')} |"
    return text


def _spread(values: np.ndarray, sign: str = "") -> str:
    mean, half = interval(values)
    return f"{mean:{sign}.3f} ± {half:.3f}"


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
            ends = end_of(row, study).measures
            x = (
                (max(ends.target_kl.max(), 1e-6), 0)
                if study.is_of_target
                else interval(np.asarray(ends.success))
            )
            dots.append((*x, lines.index(line) + 0.16 * (i - 1)))
        x, half, y = zip(*dots, strict=True)
        axes.errorbar(x, y, xerr=half, fmt="o", markersize=5, capsize=2, label=colour)
    axes.set_xlabel("success at the end")
    if study.is_of_target:
        axes.set_xscale("log")
        axes.set_xlabel("KL(target || policy) at the end, worst seed, nats")
    picture.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    out = io.BytesIO()
    picture.savefig(out, format="png", dpi=130)
    return out.getvalue()
