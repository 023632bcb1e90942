# SPDX-License-Identifier: Apache-2.0
"""Tables and figures of the studies on enumerable problems.

The first half of the seeds selects the learning rate of an objective in a case; the second half is
reported. Slopes are least-squares fits; no other value is fitted.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tba_jax.report.plots import GRID, MUTED, SERIES, new_figure, style_axes, to_png
from tba_jax.studies.enumerated import Measures
from tba_jax.studies.enumerated_runs import Batches
from tba_jax.studies.sweeps import Study

# A run has collapsed if it ends below this share of its best success.
COLLAPSED = 0.5
CONFIDENCE = 0.9
# Distance below which a policy counts as at the target.
AT_TARGET = 1e-3


class Row(NamedTuple):
    """Results of an objective in one case: arrays [rates, seeds, evaluations]."""

    objective: str
    case: str
    measures: Measures
    wall_s: float
    batches: Batches


class End(NamedTuple):
    """Final results of an objective in one case at its selected rate: arrays over the test seeds.

    Attributes:
        rate: selected learning rate.
        success, entropy, modes, target_kl: as in `Measures`.
        collapsed: share of collapsed runs at that rate.
        collapsed_any: share of collapsed runs over all rates.
    """

    rate: float
    success: np.ndarray
    entropy: np.ndarray
    modes: np.ndarray
    target_kl: np.ndarray
    collapsed: float
    collapsed_any: float


def interval(values: np.ndarray) -> tuple[float, float]:
    """Return the mean, and half the width of its Student interval (nan for a single value)."""
    from scipy import stats

    n = len(values)
    if n < 2:
        return float(np.mean(values)), float("nan")
    half = stats.t.ppf((1 + CONFIDENCE) / 2, n - 1) * np.std(values, ddof=1) / np.sqrt(n)
    return float(np.mean(values)), float(half)


def end_of(row: Row, rates: Sequence[float], by: str = "success") -> End:
    """Return the results at the learning rate with the best end in the first half of the seeds.

    Args:
        row: results of the study.
        rates: learning rates of the study.
        by: "success" selects the highest, "target_kl" the lowest value.
    """
    success = np.nan_to_num(row.measures.success)
    half = success.shape[1] // 2
    score = success if by == "success" else -np.nan_to_num(row.measures.target_kl, nan=np.inf)
    at = int(np.argmax(score[:, :half, -1].mean(1)))
    collapsed = success[:, :, -1] < COLLAPSED * success.max(-1)
    ends = {
        name: getattr(row.measures, name)[at, half:, -1]
        for name in ("entropy", "modes", "target_kl")
    }
    return End(
        rates[at],
        success[at, half:, -1],
        **ends,
        collapsed=float(collapsed[at, half:].mean()),
        collapsed_any=float(collapsed.mean()),
    )


def slopes(ends: Sequence[End], lags: Sequence[float]) -> np.ndarray:
    """Return each seed's least-squares slope of success per ten steps of lag."""
    return np.polyfit(np.array(lags) / 10, np.stack([end.success for end in ends]), 1)[0]


def rows_of(rows: Sequence[Row], name: str, study: Study) -> list[Row]:
    """Return the rows of an objective, in the order of the cases."""
    by_case = {row.case: row for row in rows if row.objective == name}
    return [by_case[label] for label in study.cases if label in by_case]


def names_of(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.objective for row in rows))


def table(name: str, study: Study, rows: Sequence[Row]) -> str:
    """Return the table of a study as Markdown."""
    if name == "optimum":
        return optimum_table(study, rows)
    text = sweep_table(study, rows)
    return f"{staleness_table(study, rows)}\n\n{text}" if name == "staleness" else text


def optimum_table(study: Study, rows: Sequence[Row]) -> str:
    """Return distances to the target, reward and entropy at the selected learning rate."""
    lines = [
        "| objective | data | KL(target, policy) at the end, mean | worst seed | expected reward | "
        "entropy | at rate |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        end = end_of(row, study.rates, "target_kl")
        lines.append(
            f"| {row.objective} | {row.case} | {end.target_kl.mean():.2g} | "
            f"{end.target_kl.max():.2g} | {end.success.mean():.3f} | {end.entropy.mean():.2f} | "
            f"{end.rate:g} |"
        )
    return "\n".join(lines)


def staleness_table(study: Study, rows: Sequence[Row]) -> str:
    """Return the table of success at each lag, with its slope and the share of collapsed runs."""
    columns = " | ".join(f"success at lag {lag} (rate)" for lag in study.cases)
    lines = [
        f"| objective | {columns} | slope per 10 steps of lag, 90 % interval | collapsed at the "
        "longest lag | collapsed, any rate and lag |",
        "|---|" + "---|" * (len(study.cases) + 3),
    ]
    for name in names_of(rows):
        mine = rows_of(rows, name, study)
        if len(mine) < len(study.cases):
            continue
        ends = [end_of(row, study.rates) for row in mine]
        cells = [f"{spread(end.success)} ({end.rate:g})" for end in ends]
        lines.append(
            f"| {name} | {' | '.join(cells)} | "
            f"{spread(slopes(ends, [float(row.case) for row in mine]), '+')} | "
            f"{ends[-1].collapsed:.0%} | {np.mean([end.collapsed_any for end in ends]):.0%} |"
        )
    return "\n".join(lines)


def spread(values: np.ndarray, sign: str = "") -> str:
    mean, half = interval(values)
    return f"{mean:{sign}.3f} ± {half:.3f}"


def sweep_table(study: Study, rows: Sequence[Row]) -> str:
    """Return success, deviation, entropy, modes and collapses of every objective and case."""
    lines = [
        f"| objective | {study.axis} | success, 90 % interval | deviation over seeds | entropy | "
        "modes of correct strings | collapsed, any rate | at rate | s |",
        "|---|" + "---|" * 8,
    ]
    for row in rows:
        end = end_of(row, study.rates)
        lines.append(
            f"| {row.objective} | {row.case} | {spread(end.success)} | "
            f"{np.std(end.success, ddof=1) if len(end.success) > 1 else np.nan:.3f} | "
            f"{end.entropy.mean():.2f} | {end.modes.mean():.2f} | {end.collapsed_any:.0%} | "
            f"{end.rate:g} | {row.wall_s:.0f} |"
        )
    return "\n".join(lines)


def figure(name: str, study: Study, rows: Sequence[Row]) -> bytes:
    """Return the figure of a study as PNG."""
    if name == "optimum":
        return _dots_figure(study, rows, "target_kl")
    return (_dots_figure if name == "staleness" else _sweep_figure)(study, rows)


def _dots_figure(study: Study, rows: Sequence[Row], by: str = "success") -> bytes:
    """Draw a dot for each objective and case: success, or the worst distance to the target."""
    names = names_of(rows)
    picture = new_figure(7.0, 0.27 * len(names) + 1.0)
    axes = picture.subplots()
    style_axes(axes)
    axes.set_ylim(len(names) - 0.5, -0.5)  # the first objective on top
    axes.set_yticks(range(len(names)), names)
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    for i, label in enumerate(study.cases):
        shown = [row for row in rows if row.case == label]
        ends = [end_of(row, study.rates, by) for row in shown]
        if by == "success":
            x = [end.success.mean() for end in ends]
        else:
            x = [max(end.target_kl.max(), 1e-6) for end in ends]
        y = [names.index(row.objective) + 0.16 * (i - 1.5) for row in shown]
        axes.plot(x, y, "o", color=SERIES[i], markersize=5, label=label)
    if by == "success":
        axes.set_xlabel("success at the end")
    else:
        axes.axvline(AT_TARGET, color=MUTED, linewidth=0.8, linestyle="--")
        axes.set_xscale("log")
        axes.set_xlabel("KL(target || policy) at the end, worst seed, nats")
    picture.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=9, title=study.axis)
    return to_png(picture, dpi=130)


def _sweep_figure(study: Study, rows: Sequence[Row]) -> bytes:
    """Draw success by case with 90 % intervals, one line for each objective."""
    picture = new_figure(max(5.0, 0.45 * len(study.cases)), 3.2)
    axes = picture.subplots()
    style_axes(axes)
    labels = list(study.cases)
    for i, name in enumerate(names_of(rows)):
        mine = rows_of(rows, name, study)
        spread = np.array([interval(end_of(row, study.rates).success) for row in mine])
        x = np.array([labels.index(row.case) for row in mine]) + 0.06 * i
        axes.errorbar(
            x, spread[:, 0], yerr=spread[:, 1], fmt="o", color=SERIES[i], capsize=2, label=name
        )
    is_long = max(map(len, labels)) > 6
    axes.set_xticks(
        range(len(labels)),
        labels,
        rotation=60 if is_long else 0,
        ha="right" if is_long else "center",
    )
    axes.set_xlabel(study.axis)
    axes.set_ylabel("success at the end")
    axes.legend(frameon=False, fontsize=9)
    return to_png(picture, dpi=130)
