# SPDX-License-Identifier: Apache-2.0
"""The figures of a report, drawn from metrics.jsonl: functions from a run to a matplotlib Figure.

To add a figure, add its function to `FIGURES` and its title to templates/report.html. matplotlib is
imported on first use, because its import would slow every start. Figures use no global state (no
pyplot), so they may be drawn in any thread.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tba_jax.report.files import Run
from tba_jax.report.words import format_duration, format_metric, is_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours of compared variants, in this order (Okabe and Ito, safe for colour-blind readers).
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_TEXT = "#75808d"  # readable on the transparent background over a light and over a dark page
_MOST_POINTS = 400  # of a curve, for any length of the run
_STYLE = Path(__file__).parent / "templates" / "figures.mplstyle"

Curve = tuple[np.ndarray, np.ndarray]


def to_png(figure: "Figure", dpi: int = 150) -> bytes:
    """Return the figure as PNG bytes, with a transparent background."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def thinned(x: np.ndarray, y: np.ndarray) -> Curve:
    """Return the means of neighbouring points of a long curve."""
    if len(x) <= _MOST_POINTS:
        return x, y
    starts = np.linspace(0, len(x), _MOST_POINTS, endpoint=False).astype(int)
    sizes = np.diff([*starts, len(x)])
    return np.add.reduceat(x, starts) / sizes, np.add.reduceat(y, starts) / sizes


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the centred moving mean over a 15th of the values; at the ends over fewer values."""
    window = np.ones(max(3, len(values) // 15) // 2 * 2 + 1)
    if len(values) < len(window):
        return np.full(len(values), values.mean()) if len(values) else values
    counts = np.convolve(np.ones(len(values)), window, "same")
    return np.convolve(values, window, "same") / counts


def share_interval(share: float, n: int) -> tuple[float, float]:
    """Return Wilson's 90 % confidence interval of a share that was measured in `n` trials."""
    z2 = 1.6449**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = np.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    return float(middle - half), float(middle + half)


def new_axes(
    size: tuple[float, float], number: int = 1, columns: int = 1
) -> tuple["Figure", list["Axes"]]:
    """Return a figure of this size in inches, and its axes with light horizontal grid lines."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(fname=_STYLE):
        figure = Figure(figsize=size, layout="constrained", facecolor="none")
        axes = [figure.add_subplot(-(-number // columns), columns, i + 1) for i in range(number)]
    for each in axes:
        each.locator_params(axis="y", nbins=5)
    return figure, axes


def format_axes(axes: "Axes", x: str = "step", *, is_share: bool = False) -> None:
    """Format the ticks of an x axis of steps, tokens or the time, and of a y axis of shares."""
    from matplotlib import ticker

    if is_share:
        axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0, symbol=" %"))
    if x == "step":
        axes.xaxis.set_major_locator(ticker.MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    elif x == "tokens":
        axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    elif x == "time":
        seconds = ticker.FuncFormatter(lambda seconds, _: format_duration(seconds))
        axes.xaxis.set_major_formatter(seconds)


def panels(
    run: Run,
    named: Sequence[tuple[str, Sequence[str]]],
    columns: int = 1,
    size: tuple[float, float] = (5.0, 3.3),
) -> "Figure | None":
    """Draw a panel for each metric that the run has: moving means, and dots for a single curve.

    Args:
        named: (title of the panel, keys of metrics.jsonl); the first title may be "".
        size: width and height in inches.
    """
    found = [(title, [run.metrics.column("step", key) for key in keys]) for title, keys in named]
    found = [(title, curves) for title, curves in found if any(len(x) for x, _ in curves)]
    if not found:
        return None
    figure, axes = new_axes(size, len(found), columns)
    for i, (each, (title, curves)) in enumerate(zip(axes, found, strict=True)):
        for j, curve in enumerate(curves):
            x, y = thinned(*curve)
            color = SERIES[(i % 2 if columns == 1 else j) % len(SERIES)]
            if len(curves) == 1:
                each.plot(x, y, ".", color=color, alpha=0.45, markersize=5, markeredgewidth=0)
            each.plot(x, smooth(y), color=color, linewidth=2.2 if len(curves) == 1 else 1.4)
        each.set_title(title, loc="left", fontsize=9.5, color=_TEXT)
        each.margins(y=0.12)
        is_share = title.startswith("share of ")
        if is_share:
            each.set_ylim(0, 1.04)
        format_axes(each, is_share=is_share)
        if i >= len(found) - columns:
            each.set_xlabel("optimiser step")
    return figure


def accuracy(run: Run) -> "Figure | None":
    """Draw the headline metric of every evaluation; shares have their 90 % intervals."""
    metric, evals = run.metric, run.evals
    if not evals:
        return None
    steps, values = ([float(e[name] or 0) for e in evals] for name in ("step", metric))
    figure, (axes,) = new_axes((5.0, 3.3))
    for step, value, n in zip(steps, values, [e.get("num_trials") for e in evals], strict=True):
        # With a user's reward, pass@1 is the mean reward and may be outside 0 to 1.
        if is_share(metric) and n and 0 <= value <= 1:
            axes.vlines(step, *share_interval(value, n), SERIES[0], linewidth=5, alpha=0.25)
    axes.plot(steps, values, "-o", color=SERIES[0], linewidth=2.2, markersize=6)
    style: Any = {"textcoords": "offset points", "fontsize": 11, "fontweight": "bold"}
    for i in sorted({0, len(evals) - 1}):
        # Below the first value of a rising curve, which would cross a label above it.
        is_below = i == 0 and values[-1] > values[0]
        place: Any = {"xytext": (4, -22), "ha": "left"} if is_below else {"xytext": (-9, 9)}
        text = format_metric(metric, values[i])
        axes.annotate(text, (steps[i], values[i]), color=_TEXT, **place, **style)
    axes.margins(0.1, 0.25)  # room for the annotations
    format_axes(axes, is_share=is_share(metric))
    axes.set_xlabel("optimiser step")
    return figure


def reward(run: Run) -> "Figure | None":
    """Draw the mean reward of sampled responses per step, else of trained responses."""
    return panels(run, [("", ["search/reward_mean"])]) or panels(run, [("", ["train/reward_mean"])])


def habits(run: Run) -> "Figure | None":
    """Draw the share of the response kind, if the run names one, and the response length."""
    kinds = [
        (f"share of {x} answers", ["search/kind_share"])
        for x in (run.report.get("kinds") or [])[:1]
    ]
    return panels(run, [*kinds, ("response length (tokens)", ["search/response_length_mean"])])


def staleness(run: Run) -> "Figure | None":
    """Draw the histogram of staleness in steps; the last bar contains all higher values."""
    counts = run.metrics.staleness
    total = sum(counts.values())
    if not total:
        return None
    values, uses = np.array([*counts]), np.array([*counts.values()])
    tail = int(values[np.searchsorted(np.cumsum(uses), 0.97 * total)])
    last = max(4, min(int(values.max()), tail + 2))
    shares = np.bincount(np.clip(values, 0, last), uses, last + 1) / total
    mean = float((values * uses).sum() / total)
    figure, (axes,) = new_axes((5.0, 3.3))
    axes.bar(np.arange(last + 1), shares, width=0.82, color=SERIES[0])
    axes.axvline(mean, color=SERIES[1], linewidth=1.6, linestyle="--")
    axes.text(mean, 1.06 * shares.max(), f" mean {mean:.1f}", color=SERIES[1])
    axes.set_ylim(top=1.15 * shares.max())  # room for the mean above the bars
    ticks = [*range(0, last, -(-last // 10)), last]
    axes.set_xticks(ticks, [*map(str, ticks[:-1]), f"{last}{'+' * bool(values.max() > last)}"])
    axes.set_xlabel("steps between the weights that sampled a response and its use")
    format_axes(axes, "", is_share=True)
    return figure


_HEALTH = (
    ("TB loss", ["train/tb_loss"]),
    ("log ratio to the reference (nats)", ["train/kl_reference"]),
    ("log Z", ["train/log_z"]),
    ("gradient norm", ["train/grad_norm"]),
    ("effective sample size (share)", ["train/ess_fraction"]),
    ("staleness, mean (steps)", ["buffer/staleness_mean"]),
)
_BY_AGE = (
    ("effective sample size (share)", "ess_fraction"),
    ("log ratio to the sampler, median (nats)", "log_ratio_p50"),
    ("log ratio, 95 % (nats)", "log_ratio_p95"),
    ("residual, root of mean square", "residual_rms"),
    ("tokens with a ratio above 1.2 (share)", "high_ratios"),
    ("distinct responses (share)", "unique_share"),
)


def by_staleness(run: Run) -> "Figure | None":
    """Draw off-policy measures of the trained responses, a line for each range of staleness."""
    found = (re.fullmatch("stale_([0-9]+)/ess_fraction", name) for name in run.metrics.names)
    ages = sorted(int(name[1]) for name in found if name)
    named = [(title, [f"stale_{age}/{name}" for age in ages]) for title, name in _BY_AGE]
    figure = panels(run, named, columns=3, size=(10.4, 4.4))
    if figure is not None:
        lines = figure.axes[0].get_lines()[-len(ages) :]
        labels = [f"from {ages[0]} steps old", *map(str, ages[1:])]
        options = {"ncols": len(ages), "frameon": False, "fontsize": 9, "labelcolor": _TEXT}
        figure.legend(lines, labels, loc="outside upper left", **options)
    return figure


FIGURES: Mapping[str, "Callable[[Run], Figure | None]"] = {
    "accuracy": accuracy,
    "reward": reward,
    "habits": habits,
    "staleness": staleness,
    "optimisation": lambda run: panels(run, _HEALTH, columns=3, size=(10.4, 4.2)),
    "by_staleness": by_staleness,
}
"""Name of a figure -> function that draws it, or returns None if the run has nothing to draw."""
