# SPDX-License-Identifier: Apache-2.0
"""The figures of a run's report, drawn from the lines of metrics.jsonl and schedule.jsonl.

A figure is a function of a run and a theme that returns a matplotlib Figure, or None when the run
holds nothing to draw. It owns one invariant: no global matplotlib state (no pyplot), so it may run
in any thread and beside anything else. matplotlib is imported on first use, because it would slow
every start of the program.
"""

import dataclasses
import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tba_jax.report.files import Run
from tba_jax.report.writers import format_duration, format_metric, is_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = Mapping[str, Any]
Interval = tuple[float, float]

# Colours for the variants of a study, in this order (Okabe and Ito).
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
ROUND_PHASES = ("decode", "reward", "reference")  # in the order they are drawn inside a round
ZOOM_S = 10.0


@dataclasses.dataclass(frozen=True)
class Theme:
    """Colours of a figure; the data colours are Okabe and Ito's, safe for colour-blind readers.

    Attributes:
        paper: background.
        ink: text.
        muted: axes and secondary text.
        grid: grid lines.
        main: the quantity the figure is about.
        second: the other quantity.
        bars: colour of each phase in the timeline.
    """

    paper: str
    ink: str
    muted: str
    grid: str
    main: str
    second: str
    bars: Mapping[str, str]


LIGHT = Theme(
    paper="#ffffff",
    ink="#1c2430",
    muted="#5b6675",
    grid="#e7eaee",
    main="#0072b2",
    second="#d55e00",
    bars={
        "decode": "#0072b2",
        "reference": "#cc79a7",
        "reward": "#e69f00",
        "step": "#009e73",
        "wait": "#c3cad3",
        "sync": "#d55e00",
        "evaluation": "#56b4e9",
    },
)
DARK = Theme(
    paper="#171c24",
    ink="#e8ecf1",
    muted="#9aa6b5",
    grid="#2a323d",
    main="#56b4e9",
    second="#f0894a",
    bars={
        "decode": "#3b93d0",
        "reference": "#d795bb",
        "reward": "#e9b03a",
        "step": "#1fb58c",
        "wait": "#4a5463",
        "sync": "#f0743a",
        "evaluation": "#8fd0f5",
    },
)


def to_png(figure: "Figure", dpi: int = 180) -> bytes:
    """The figure as PNG bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, facecolor=figure.get_facecolor())
    return buffer.getvalue()


def column(records: Iterable[Record], x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    """Values of `x` and `y` of the records that hold a number for both, as float64 arrays."""
    pairs = [
        (record[x], record[y])
        for record in records
        if isinstance(record.get(x), int | float) and isinstance(record.get(y), int | float)
    ]
    table = np.asarray(pairs, np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Centred moving mean over `width` values, over fewer at the ends."""
    if len(values) == 0:
        return values
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low = np.maximum(index - width // 2, 0)
    high = np.minimum(index + width // 2 + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def share_interval(share: float, n: int) -> tuple[float, float]:
    """Wilson's 90 % confidence interval of a share that was measured on `n` trials."""
    z2 = 1.6449**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = np.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    return float(middle - half), float(middle + half)


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, as disjoint ones in ascending order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def overlap(first: Iterable[Interval], second: Iterable[Interval]) -> float:
    """Total length of the intersection of two unions of intervals."""
    a, b = merge_intervals(first), merge_intervals(second)
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def timeline_lanes(schedule: Iterable[Record]) -> dict[str, dict[str, list[Interval]]]:
    """Lane -> phase -> intervals in seconds: the searchers in order, the trainer, evaluations.

    A round's phases are laid end to end from its start; what is left of a round counts as its
    decode phase, because that is where a searcher's host work happens. Rounds that overlap are
    tickets, graded beside decoding: a lane of their own. A step's wait lies before its start.
    """
    rounds: dict[int, list[Record]] = {}
    trainer: dict[str, list[Interval]] = {"step": [], "wait": [], "sync": []}
    evaluation: dict[str, list[Interval]] = {"evaluation": []}
    for event in schedule:
        if "start_s" not in event or "end_s" not in event:
            continue
        start, end = event["start_s"], event["end_s"]
        match event.get("event"):
            case "round":
                rounds.setdefault(event["searcher"], []).append(event)
            case "step":
                trainer["wait"].append((start - (event.get("wait_s") or 0.0), start))
                trainer["step"].append((start, end))
            case "sync":
                trainer["sync"].append((start, end))
            case "eval":
                evaluation["evaluation"].append((start, end))
    lanes: dict[str, dict[str, list[Interval]]] = {}
    for i in sorted(rounds):
        own = sorted(rounds[i], key=lambda event: event["start_s"])
        if any(b["start_s"] < a["end_s"] for a, b in itertools.pairwise(own)):
            lanes |= _ticket_lanes(i, own)
        else:
            lanes[f"searcher {i}"] = _round_lane(own)
    if any(trainer.values()):
        lanes["trainer"] = trainer
    if evaluation["evaluation"]:
        lanes["evaluation"] = evaluation
    return lanes


def _seconds(event: Record, phase: str) -> float:
    return event.get(f"{phase}_s") or 0.0


def _round_lane(rounds: Iterable[Record]) -> dict[str, list[Interval]]:
    """Phases of rounds, end to end."""
    lane: dict[str, list[Interval]] = {phase: [] for phase in ROUND_PHASES}
    for event in rounds:
        start, end = event["start_s"], event["end_s"]
        seconds = {phase: _seconds(event, phase) for phase in ROUND_PHASES}
        seconds["decode"] += max(0.0, end - start - sum(seconds.values()))
        scale = (end - start) / max(sum(seconds.values()), 1e-9)
        for phase, length in seconds.items():
            lane[phase].append((start, start + length * scale))
            start += length * scale
    return lane


def _ticket_lanes(searcher: int, tickets: Iterable[Record]) -> dict[str, dict[str, list[Interval]]]:
    """A searcher's decoding, and its grading; tickets graded together end together."""
    graded: dict[float, list[Record]] = {}
    for event in tickets:
        graded.setdefault(event["end_s"], []).append(event)
    decode: list[Interval] = []
    grader: dict[str, list[Interval]] = {"reward": [], "reference": []}
    for end, together in graded.items():
        reference = end - sum(_seconds(event, "reference") for event in together)
        reward = reference - sum(_seconds(event, "reward") for event in together)
        grader["reward"].append((reward, reference))
        grader["reference"].append((reference, end))
        decode += [(event["start_s"], max(event["start_s"], reward)) for event in together]
    return {
        f"searcher {searcher}": {"decode": merge_intervals(decode)},
        f"grader {searcher}": {
            phase: merge_intervals(spans) for phase, spans in grader.items() if any(spans)
        },
    }


def busy_shares(schedule: Iterable[Record]) -> dict[str, float]:
    """Share of the training time in which each searcher and the trainer work, and "both".

    Training time runs from the first round to the last step. "both" is the share in which the
    trainer and at least one searcher work at once: what asynchrony is for.
    """
    lanes = timeline_lanes(schedule)
    searchers = {name: lane for name, lane in lanes.items() if name.startswith("searcher")}
    if not searchers or "trainer" not in lanes or not lanes["trainer"]["step"]:
        return {}
    rounds = [span for lane in searchers.values() for spans in lane.values() for span in spans]
    work = lanes["trainer"]["step"] + lanes["trainer"]["sync"]
    window = [(min(start for start, _ in rounds), max(end for _, end in work))]
    length = window[0][1] - window[0][0]
    shares = {
        name: overlap((span for spans in lane.values() for span in spans), window) / length
        for name, lane in searchers.items()
    }
    shares["trainer"] = overlap(work, window) / length
    shares["both"] = overlap(rounds, work) / length
    return shares


def new_figure(width: float, height: float, theme: Theme) -> "Figure":
    """An empty figure of this size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor=theme.paper)


def style_axes(axes: "Axes", theme: Theme, *, grid: bool = True) -> None:
    """Quiet axes: no box, light horizontal grid."""
    axes.set_facecolor(theme.paper)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(theme.muted)
    axes.tick_params(colors=theme.muted, labelsize=9, length=3)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.label.set(color=theme.muted, size=9)
    axes.yaxis.label.set(color=theme.muted, size=9)
    if grid:
        axes.grid(axis="y", color=theme.grid, linewidth=0.8)
        axes.set_axisbelow(True)


def _percent_axis(axes: "Axes") -> None:
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))


def _time_axis(axes: "Axes") -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 1.5, 2, 3, 6, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: format_duration(seconds)))


def step_axis(axes: "Axes", *, is_named: bool = True) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    if is_named:
        axes.set_xlabel("optimiser step")


def _smoothed(axes: "Axes", x: np.ndarray, y: np.ndarray, color: str) -> None:
    axes.plot(x, y, ".", color=color, alpha=0.45, markersize=5, markeredgewidth=0)
    axes.plot(x, smooth(y, max(3, len(y) // 15)), color=color, linewidth=2.2)


def accuracy(run: Run, theme: Theme) -> "Figure | None":
    """The headline metric of every evaluation against time, steps along the top.

    Shares in percent with their 90 % intervals.
    """
    metrics, metric = run.metrics, run.metric
    name = f"eval/{metric}"
    evals = [r for r in metrics if isinstance(r.get(name), int | float)]
    if not evals:
        return None
    times = np.array([r.get("time_s") or 0.0 for r in evals], np.float64)
    values = np.array([r[name] for r in evals], np.float64)
    figure = new_figure(5.0, 3.3, theme)
    axes = figure.add_subplot()
    style_axes(axes, theme)
    for record, t in zip(evals, times, strict=True):
        # A reward of the user's own may make pass@1, which is its mean, no share.
        if is_share(metric) and record.get("eval/num_trials") and 0 <= record[name] <= 1:
            low, high = share_interval(record[name], record["eval/num_trials"])
            axes.plot([t, t], [low, high], color=theme.main, linewidth=5, alpha=0.25)
    axes.plot(times, values, "-o", color=theme.main, linewidth=2.2, markersize=6)
    for i in sorted({0, len(evals) - 1}):
        axes.annotate(
            format_metric(metric, values[i]).replace("%", " %"),
            (times[i], values[i]),
            xytext=(0, 13),
            textcoords="offset points",
            ha="center",
            fontsize=11,
            fontweight="bold",
            color=theme.ink,
        )
    axes.set_xlabel("time since start (min:s)")
    if is_share(metric):
        top = max(0.25, 1.25 * values.max())
        axes.set_ylim(min(0.0, 1.25 * values.min()), top if values.max() > 1 else min(1.09, top))
        _percent_axis(axes)
    else:
        axes.margins(y=0.25)  # room for the annotations
    margin = max(1.0, 0.09 * float(np.ptp(times)))
    axes.set_xlim(times.min() - margin, times.max() + margin)
    _time_axis(axes)
    step_times, steps = column(metrics, "time_s", "step")
    if len(steps) > 1 and np.ptp(steps) > 0:
        _step_axis_on_top(axes, theme, step_times, steps)
    return figure


def _step_axis_on_top(axes: "Axes", theme: Theme, times: np.ndarray, steps: np.ndarray) -> None:
    from matplotlib.ticker import MaxNLocator

    ticks = MaxNLocator(5, integer=True).tick_values(steps.min(), steps.max())
    ticks = [tick for tick in ticks if steps.min() <= tick <= steps.max()]
    order = np.argsort(steps, kind="stable")
    places = np.interp(ticks, steps[order], times[order])
    # Steps that a fast stretch puts side by side would print over one another.
    gap = (times.max() - times.min()) / 9
    kept: list[int] = []
    for i in range(len(ticks)):
        if not kept or places[i] - places[kept[-1]] >= gap:
            kept.append(i)
    labels = [f"{'step ' if i == 0 else ''}{ticks[i]:.0f}" for i in kept]
    top = axes.secondary_xaxis("top")
    top.set_xticks(places[kept], labels)
    top.tick_params(colors=theme.muted, labelsize=9, length=3)
    top.spines["top"].set_visible(False)


def reward(run: Run, theme: Theme) -> "Figure | None":
    """Mean reward of what the searchers sample, per step, with its moving mean."""
    name = "search/reward_mean"
    if not len(column(run.metrics, "step", name)[0]):
        name = "train/reward_mean"
    x, y = column(run.metrics, "step", name)
    if len(x) == 0:
        return None
    figure = new_figure(5.0, 3.3, theme)
    axes = figure.add_subplot()
    style_axes(axes, theme)
    _smoothed(axes, x, y, theme.main)
    step_axis(axes)
    return figure


def habits(run: Run, theme: Theme) -> "Figure | None":
    """How the model answers: share of the response kind, if one is named, above their length."""
    panels = [
        (
            f"share of {run.kind} answers",
            "search/kind_share",
            theme.main,
        ),
        ("response length (tokens)", "search/response_length_mean", theme.second),
    ]
    panels = panels if run.kind else panels[1:]
    panels = [panel for panel in panels if len(column(run.metrics, "step", panel[1])[0])]
    if not panels:
        return None
    figure = new_figure(5.0, 3.3, theme)
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (label, name, color) in zip(rows, panels, strict=True):
        style_axes(axes, theme)
        _smoothed(axes, *column(run.metrics, "step", name), color)
        axes.set_title(label, loc="left", fontsize=9.5, color=theme.ink)
        axes.margins(y=0.12)
        if name == "search/kind_share":
            axes.set_ylim(0, 1.04)
            axes.set_yticks([0, 0.5, 1])
            _percent_axis(axes)
    step_axis(rows[-1])
    return figure


def staleness_counts(metrics: Iterable[Record]) -> dict[int, int]:
    """Staleness in steps -> number of uses, summed over the run."""
    counts: dict[int, int] = {}
    for record in metrics:
        for staleness, count in record.get("buffer/staleness_histogram") or ():
            counts[int(staleness)] = counts.get(int(staleness), 0) + int(count)
    return dict(sorted(counts.items()))


def staleness(run: Run, theme: Theme) -> "Figure | None":
    """How old the trained-on data was, in steps; the last bar collects the far tail."""
    counts = staleness_counts(run.metrics)
    total = sum(counts.values())
    if not total:
        return None
    values = np.repeat(list(counts), list(counts.values()))
    last = max(6, min(int(values.max()), int(np.quantile(values, 0.97)) + 2))
    bins = np.arange(last + 1)
    shares = np.array([counts.get(int(b), 0) for b in bins], np.float64)
    shares[-1] = sum(count for value, count in counts.items() if value >= last)
    figure = new_figure(5.0, 3.3, theme)
    axes = figure.add_subplot()
    style_axes(axes, theme)
    axes.bar(bins, shares / total, width=0.82, color=theme.main)
    axes.axvline(float(values.mean()), color=theme.second, linewidth=1.6, linestyle=(0, (4, 2)))
    axes.annotate(
        f"mean {values.mean():.1f}",
        (float(values.mean()), 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(6, -10),
        textcoords="offset points",
        fontsize=10,
        color=theme.second,
    )
    ticks = bins[:: max(1, -(-len(bins) // 12))]
    labels = [str(tick) for tick in ticks]
    if ticks[-1] == last and values.max() > last:
        labels[-1] = f"{last}+"
    axes.set_xticks(ticks, labels)
    axes.set_xlabel("staleness: steps between the weights that sampled it and its use")
    _percent_axis(axes)
    return figure


def timeline(run: Run, theme: Theme) -> "Figure | None":
    """Who works when: ten seconds from the middle of the run, and the whole run underneath."""
    from matplotlib.patches import Patch

    lanes = timeline_lanes(run.schedule)
    shares = busy_shares(run.schedule)
    if not shares:
        return None
    spans = [span for lane in lanes.values() for spans in lane.values() for span in spans]
    first, last = min(start for start, _ in spans), max(end for _, end in spans)
    steps = lanes["trainer"]["step"]
    middle = (steps[0][0] + steps[-1][1]) / 2
    zoom_start = max(first, min(middle - ZOOM_S / 2, last - ZOOM_S))
    zoom = (zoom_start, min(last, zoom_start + ZOOM_S))
    figure = new_figure(10.4, 1.5 + 0.62 * len(lanes), theme)
    near, whole = figure.subplots(2, 1, height_ratios=(2.2, 1))
    names = list(lanes)
    for axes in (near, whole):
        style_axes(axes, theme, grid=False)
        axes.set_ylim(len(names) - 0.45, -0.55)
    for row, (name, lane) in enumerate(lanes.items()):
        for phase, intervals in lane.items():
            shown = [(s, e) for s, e in intervals if e > zoom[0] and s < zoom[1] and e > s]
            near.broken_barh(
                [(s, e - s) for s, e in shown],
                (row - 0.36, 0.72),
                facecolor=theme.bars[phase],
                edgecolor=theme.paper,
                linewidth=0.3,
            )
            _utilisation(whole, intervals, (first, last), row, theme.bars[phase], lane)
        if name in shares:
            near.annotate(
                f"busy {shares[name]:.0%}".replace("%", " %"),
                (1.0, row),
                xycoords=("axes fraction", "data"),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=10,
                fontweight="bold",
                color=theme.ink,
                annotation_clip=False,
            )
    near.set_yticks(range(len(names)), names, color=theme.ink, fontsize=10)
    near.set_xlim(*zoom)
    near.set_title(
        f"{zoom[1] - zoom[0]:.0f} seconds from the middle of the run",
        loc="left",
        fontsize=10,
        color=theme.muted,
    )
    present = dict.fromkeys(
        phase for lane in lanes.values() for phase, intervals in lane.items() if intervals
    )
    near.legend(
        handles=[Patch(color=theme.bars[phase], label=phase) for phase in present],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(present),
        frameon=False,
        fontsize=9,
        labelcolor=theme.ink,
        handlelength=1.0,
        handleheight=1.0,
        columnspacing=1.2,
        handletextpad=0.4,
    )
    whole.set_yticks(range(len(names)), names, color=theme.muted, fontsize=8)
    whole.set_xlim(first, last)
    whole.axvspan(*zoom, facecolor="none", edgecolor=theme.ink, linewidth=1.0)
    whole.set_title("the whole run", loc="left", fontsize=10, color=theme.muted)
    for axes in (near, whole):
        _time_axis(axes)
    whole.set_xlabel("time since start (min:s)")
    return figure


def _utilisation(
    axes: "Axes",
    intervals: Sequence[Interval],
    window: Interval,
    row: int,
    color: str,
    lane: Mapping[str, Sequence[Interval]],
) -> None:
    """One phase of a lane as bars whose height is its share of a short stretch, stacked."""
    edges = np.linspace(*window, 73)
    width = edges[1] - edges[0]

    def covered(spans: Sequence[Interval]) -> np.ndarray:
        table = np.asarray(merge_intervals(spans), np.float64).reshape(-1, 2)
        lengths = np.concatenate([[0.0], np.cumsum(table[:, 1] - table[:, 0])])
        index = np.searchsorted(table[:, 0], edges, side="right")
        ends = np.concatenate([[-np.inf], table[:, 1]])[index]
        return np.diff(lengths[index] - np.maximum(0.0, ends - edges)) / width

    below = np.zeros(len(edges) - 1)
    for other in lane.values():
        if other is intervals:
            break
        below += covered(other)
    top = below + covered(intervals)
    place = row + 0.4
    axes.stairs(place - 0.8 * top, edges, baseline=place - 0.8 * below, fill=True, color=color)


def optimisation(run: Run, theme: Theme) -> "Figure | None":
    """Small multiples of the quantities that tell whether the optimisation is healthy."""
    panels = [
        ("TB loss", "train/tb_loss"),
        ("log ratio to the reference (nats)", "train/kl_reference"),
        ("log Z", "train/log_z"),
        ("gradient norm", "train/grad_norm"),
        ("effective sample size (share)", "train/ess_fraction"),
        ("staleness, mean (steps)", "buffer/staleness_mean"),
    ]
    panels = [panel for panel in panels if len(column(run.metrics, "step", panel[1])[0])]
    if not panels:
        return None
    columns = 3
    rows = -(-len(panels) // columns)
    figure = new_figure(10.4, 0.4 + 1.9 * rows, theme)
    for i, (label, name) in enumerate(panels):
        axes = figure.add_subplot(rows, columns, i + 1)
        style_axes(axes, theme)
        _smoothed(axes, *column(run.metrics, "step", name), theme.main)
        axes.set_title(label, loc="left", fontsize=9.5, color=theme.ink)
        axes.locator_params(axis="y", nbins=4)
        step_axis(axes, is_named=i >= len(panels) - columns)
    return figure
