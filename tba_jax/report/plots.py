# SPDX-License-Identifier: Apache-2.0
"""The figures of a run's report, drawn from metrics.jsonl on a white background.

A figure is a function from a run to a matplotlib Figure, or None if there is nothing to draw.
matplotlib is imported on first use, because its import would slow every start.

Invariant: no global matplotlib state (no pyplot), so figures may be drawn in any thread.
"""

import io
import re
from typing import TYPE_CHECKING

import numpy as np

from tba_jax.report.files import Run
from tba_jax.report.writers import format_duration, format_metric, is_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours of compared variants, in this order (Okabe and Ito, safe for colour-blind readers).
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_PAPER = "#ffffff"
_INK = "#1c2430"
MUTED = "#5b6675"  # axes and secondary text
GRID = "#e7eaee"
MAIN, SECOND = SERIES[:2]  # main and second quantity of a figure


def to_png(figure: "Figure", dpi: int = 180) -> bytes:
    """Return the figure as PNG bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, facecolor=figure.get_facecolor())
    return buffer.getvalue()


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Return the centred moving mean over `width` values; at the ends over fewer values."""
    if len(values) == 0:
        return values
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low = np.maximum(index - width // 2, 0)
    high = np.minimum(index + width // 2 + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def share_interval(share: float, n: int) -> tuple[float, float]:
    """Return Wilson's 90 % confidence interval of a share that was measured in `n` trials."""
    z2 = 1.6449**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = np.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    return float(middle - half), float(middle + half)


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure of this size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor=_PAPER)


def style_axes(axes: "Axes") -> None:
    """Draw axes without a box and with light horizontal grid lines."""
    axes.set_facecolor(_PAPER)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(MUTED)
    axes.tick_params(colors=MUTED, labelsize=9, length=3)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.label.set(color=MUTED, size=9)
    axes.yaxis.label.set(color=MUTED, size=9)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def percent_axis(axes: "Axes") -> None:
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))


def time_axis(axes: "Axes") -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 1.5, 2, 3, 6, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: format_duration(seconds)))


def step_axis(axes: "Axes", *, is_named: bool = True) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    if is_named:
        axes.set_xlabel("optimiser step")


def panel(figure: "Figure", rows: int, columns: int, index: int, title: str) -> "Axes":
    """Add axes with a title to a figure of small multiples; `index` counts from 0."""
    axes = figure.add_subplot(rows, columns, index + 1)
    style_axes(axes)
    axes.set_title(title, loc="left", fontsize=9.5, color=_INK)
    axes.locator_params(axis="y", nbins=4)
    return axes


def _smoothed(axes: "Axes", x: np.ndarray, y: np.ndarray, color: str) -> None:
    axes.plot(x, y, ".", color=color, alpha=0.45, markersize=5, markeredgewidth=0)
    axes.plot(x, smooth(y, max(3, len(y) // 15)), color=color, linewidth=2.2)


def accuracy(run: Run) -> "Figure | None":
    """Draw the headline metric of every evaluation against time, with steps along the top.

    Shares are in percent, with their 90 % intervals.
    """
    metrics, metric = run.metrics, run.metric
    name = f"eval/{metric}"
    evals = [*metrics.of_evaluations(name)]
    if not evals:
        return None
    times = np.array([r.get("time_s") or 0.0 for r in evals], np.float64)
    values = np.array([r[name] for r in evals], np.float64)
    figure = new_figure(5.0, 3.3)
    axes = figure.add_subplot()
    style_axes(axes)
    # With a user's reward, pass@1 is the mean reward and may be outside 0 to 1.
    bars = [
        (t, *share_interval(record[name], record["eval/num_trials"]))
        for record, t in zip(evals, times, strict=True)
        if is_share(metric) and record.get("eval/num_trials") and 0 <= record[name] <= 1
    ]
    if bars:
        place, low, high = zip(*bars, strict=True)
        axes.vlines(place, low, high, color=MAIN, linewidth=5, alpha=0.25, capstyle="projecting")
    axes.plot(times, values, "-o", color=MAIN, linewidth=2.2, markersize=6)
    for i in sorted({0, len(evals) - 1}):
        # Below the first value and above the last value, so that a rising curve crosses no label.
        is_below = i == 0 and len(evals) > 1 and values[-1] >= values[0]
        axes.annotate(
            format_metric(metric, values[i]).replace("%", " %"),
            (times[i], values[i]),
            xytext=(8, -5) if is_below else (0, 9),
            textcoords="offset points",
            ha="left" if is_below else "center",
            va="top" if is_below else "bottom",
            fontsize=11,
            fontweight="bold",
            color=_INK,
        )
    axes.set_xlabel("time since start (min:s)")
    if is_share(metric):
        top = max(0.25, 1.25 * values.max())
        axes.set_ylim(min(0.0, 1.25 * values.min()), top if values.max() > 1 else min(1.18, top))
        percent_axis(axes)
    else:
        axes.margins(y=0.25)  # room for the annotations
    margin = max(1.0, 0.09 * float(np.ptp(times)))
    axes.set_xlim(times.min() - margin, times.max() + margin)
    time_axis(axes)
    step_times, steps = metrics.column("time_s", "step")
    if len(steps) > 1 and np.ptp(steps) > 0:
        _step_axis_on_top(axes, step_times, steps)
    return figure


def _step_axis_on_top(axes: "Axes", times: np.ndarray, steps: np.ndarray) -> None:
    from matplotlib.ticker import MaxNLocator

    ticks = MaxNLocator(5, integer=True).tick_values(steps.min(), steps.max())
    ticks = [tick for tick in ticks if steps.min() <= tick <= steps.max()]
    order = np.argsort(steps, kind="stable")
    places = np.interp(ticks, steps[order], times[order])
    # Labels of steps close in time would overlap.
    gap = (times.max() - times.min()) / 9
    kept: list[int] = []
    for i in range(len(ticks)):
        if not kept or places[i] - places[kept[-1]] >= gap:
            kept.append(i)
    labels = [f"{'step ' if i == 0 else ''}{ticks[i]:.0f}" for i in kept]
    top = axes.secondary_xaxis("top")
    top.set_xticks(places[kept], labels)
    top.tick_params(colors=MUTED, labelsize=9, length=3)
    top.spines["top"].set_visible(False)


def reward(run: Run) -> "Figure | None":
    """Draw the mean reward of sampled responses per step, with its moving mean."""
    name = "search/reward_mean"
    if not len(run.metrics.column("step", name)[0]):
        name = "train/reward_mean"
    x, y = run.metrics.column("step", name)
    if len(x) == 0:
        return None
    figure = new_figure(5.0, 3.3)
    axes = figure.add_subplot()
    style_axes(axes)
    _smoothed(axes, x, y, MAIN)
    step_axis(axes)
    return figure


def habits(run: Run) -> "Figure | None":
    """Draw the share of the response kind, if the run names one, and the response length."""
    panels = [("response length (tokens)", "search/response_length_mean", SECOND)]
    if run.kind:
        panels.insert(0, (f"share of {run.kind} answers", "search/kind_share", MAIN))
    panels = [x for x in panels if len(run.metrics.column("step", x[1])[0])]
    if not panels:
        return None
    figure = new_figure(5.0, 3.3)
    for i, (label, name, color) in enumerate(panels):
        axes = panel(figure, len(panels), 1, i, label)
        _smoothed(axes, *run.metrics.column("step", name), color)
        axes.margins(y=0.12)
        if name == "search/kind_share":
            axes.set_ylim(0, 1.04)
            axes.set_yticks([0, 0.5, 1])
            percent_axis(axes)
        step_axis(axes, is_named=i == len(panels) - 1)
    return figure


def staleness(run: Run) -> "Figure | None":
    """Draw the histogram of staleness in steps; the last bar contains all higher values."""
    counts = run.metrics.staleness
    total = sum(counts.values())
    if not total:
        return None
    values, uses = np.array([*counts]), np.array([*counts.values()])
    mean = float((values * uses).sum() / total)
    tail = int(values[np.searchsorted(np.cumsum(uses), 0.97 * total)])
    last = max(4, min(int(values.max()), tail + 2))
    bins = np.arange(last + 1)
    shares = np.array([counts.get(int(b), 0) for b in bins], np.float64)
    shares[-1] = sum(count for value, count in counts.items() if value >= last)
    figure = new_figure(5.0, 3.3)
    axes = figure.add_subplot()
    style_axes(axes)
    axes.bar(bins, shares / total, width=0.82, color=MAIN)
    axes.set_ylim(top=1.15 * shares.max() / total)  # room for the mean above the bars
    axes.axvline(mean, color=SECOND, linewidth=1.6, linestyle=(0, (4, 2)))
    axes.annotate(
        f"mean {mean:.1f}",
        (mean, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(6, -10),
        textcoords="offset points",
        fontsize=10,
        color=SECOND,
    )
    stride = -(-len(bins) // 12)
    ticks = [*range(0, last - stride + 1, stride), last]
    labels = [*map(str, ticks[:-1]), f"{last}+" if values.max() > last else str(last)]
    axes.set_xticks(ticks, labels)
    axes.set_xlabel("staleness: steps between the weights that sampled it and its use")
    percent_axis(axes)
    return figure


def optimisation(run: Run) -> "Figure | None":
    """Draw panels of loss, log ratio, log Z, gradient norm, effective sample size, staleness."""
    panels = [
        ("TB loss", "train/tb_loss"),
        ("log ratio to the reference (nats)", "train/kl_reference"),
        ("log Z", "train/log_z"),
        ("gradient norm", "train/grad_norm"),
        ("effective sample size (share)", "train/ess_fraction"),
        ("staleness, mean (steps)", "buffer/staleness_mean"),
    ]
    panels = [x for x in panels if len(run.metrics.column("step", x[1])[0])]
    if not panels:
        return None
    rows = -(-len(panels) // 3)
    figure = new_figure(10.4, 0.4 + 1.9 * rows)
    for i, (label, name) in enumerate(panels):
        axes = panel(figure, rows, 3, i, label)
        _smoothed(axes, *run.metrics.column("step", name), MAIN)
        step_axis(axes, is_named=i >= len(panels) - 3)
    return figure


def by_staleness(run: Run) -> "Figure | None":
    """Draw off-policy measures of the trained responses, a line for each range of staleness."""
    panels = [
        ("effective sample size (share)", "ess_fraction"),
        ("log ratio to the sampler, median (nats)", "log_ratio_p50"),
        ("log ratio, 95 % (nats)", "log_ratio_p95"),
        ("residual, root of mean square", "residual_rms"),
        ("tokens with a ratio above 1.2 (share)", "high_ratios"),
        ("distinct responses (share)", "unique_share"),
    ]
    found = (re.fullmatch("stale_([0-9]+)/ess_fraction", name) for name in run.metrics.names)
    ages = sorted(int(name[1]) for name in found if name)
    if not ages:
        return None
    colours = (*SERIES, _INK)
    figure = new_figure(10.4, 4.4)
    for i, (label, quantity) in enumerate(panels):
        axes = panel(figure, 2, 3, i, label)
        for j, age in enumerate(ages):
            x, y = run.metrics.column("step", f"stale_{age}/{quantity}")
            axes.plot(x, smooth(y, 9), color=colours[j % len(colours)], linewidth=1.4)
        step_axis(axes, is_named=i >= 3)
    figure.legend(
        figure.axes[0].get_lines(),
        [f"from {ages[0]} steps old", *map(str, ages[1:])],
        loc="outside upper left",
        ncols=len(ages),
        frameon=False,
        fontsize=9,
        labelcolor=_INK,
        handlelength=1.4,
        columnspacing=1.4,
    )
    return figure
