# SPDX-License-Identifier: Apache-2.0
"""The page that compares runs: curves, final results, differing settings, responses.

The page runs no script: buttons that choose the axis are radio buttons and CSS.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tba_jax.report import groups, plots
from tba_jax.report.document import document, escaped, picture, section, table
from tba_jax.report.files import Run
from tba_jax.report.groups import RunGroup
from tba_jax.report.words import duration, percent, plain
from tba_jax.report.writers import format_count, format_metric, is_share, metric_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_PROMPTS = 20
_CHOICES = {"step": "by step", "tokens": "by trained tokens", "time": "by time"}


def _panels(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return (label, metric) of each panel for which a run has values."""
    evaluated = dict.fromkeys(run.metric for run in runs if run.evals)
    panels = [(f"{metric_label(m)}, held out", f"eval/{m}") for m in evaluated]
    panels += [
        ("reward of sampled responses", "search/reward_mean"),
        ("response length (tokens)", "search/response_length_mean"),
        ("staleness, mean (steps)", "buffer/staleness_mean"),
        ("log ratio to the reference (nats)", "train/kl_reference"),
        ("effective sample size (share)", "train/ess_fraction"),
        ("gradient norm", "train/grad_norm"),
    ]
    return [
        panel for panel in panels if any(len(r.metrics.column("step", panel[1])[0]) for r in runs)
    ]


_DASHES = ("-", "--", ":", "-.")
_BORDERS = ("solid", "dashed", "dotted", "double")


def _look(group: int) -> tuple[str, int]:
    """Return colour and dashes of a group; dashes are used when all colours are taken."""
    colours = (*plots.SERIES, plots.MUTED)
    return colours[group % len(colours)], group // len(colours) % len(_DASHES)


def draw_panel(grouped: Sequence[RunGroup], name: str, axis: str) -> "Figure":
    """Draw the curves of a metric, with a colour for each group.

    Args:
        name: key of metrics.jsonl.
        axis: a key of `groups.AXES`.
    """
    figure = plots.new_figure(5.0, 2.6)
    axes = figure.add_subplot()
    plots.style_axes(axes)
    is_evaluation = name.startswith("eval/")
    for j, group in enumerate(grouped):
        color, dashes = _look(j)
        style: dict[str, Any] = {"color": color, "linestyle": _DASHES[dashes]}
        curves = [groups.curve(run, name, axis) for run in group.runs]
        if not is_evaluation:
            curves = [(x, plots.smooth(y, max(3, len(y) // 15))) for x, y in curves]
        over_seeds = groups.band(curves)
        thin: dict[str, Any] = {"linewidth": 1.9}
        if over_seeds:
            thin = {"linewidth": 0.8, "alpha": 0.35}
        for x, y in curves:
            marker = "." if is_evaluation and not over_seeds else ""
            axes.plot(x, y, marker=marker, **style, **thin)
        if over_seeds:
            x, mean, low, high = over_seeds
            axes.fill_between(x, low, high, color=color, alpha=0.16, linewidth=0)
            axes.plot(x, mean, linewidth=2.2, **style)
    axes.locator_params(axis="y", nbins=5)
    if is_evaluation and is_share(name.removeprefix("eval/")):
        plots.percent_axis(axes)
    _x_axis(axes, axis)
    return figure


def _x_axis(axes, axis: str) -> None:
    from matplotlib.ticker import EngFormatter

    if axis == "time":
        plots.time_axis(axes)
    elif axis == "step":
        plots.step_axis(axes, is_named=False)
    else:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel(groups.AXES[axis])


def _legend(grouped: Sequence[RunGroup]) -> str:
    keys = []
    for j, group in enumerate(grouped):
        color, dashes = _look(j)
        keys.append(
            f'<span><i style="border-top: 3px {_BORDERS[dashes]} {color}"></i>'
            f"{escaped(group.name)}</span>"
        )
    return f'<p class="keys">{"".join(keys)}</p>'


def _curves(grouped: Sequence[RunGroup]) -> str:
    panels = _panels([run for group in grouped for run in group.runs])
    if not panels:
        text = "These runs have not logged a metric yet."
        return section("Curves", f'<p class="missing">{text}</p>')
    buttons = "".join(
        f'<input type="radio" name="axis" id="by_{axis}"{" checked" if axis == "step" else ""}>'
        f'<label for="by_{axis}">{label}</label>'
        for axis, label in _CHOICES.items()
    )
    grids = []
    for axis in _CHOICES:
        cells = []
        for label, name in panels:
            png = plots.to_png(draw_panel(grouped, name, axis), dpi=130)
            shown = picture(png, f"{label} {_CHOICES[axis]}")
            cells.append(f"<figure><h3>{escaped(label)}</h3>{shown}</figure>")
        grids.append(f'<div class="by_{axis}"><div class="grid">{"".join(cells)}</div></div>')
    text = "Curves of each step are moving means."
    if any(len(group.runs) > 1 for group in grouped):
        text += (
            " Thick line: mean over the runs of a group, up to the end of its shortest run. "
            "Band: lowest to highest run. Thin lines: single runs."
        )
    body = f'<div class="axes">{buttons}{_legend(grouped)}{"".join(grids)}</div>'
    return section("Curves", f"<p>{text}</p>{body}")


_Interval = tuple[float, float, float]  # middle, low, high; without an interval low is high


def _over_runs(values: Sequence[float]) -> _Interval | None:
    if not values:
        return None
    mean, half = groups.mean_interval(values)
    return mean, mean - (half or 0.0), mean + (half or 0.0)


def _with_interval(found: _Interval | None, text: Callable[[float], str]) -> str:
    if found is None:
        return "–"
    middle, low, high = found
    ends = [text(x).replace("\N{NO-BREAK SPACE}%", "") for x in (low, high)]
    return text(middle) + (f" [{ends[0]}, {ends[1]}]" if high > low else "")


def _bar(found: _Interval | None, low: float, high: float) -> str:
    """Return HTML of a bar for an interval, with a dot at its middle; the scale is low to high."""
    if found is None or not high > low:
        return ""
    middle, start, end = (100 * (x - low) / (high - low) for x in found)
    return (
        f'<span class="interval"><i style="left:{start:.1f}%;width:{end - start:.1f}%"></i>'
        f'<b style="left:{middle:.1f}%"></b></span>'
    )


def _final(grouped: Sequence[RunGroup]) -> str:
    rows: list[Sequence[str]] = []
    metrics = dict.fromkeys(
        metric
        for group in grouped
        for metric in dict.fromkeys(run.metric for run in group.runs if run.evals) or [""]
    )
    for metric in metrics:
        members = [
            (g.name, [r for r in g.runs if r.metric == metric or not metric]) for g in grouped
        ]
        last = [(name, runs, _last_evaluation(runs, metric)) for name, runs in members if runs]
        known = [found for _, _, found in last if found]
        low, high = min((x[1] for x in known), default=0), max((x[2] for x in known), default=0)
        rows += [
            _final_row(name, runs, metric, found, _bar(found, low, high))
            for name, runs, found in last
        ]
    head = (
        "",
        "last evaluation",
        "",
        "first evaluation",
        "runs",
        "steps",
        "time",
        "tokens",
        "staleness",
    )
    text = (
        "Brackets and bars: 90 % intervals. With several runs it is the Student interval of their "
        "mean; with one run, the interval of a share over its held-out responses. Time and trained "
        "tokens are means over the runs."
    )
    return section("Final results", f"<p>{text}</p>{table(head, rows, 'final')}")


def _last_evaluation(runs: Sequence[Run], metric: str) -> _Interval | None:
    # The evaluation before training is not the result of a run.
    trained = [run.evals[-1] for run in runs if len(run.evals) > 1]
    if len(trained) == 1 and is_share(metric) and 0 <= trained[0][metric] <= 1:
        trials = trained[0].get("num_trials") or trained[0].get("n")
        if trials:
            return (trained[0][metric], *plots.share_interval(trained[0][metric], trials))
    return _over_runs([evaluation[metric] for evaluation in trained])


def _value_text(metric: str) -> Callable[[float], str]:
    return percent if is_share(metric) else lambda value: format_metric(metric, value)


def summary(group: RunGroup) -> str:
    """Return one line: name, last evaluation with its interval, number of runs."""
    parts = [f"{len(group.runs)} run{'s' if len(group.runs) > 1 else ''}"]
    for metric in dict.fromkeys(run.metric for run in group.runs if len(run.evals) > 1):
        last = _last_evaluation([run for run in group.runs if run.metric == metric], metric)
        parts.append(f"{metric_label(metric)} {_with_interval(last, _value_text(metric))}")
    return f"{group.name}: {', '.join(parts)}"


def _final_row(
    name: str, runs: Sequence[Run], metric: str, last: _Interval | None, bar: str
) -> Sequence[str]:
    text = _value_text(metric)
    first = _over_runs([run.evals[0][metric] for run in runs if run.evals])
    done = sorted({run.last_step for run in runs})
    steps = f"{done[0]}" if len(done) == 1 else f"{done[0]}–{done[-1]}"
    unfinished = sum(not run.is_finished for run in runs)
    if unfinished:
        steps += f" of {max(x.num_steps for x in runs)}<br><small>{unfinished} unfinished</small>"
    times = [run.metrics.column("time_s", "step")[0].max(initial=0.0) for run in runs]
    tokens = [t[-1] for run in runs if len(t := groups.trained_tokens(run)[1])]
    ages = [s.mean() for run in runs if len(s := run.metrics.column("step", _STALENESS)[1])]
    return (
        escaped(name) + (f"<br><small>{escaped(metric_label(metric))}</small>" if metric else ""),
        escaped(_with_interval(last, text)),
        bar,
        escaped(_with_interval(first, text)),
        f"{len(runs)}",
        steps,
        duration(float(np.mean(times))),
        format_count(float(np.mean(tokens))) if tokens else "–",
        f"{np.mean(ages):.2f}" if ages else "–",
    )


_STALENESS = "buffer/staleness_mean"


def _differences(grouped: Sequence[RunGroup]) -> str:
    runs = [run for group in grouped for run in group.runs]
    fields = groups.differing_fields(runs)
    without = [n for n, r in zip(groups.run_names(runs), runs, strict=True) if not r.config]
    text = f"Without a config.json: {', '.join(without)}. " if without else ""
    if not fields:
        return section("Settings that differ", f"<p>{escaped(text)}No setting differs.</p>")
    rows = []
    for name, values in fields.items():
        cells, start = [escaped(name)], 0
        for group in grouped:
            of_group = values[start : start + len(group.runs)]
            start += len(group.runs)
            words = dict.fromkeys("–" if v is None else plain(v) or '""' for v in of_group)
            cells.append(escaped(", ".join(words)))
        rows.append(cells)
    head = ("setting", *(group.name for group in grouped))
    return section(
        "Settings that differ",
        f"<p>{escaped(text)}Every other setting is the same in all runs.</p>"
        f"{table(head, rows, 'differences')}",
    )


def _responses(runs: Sequence[Run]) -> str:
    title = "Responses to the same prompt"
    rows = groups.shared_prompts(runs)
    if not rows:
        text = "No held-out prompt has responses of two runs yet."
        return section(title, f'<p class="missing">{text}</p>')
    body = []
    for prompt, samples in list(rows.items())[:_MOST_PROMPTS]:
        answer = next((str(s["answer"]) for s in samples if s and s.get("answer")), "")
        lines = answer.strip().splitlines()
        answer = f"<small>answer: {escaped(lines[-1])}</small>" if lines else ""
        cells = [f"<pre>{escaped(prompt)}</pre>{answer}"]
        for sample in samples:
            if sample is None or sample.get("after") is None:
                cells.append("<small>(not sampled)</small>")
                continue
            reward = sample.get("after_reward")
            mark = "no reward" if reward is None else f"reward {reward:.2f}"
            if "step" in sample:
                mark += f", step {sample['step']}"
            response = sample["after"] or "(empty)"
            cells.append(f'<span class="mark">{mark}</span><pre>{escaped(response)}</pre>')
        body.append(cells)
    text = "Held-out prompts, at the newest evaluation of each run."
    head = ("prompt", *groups.run_names(runs))
    return section(title, f"<p>{text}</p>{table(head, body, 'beside')}")


def render_comparison(grouped: Sequence[RunGroup]) -> str:
    """Return the page as HTML text."""
    runs = [run for group in grouped for run in group.runs]
    unfinished = sum(not run.is_finished for run in runs)
    title = f"{len(runs)} runs" if len(runs) > 1 else "1 run"
    title += f" in {len(grouped)} groups" if len(grouped) > 1 else ""
    names = ", ".join(groups.run_names(runs))
    notice = (
        f'<p class="notice" role="status">{unfinished} of {len(runs)} runs are not finished. The '
        "figures are those so far; the same command reads the runs again.</p>"
        if unfinished
        else ""
    )
    body = (
        f'<header><p class="eyebrow">tba_jax · compare</p><h1>{escaped(title)}</h1>'
        f'<p class="lead">{escaped(names)}</p></header>{notice}'
        f"{_final(grouped)}{_curves(grouped)}{_differences(grouped)}{_responses(runs)}"
    )
    return document(title, "compare", body, _STYLE)


_STYLE = """
.axes input { position: absolute; opacity: 0; }
.axes label { display: inline-block; margin: 0 .5rem 1rem 0; padding: .25rem .9rem;
  border: 1px solid var(--line); border-radius: 99px; cursor: pointer; font-size: .9rem; }
.axes input:checked + label { background: var(--accent); border-color: var(--accent);
  color: var(--paper); }
.axes input:focus-visible + label { outline: 2px solid var(--ink); outline-offset: 2px; }
.axes > div { display: none; }
#by_step:checked ~ .by_step, #by_tokens:checked ~ .by_tokens, #by_time:checked ~ .by_time
  { display: block; }
.axes figure h3 { font-size: .92rem; font-weight: 500; }
.keys { display: flex; flex-wrap: wrap; gap: .3rem 1.4rem; margin: 0; font-size: .9rem; }
.keys i { display: inline-block; width: 1.6rem; margin-right: .5rem; vertical-align: middle; }
.final td { white-space: nowrap; font-variant-numeric: tabular-nums; }
.final th:first-child { overflow-wrap: anywhere; min-width: 11rem; }
.interval { position: relative; display: block; width: 7rem; height: 1.4rem; }
.interval i { position: absolute; top: .55rem; height: .3rem; min-width: 2px; border-radius: 2px;
  background: var(--accent); opacity: .45; }
.interval b { position: absolute; top: .4rem; width: .6rem; height: .6rem; margin-left: -.3rem;
  border-radius: 50%; background: var(--accent); }
.differences tbody th, .differences td { overflow-wrap: anywhere; min-width: 8rem;
  font: .84rem/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.beside th, .beside td { min-width: 11rem; }
"""
