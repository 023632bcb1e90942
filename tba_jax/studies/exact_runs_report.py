# SPDX-License-Identifier: Apache-2.0
"""Tables and figures of runs over time: their training data and their diversity.

As in `exact_report`, the first half of the seeds selects the rate and the second half is reported.
A value at a given success is interpolated linearly between two evaluations of one run.
"""

from collections.abc import Sequence

import numpy as np

from tba_jax.report.plots import MAIN, SECOND, SERIES, new_figure, style_axes, to_png
from tba_jax.studies.exact_report import (
    Row,
    dots,
    end_of,
    interval,
    names_of,
    rows_of,
    spread,
)
from tba_jax.studies.sweeps import Study

REACHED = (0.1, 0.5)
LEVELS = (0.25, 0.5, 0.75)


def soonest(row: Row) -> int:
    """Return the index of the learning rate with the best mean success.

    The mean is over the first half of the seeds.
    """
    success = np.nan_to_num(row.measures.success)
    return int(np.argmax(success[:, : success.shape[1] // 2].mean((1, 2))))


def first_at(values: np.ndarray, level: float) -> np.ndarray:
    """Return the index of the first evaluation at `level` or above, for each run; inf: never.

    Shape of `values`: [runs evaluations].
    """
    is_there = values >= level
    return np.where(is_there.any(1), is_there.argmax(1).astype(float), np.inf)


def at_success(values: np.ndarray, success: np.ndarray, level: float) -> np.ndarray:
    """Return values at the point where success first reaches `level`, for each run; nan: never.

    Shape of `values` and `success`: [runs evaluations].
    """
    found = np.full(len(values), np.nan)
    for run, first in enumerate(first_at(success, level)):
        if np.isfinite(first):
            j = int(first)
            span = slice(max(j - 1, 0), j + 1)
            # `interp` needs ascending success.
            found[run] = np.interp(level, success[run, span], values[run, span])
    return found


def table(name: str, study: Study, rows: Sequence[Row]) -> str:
    """Return the table of a study as Markdown."""
    del name
    tables = {"data": data_table, "diversity": diversity_table, "stops": stops_table}
    return tables[study.shows](study, rows)


def data_table(study: Study, rows: Sequence[Row]) -> str:
    """Return the table of success over time, with statistics of the training data."""
    lines = [
        f"| objective | {study.axis} | success at the end, 90 % interval | mean over the run | "
        "median steps to 10 % | to 50 % | to the first correct string drawn | "
        "distinct strings of a group | mean training reward | correct strings drawn in all | "
        "correct ones among 64 at the end | "
        "modes of correct strings | at rate | s |",
        "|---|" + "---|" * 13,
    ]
    for row in rows:
        at, half = soonest(row), row.measures.success.shape[1] // 2
        of = {k: v[at, half:] for k, v in (row.measures._asdict() | row.batches._asdict()).items()}
        between = study.num_steps // of["success"].shape[1]
        steps = [
            between * (1 + np.median(first_at(values, level)))
            for values, level in (*((of["success"], x) for x in REACHED), (of["found"], 1e-6))
        ]
        found = spread(of["found"][:, -1])
        lines.append(
            f"| {row.objective} | {row.case} | {spread(of['success'][:, -1])} | "
            f"{spread(of['success'].mean(1))} | "
            f"{' | '.join(f'{n:.0f}' if np.isfinite(n) else '–' for n in steps)} | "
            f"{of['unique'].mean():.3f} | {of['rewarded'].mean():.3f} | "
            f"{'–' if 'nan' in found else found} | "
            f"{spread(of['distinct'][:, -1])} | {spread(of['modes'][:, -1])} | "
            f"{study.rates[at]:g} | {row.wall_s:.0f} |"
        )
    return "\n".join(lines)


def _of_level(row: Row, study: Study, field: str, level: float) -> np.ndarray:
    """Return a measurement of each run at the point where success reaches `level`; nan: never.

    The runs are those of the second half of the seeds, at the selected learning rate.
    """
    at = study.rates.index(end_of(row, study.rates).rate)
    half = row.measures.success.shape[1] // 2
    values, success = getattr(row.measures, field)[at, half:], row.measures.success[at, half:]
    return at_success(values, np.nan_to_num(success), level)


def _known(values: np.ndarray) -> str:
    known = values[np.isfinite(values)]
    return spread(known) if len(known) else "–"


def diversity_table(study: Study, rows: Sequence[Row]) -> str:
    """Return the table of diversity: at equal success, and at the end of the runs."""
    low, middle, high = LEVELS
    lines = [
        f"| objective | {study.axis} | reach {middle:.0%} | there: entropy | modes of correct "
        f"strings | correct ones among 64 | KL(target, policy) | modes at {low:.0%} | "
        f"modes at {high:.0%} | success at the end | modes at the end | at rate |",
        "|---|" + "---|" * 11,
    ]
    for row in rows:
        end = end_of(row, study.rates)
        fields = ("entropy", "modes", "distinct", "target_kl")
        there = [_of_level(row, study, field, middle) for field in fields]
        cells = [
            f"{np.isfinite(there[0]).mean():.0%}",
            *map(_known, there),
            *(_known(_of_level(row, study, "modes", level)) for level in (low, high)),
            spread(end.success),
            spread(end.modes),
        ]
        lines.append(f"| {row.objective} | {row.case} | {' | '.join(cells)} | {end.rate:g} |")
    return "\n".join(lines)


def stops_table(study: Study, rows: Sequence[Row]) -> str:
    """Return the table of response lengths and missing ends."""
    lines = [
        f"| objective | {study.axis} | success at the end, 90 % interval | KL(target, policy) | "
        "tokens of a response | without an end | entropy | at rate | s |",
        "|---|" + "---|" * 8,
    ]
    for row in rows:
        end = end_of(row, study.rates)
        at, half = study.rates.index(end.rate), row.measures.success.shape[1] // 2
        shown = [
            spread(getattr(row.measures, field)[at, half:, -1])
            for field in ("success", "target_kl", "length", "unended", "entropy")
        ]
        lines.append(
            f"| {row.objective} | {row.case} | {' | '.join(shown)} | {end.rate:g} | "
            f"{row.wall_s:.0f} |"
        )
    return "\n".join(lines)


def figure(name: str, study: Study, rows: Sequence[Row]) -> bytes:
    """Return the figure of a study as PNG."""
    del name
    return (_diversity_figure if study.shows == "diversity" else _data_figure)(study, rows)


def _data_figure(study: Study, rows: Sequence[Row]) -> bytes:
    """Draw mean success over the steps: one panel for each objective, one line for each case."""
    names = names_of(rows)
    picture = new_figure(max(5.0, 3.0 * len(names)), 3.4)
    panels = picture.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        style_axes(axes)
        for i, row in enumerate(rows_of(rows, name, study)):
            at, half = soonest(row), row.measures.success.shape[1] // 2
            mean = row.measures.success[at, half:].mean(0)
            steps = study.num_steps // len(mean) * (1 + np.arange(len(mean)))
            dashes = "-" if i < len(SERIES) else "--"
            axes.plot(steps, mean, color=SERIES[i % len(SERIES)], linestyle=dashes, label=row.case)
        axes.set_xlabel(f"steps, {name}")
    panels[0].set_ylabel("success")
    panels[0].legend(frameon=False, fontsize=8, title=study.axis, title_fontsize=8)
    return to_png(picture, dpi=130)


def _diversity_figure(study: Study, rows: Sequence[Row]) -> bytes:
    """Draw the number of modes found when success first reaches 50 %; one panel per case."""
    names, level = names_of(rows), LEVELS[1]
    picture = new_figure(8.0, 0.27 * len(names) + 1.2)
    panels = picture.subplots(1, len(study.cases), sharey=True, squeeze=False)[0]
    for axes, label in zip(panels, study.cases, strict=True):
        dots(axes, names)
        for row in rows:
            values = _of_level(row, study, "modes", level)
            values = values[np.isfinite(values)]
            if row.case != label or not len(values):
                continue
            mean, half = interval(values)
            color = SECOND if row.objective == "tb" else MAIN
            axes.errorbar(
                mean, names.index(row.objective), xerr=half, fmt="o", color=color, capsize=2
            )
        axes.set_xlabel(f"modes of correct strings at {level:.0%} success, {study.axis} {label}")
    return to_png(picture, dpi=130)
