# SPDX-License-Identifier: Apache-2.0
"""Figure of the trained responses by their staleness, from `stale_LEAST/NAME` of metrics.jsonl."""

from typing import TYPE_CHECKING

from tba_jax.report import plots
from tba_jax.report.files import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def by_staleness(run: Run, theme: plots.Theme) -> "Figure | None":
    """Draw small multiples of off-policy measures, with one line for each range of staleness."""
    panels = [
        ("effective sample size (share)", "ess_fraction"),
        ("log ratio to the sampler, median (nats)", "log_ratio_p50"),
        ("log ratio, 95 % (nats)", "log_ratio_p95"),
        ("residual, root of mean square", "residual_rms"),
        ("tokens with a ratio outside 0.8 to 1.2", "clip_fraction"),
        ("distinct responses (share)", "unique_share"),
    ]
    prefix, name = "stale_", "/ess_fraction"
    keys = [key for key in run.metrics.names if key.endswith(name)]
    ages = sorted(int(k[len(prefix) : -len(name)]) for k in keys if k.startswith(prefix))
    if not ages:
        return None
    colours = (*plots.SERIES, theme.ink)
    figure = plots.new_figure(10.4, 4.4, theme)
    for i, (label, quantity) in enumerate(panels):
        axes = figure.add_subplot(2, 3, i + 1)
        plots.style_axes(axes, theme)
        for j, age in enumerate(ages):
            x, y = run.metrics.column("step", f"{prefix}{age}/{quantity}")
            axes.plot(
                x,
                plots.smooth(y, 9),
                color=colours[j % len(colours)],
                linewidth=1.4,
            )
        axes.set_title(label, loc="left", fontsize=9.5, color=theme.ink)
        axes.locator_params(axis="y", nbins=4)
        plots.step_axis(axes, is_named=i >= 3)
    lines = figure.axes[0].get_lines()
    labels = [f"from {ages[0]} steps old", *(str(age) for age in ages[1:])]
    figure.legend(
        lines,
        labels,
        loc="outside upper left",
        ncols=len(ages),
        frameon=False,
        fontsize=9,
        labelcolor=theme.ink,
        handlelength=1.4,
        columnspacing=1.4,
    )
    return figure
