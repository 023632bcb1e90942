# SPDX-License-Identifier: Apache-2.0
"""The page that compares runs: curves, final figures, differing settings, responses.

The page runs no script: buttons that choose the axis are radio buttons and CSS.
"""

import base64
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tba_jax.report import groups, plots
from tba_jax.report.document import document, escaped, section
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


def _colours(theme: plots.Theme) -> tuple[str, ...]:
    return (*plots.SERIES, theme.ink, theme.muted)


def draw_curves(grouped: Sequence[RunGroup], axis: str, theme: plots.Theme) -> "Figure | None":
    """Draw small multiples with a colour for each group; None if no run has a value.

    Args:
        grouped: groups of runs.
        axis: a key of `groups.AXES`.
        theme: colours.
    """
    runs = [run for group in grouped for run in group.runs]
    panels = _panels(runs)
    if not panels:
        return None
    colours = _colours(theme)
    rows = -(-len(panels) // 2)
    figure = plots.new_figure(10.4, 0.6 + 2.5 * rows + 0.2 * len(grouped), theme)
    lines = {}
    for i, (label, name) in enumerate(panels):
        axes = figure.add_subplot(rows, 2, i + 1)
        plots.style_axes(axes, theme)
        is_evaluation = name.startswith("eval/")
        for j, group in enumerate(grouped):
            color = colours[j % len(colours)]
            # Groups beyond the number of colours differ by dashes.
            dashes = ("-", "--", ":", "-.")[j // len(colours) % 4]
            curves = [groups.curve(run, name, axis) for run in group.runs]
            if not is_evaluation:
                curves = [(x, plots.smooth(y, max(3, len(y) // 15))) for x, y in curves]
            over_seeds = groups.band(curves)
            for x, y in curves:
                (line,) = axes.plot(
                    x,
                    y,
                    color=color,
                    linestyle=dashes,
                    marker="." if is_evaluation and not over_seeds else "",
                    alpha=0.35 if over_seeds else 1.0,
                    linewidth=0.8 if over_seeds else 1.9,
                )
                lines.setdefault(j, line)
            if over_seeds:
                x, mean, low, high = over_seeds
                axes.fill_between(x, low, high, color=color, alpha=0.16, linewidth=0)
                (lines[j],) = axes.plot(x, mean, color=color, linestyle=dashes, linewidth=2.2)
        axes.set_title(label, loc="left", fontsize=9.5, color=theme.ink)
        axes.locator_params(axis="y", nbins=5)
        if is_evaluation and is_share(name.removeprefix("eval/")):
            plots.percent_axis(axes)
        _x_axis(axes, axis)
    figure.legend(
        list(lines.values()),
        # An underscore at the start would hide the label, and a dollar sign would start a formula.
        ["\u200b" + grouped[j].name.replace("$", r"\$")[:110] for j in lines],
        loc="outside upper left",
        frameon=False,
        fontsize=9,
        labelcolor=theme.ink,
    )
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


def _picture(grouped: Sequence[RunGroup], axis: str) -> str:
    drawn = [draw_curves(grouped, axis, theme) for theme in (plots.LIGHT, plots.DARK)]
    light, dark = (
        base64.b64encode(plots.to_png(figure, dpi=130)).decode("ascii") if figure else ""
        for figure in drawn
    )
    if not light:
        return '<p class="missing">These runs have not logged a metric yet.</p>'
    return (
        '<div class="scroll"><picture><source media="(prefers-color-scheme: dark)" '
        f'srcset="data:image/png;base64,{dark}"><img alt="Curves {_CHOICES[axis]}" '
        f'src="data:image/png;base64,{light}"></picture></div>'
    )


def _curves(grouped: Sequence[RunGroup]) -> str:
    buttons = "".join(
        f'<input type="radio" name="axis" id="by_{axis}"{" checked" if axis == "step" else ""}>'
        f'<label for="by_{axis}">{label}</label>'
        for axis, label in _CHOICES.items()
    )
    pictures = "".join(f'<div class="by_{a}">{_picture(grouped, a)}</div>' for a in _CHOICES)
    text = "Curves of each step are moving means."
    if any(len(group.runs) > 1 for group in grouped):
        text += (
            " Thick line: mean over the runs of a group, up to the end of its shortest run. "
            "Band: lowest to highest run. Thin lines: single runs."
        )
    return section("Curves", f'<p>{text}</p><div class="axes">{buttons}{pictures}</div>')


def _with_interval(values: Sequence[float], text: Callable[[float], str]) -> str:
    if not values:
        return "–"
    mean, half = groups.mean_interval(values)
    return text(mean) + ("" if half is None else f" ± {text(half)}")


def _final(grouped: Sequence[RunGroup]) -> str:
    head = "".join(
        f'<th scope="col">{name}</th>'
        for name in (
            "",
            "runs",
            "steps",
            "first evaluation",
            "last evaluation",
            "time",
            "trained tokens",
            "staleness",
        )
    )
    rows = []
    for group in grouped:
        metrics = dict.fromkeys(run.metric for run in group.runs if run.evals) or {"": None}
        for metric in metrics:
            rows.append(_final_row(group, metric))
    text = (
        "± is half the width of the 90 % Student interval of the mean over runs. A group of one "
        "run has none; the brackets of a share are then the 90 % interval over its held-out "
        "responses."
    )
    return section(
        "Final figures",
        f'<p>{text}</p><div class="scroll"><table class="final"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>",
    )


def _final_row(group: RunGroup, metric: str) -> str:
    runs = [run for run in group.runs if not metric or run.metric == metric]
    evaluated = [run.evals for run in runs if run.evals]

    def text(value: float) -> str:
        return percent(value) if is_share(metric) else format_metric(metric, value)

    first = _with_interval([e[0][metric] for e in evaluated], text)
    # The evaluation before training is not the result of a run.
    trained = [e[-1] for e in evaluated if len(e) > 1]
    last = _with_interval([e[metric] for e in trained], text)
    if len(trained) == 1 and is_share(metric) and 0 <= trained[0][metric] <= 1:
        trials = trained[0].get("num_trials") or trained[0].get("n")
        if trials:
            low, high = plots.share_interval(trained[0][metric], trials)
            last += f" [{percent(low)}, {percent(high)}]"
    done = sorted({run.last_step for run in runs})
    steps = f"{done[0]}" if len(done) == 1 else f"{done[0]} to {done[-1]}"
    unfinished = sum(not run.is_finished for run in runs)
    if unfinished:
        steps += f" of {max(run.num_steps for run in runs)}, {unfinished} not finished"
    times = [run.metrics.column("time_s", "step")[0].max(initial=0.0) for run in runs]
    tokens = [t[-1] for run in runs if len(t := groups.trained_tokens(run)[1])]
    ages = [s.mean() for run in runs if len(s := run.metrics.column("step", _STALENESS)[1])]
    cells = (
        str(len(runs)),
        steps,
        first,
        f"{metric_label(metric)} {last}" if metric else last,
        duration(float(np.mean(times))),
        format_count(float(np.mean(tokens))) if tokens else "–",
        _with_interval(ages, lambda age: f"{age:.2f}"),
    )
    return (
        f'<tr><th scope="row">{escaped(group.name)}</th>'
        + "".join(f"<td>{escaped(cell)}</td>" for cell in cells)
        + "</tr>"
    )


_STALENESS = "buffer/staleness_mean"


def _differences(grouped: Sequence[RunGroup]) -> str:
    runs = [run for group in grouped for run in group.runs]
    fields = groups.differing_fields(runs)
    without = [n for n, r in zip(groups.run_names(runs), runs, strict=True) if not r.config]
    text = f"Without a config.json: {', '.join(without)}. " if without else ""
    if not fields:
        return section("Settings that differ", f"<p>{escaped(text)}No setting differs.</p>")
    head = "".join(f'<th scope="col">{escaped(group.name)}</th>' for group in grouped)
    rows = []
    for name, values in fields.items():
        cells, start = [], 0
        for group in grouped:
            of_group = values[start : start + len(group.runs)]
            start += len(group.runs)
            words = dict.fromkeys("–" if v is None else plain(v) or '""' for v in of_group)
            cells.append(f"<td>{escaped(', '.join(words))}</td>")
        rows.append(f'<tr><th scope="row">{escaped(name)}</th>{"".join(cells)}</tr>')
    return section(
        "Settings that differ",
        f"<p>{escaped(text)}Every other setting is the same in all runs.</p>"
        f'<div class="scroll"><table class="differences"><thead><tr><th scope="col">setting</th>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>",
    )


def _responses(runs: Sequence[Run]) -> str:
    rows = groups.shared_prompts(runs)
    if not rows:
        text = (
            "No held-out prompt has responses of two runs. A run writes its responses when it ends."
        )
        return section("Responses to the same prompt", f'<p class="missing">{text}</p>')
    head = "".join(f'<th scope="col">{escaped(name)}</th>' for name in groups.run_names(runs))
    body = []
    for prompt, samples in list(rows.items())[:_MOST_PROMPTS]:
        answer = next((str(s["answer"]) for s in samples if s and s.get("answer")), "")
        lines = answer.strip().splitlines()
        answer = f"<small>answer: {escaped(lines[-1])}</small>" if lines else ""
        cells = [f'<th scope="row"><pre>{escaped(prompt)}</pre>{answer}</th>']
        for sample in samples:
            if sample is None or sample.get("after") is None:
                cells.append("<td><small>(not sampled)</small></td>")
                continue
            reward = sample.get("after_reward")
            mark = "no reward" if reward is None else f"reward {reward:.2f}"
            cells.append(
                f'<td><span class="mark">{mark}</span>'
                f"<pre>{escaped(sample['after'] or '(empty)')}</pre></td>"
            )
        body.append(f"<tr>{''.join(cells)}</tr>")
    return section(
        "Responses to the same prompt",
        "<p>Held-out prompts, after training.</p>"
        '<div class="scroll"><table class="beside"><thead><tr><th scope="col">prompt</th>'
        f"{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>",
    )


def render_comparison(grouped: Sequence[RunGroup]) -> str:
    """Return the page as HTML text."""
    runs = [run for group in grouped for run in group.runs]
    unfinished = sum(not run.is_finished for run in runs)
    title = f"{len(runs)} runs" + (f" in {len(grouped)} groups" if len(grouped) > 1 else "")
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
.final td { white-space: nowrap; font-variant-numeric: tabular-nums; }
.final th:first-child, .differences th:first-child { overflow-wrap: anywhere; }
.differences th[scope=row], .differences td { overflow-wrap: anywhere; min-width: 8rem;
  font: .84rem/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.beside th, .beside td { min-width: 11rem; }
"""
