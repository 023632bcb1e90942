# SPDX-License-Identifier: Apache-2.0
"""The page that compares runs: curves, final results, differing settings, responses.

The page runs no script: buttons that choose the axis are radio buttons and CSS.
"""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tba_jax.report import figures, groups, template
from tba_jax.report.files import Run
from tba_jax.report.groups import RunGroup
from tba_jax.report.words import (
    format_count,
    format_duration,
    format_metric,
    is_share,
    metric_label,
    plain,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_PROMPTS = 20
# Axis -> (its button, its label).
_AXES = {
    "step": ("by step", "optimiser step"),
    "tokens": ("by trained tokens", "trained tokens"),
    "time": ("by time", "time since start (min:s)"),
}
_METRICS = {
    "reward of sampled responses": "search/reward_mean",
    "response length (tokens)": "search/response_length_mean",
    "staleness, mean (steps)": "buffer/staleness_mean",
    "log ratio to the reference (nats)": "train/kl_reference",
    "effective sample size (share)": "train/ess_fraction",
    "gradient norm": "train/grad_norm",
}


def render_comparison(grouped: Sequence[RunGroup]) -> str:
    """Return the page as HTML text."""
    runs = [run for group in grouped for run in group.runs]
    names, names_of_groups = groups.run_names(runs), [group.name for group in grouped]
    title = f"{len(runs)} runs" if len(runs) > 1 else "1 run"
    return template.render(
        "compare.html",
        title=title + (f" in {len(grouped)} groups" if len(grouped) > 1 else ""),
        name="compare",
        run_names=names,
        num_runs=len(runs),
        unfinished=sum(not run.is_finished for run in runs),
        final=_final(grouped),
        axes={axis: button for axis, (button, _) in _AXES.items()},
        curves=_curves(grouped),
        has_seeds=any(len(group.runs) > 1 for group in grouped),
        legend=zip(names_of_groups, itertools.cycle(figures.SERIES), strict=False),
        group_names=names_of_groups,
        differences=_differences(grouped),
        without_config=[x for x, r in zip(names, runs, strict=True) if not r.config],
        responses=[*groups.shared_prompts(runs).items()][:_MOST_PROMPTS],
    )


def _curves(grouped: Sequence[RunGroup]) -> list[tuple[str, dict[str, str]]]:
    """Return (label, axis -> address of the picture) for each metric that a run has."""
    runs = [run for group in grouped for run in group.runs]
    named = {f"{metric_label(r.metric)}, held out": f"eval/{r.metric}" for r in runs if r.evals}

    def picture(metric: str, axis: str) -> str:
        return template.picture(figures.to_png(draw_curves(grouped, metric, axis), dpi=130))

    return [
        (label, {axis: picture(metric, axis) for axis in _AXES})
        for label, metric in {**named, **_METRICS}.items()
        if any(metric in run.metrics.names for run in runs)
    ]


def draw_curves(grouped: Sequence[RunGroup], metric: str, axis: str) -> "Figure":
    """Draw the curves of a metric, with a colour for each group and a band over its seeds.

    Args:
        metric: key of metrics.jsonl.
        axis: a key of `_AXES`.
    """
    figure, (axes,) = figures.new_axes((5.0, 2.6))
    is_evaluation = metric.startswith("eval/")
    for group, color in zip(grouped, itertools.cycle(figures.SERIES), strict=False):
        curves = [groups.curve(run, metric, axis) for run in group.runs]
        if not is_evaluation:
            curves = [(x, figures.smooth(y)) for x, y in curves]
        band = groups.band(curves)
        single: dict[str, Any] = {"linewidth": 1.9, "marker": "." if is_evaluation else ""}
        if band:
            single = {"linewidth": 0.8, "alpha": 0.35}
            x, mean, low, high = band
            axes.fill_between(x, low, high, color=color, alpha=0.16, linewidth=0)
            axes.plot(x, mean, linewidth=2.2, color=color)
        for x, y in curves:
            axes.plot(x, y, color=color, **single)
    has_shares = is_evaluation and is_share(metric.removeprefix("eval/"))
    figures.format_axes(axes, axis, is_share=has_shares)
    axes.set_xlabel(_AXES[axis][1])
    return figure


_Interval = tuple[float, float, float]  # middle, low, high; without an interval low is high


def _last_evaluation(runs: Sequence[Run], metric: str) -> _Interval | None:
    # The evaluation before training is not the result of a run.
    trained = [run.evals[-1] for run in runs if len(run.evals) > 1]
    if len(trained) == 1 and is_share(metric) and 0 <= trained[0][metric] <= 1:
        if trials := trained[0].get("num_trials"):
            return (trained[0][metric], *figures.share_interval(trained[0][metric], trials))
    return groups.mean_interval([x[metric] for x in trained]) if trained else None


def _with_interval(found: _Interval | None, metric: str) -> str:
    if found is None:
        return "–"
    middle, low, high = (format_metric(metric, x) for x in found)
    interval = f" [{low.rstrip('%')}, {high.rstrip('%')}]"
    return middle + interval * (found[2] > found[1])


def summary(group: RunGroup) -> str:
    """Return one line: name, last evaluation with its interval, number of runs."""
    parts = [f"{len(group.runs)} run{'s' if len(group.runs) > 1 else ''}"]
    for metric in dict.fromkeys(run.metric for run in group.runs if len(run.evals) > 1):
        last = _last_evaluation([run for run in group.runs if run.metric == metric], metric)
        parts.append(f"{metric_label(metric)} {_with_interval(last, metric)}")
    return f"{group.name}: {', '.join(parts)}"


def _final(grouped: Sequence[RunGroup]) -> list[dict[str, Any]]:
    """Return a row for each metric and group."""
    members: dict[str, dict[str, list[Run]]] = {}  # metric -> name of the group -> its runs
    for group in grouped:
        for run in group.runs:
            of = members.setdefault(run.metric if run.evals else "", {})
            of.setdefault(group.name, []).append(run)
    each = [(name, runs, x) for x, named in members.items() for name, runs in named.items()]
    return [{"name": name, **_figures(runs, metric)} for name, runs, metric in each]


def _figures(runs: Sequence[Run], metric: str) -> dict[str, Any]:
    """Return the text of the other cells of a row of the final results."""
    done = sorted({run.last_step for run in runs})
    unfinished = sum(not run.is_finished for run in runs)
    steps = f"{done[0]}" if len(done) == 1 else f"{done[0]}–{done[-1]}"
    if unfinished:
        steps += f" of {max(run.num_steps for run in runs)}"
    first = [run.evals[0][metric] for run in runs if run.evals]
    tokens = [t[-1] for run in runs if len(t := groups.trained_tokens(run)[1])]
    ages = [run.metrics.column("step", "buffer/staleness_mean")[1] for run in runs]
    means = [age.mean() for age in ages if len(age)]
    return {
        "metric": metric_label(metric),
        "last": _with_interval(_last_evaluation(runs, metric), metric),
        "first": _with_interval(groups.mean_interval(first) if first else None, metric),
        "runs": len(runs),
        "steps": steps,
        "unfinished": unfinished,
        "time": format_duration(float(np.mean([run.seconds for run in runs]))),
        "tokens": format_count(float(np.mean(tokens))) if tokens else "–",
        "staleness": f"{np.mean(means):.2f}" if means else "–",
    }


def _differences(grouped: Sequence[RunGroup]) -> list[tuple[str, list[str]]]:
    """Return (setting, its values in each group) for each setting that differs."""
    rows = []
    for name, values in groups.differing_fields([r for g in grouped for r in g.runs]).items():
        left = ("–" if value is None else plain(value) or '""' for value in values)
        cells = [dict.fromkeys(next(left) for _ in group.runs) for group in grouped]
        rows.append((name, [", ".join(cell) for cell in cells]))
    return rows
