# SPDX-License-Identifier: Apache-2.0
"""A study as a frontier: win rate by the gold reward against divergence from the start model.

It takes the evaluation records of each variant and seed and returns a table and a figure; it does
not know how they were made. Invariant: every point is one evaluation of one run, none is fitted.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tba_jax.report.plots import LIGHT, SERIES, new_figure, style_axes, to_png

X, Y = "eval/kl_to_reference", "eval/win_rate"
BUDGETS = (0.5, 1.0, 2.0)  # nats per response

# Variant -> evaluation records of each seed, in the order of their steps.
Curves = Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]


def best_within(records: Sequence[Mapping[str, Any]], budget: float) -> float:
    """Highest win rate that a run reaches at a divergence of at most `budget`, nats per response.

    Evaluations are joined by straight lines, so that variants whose evaluations lie elsewhere can
    be compared.
    """
    points = [(r[X], r[Y]) for r in records]
    found = [y for x, y in points if x <= budget]
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if (x0 - budget) * (x1 - budget) < 0:
            found.append(y0 + (y1 - y0) * (budget - x0) / (x1 - x0))
    return max(found)


def table(curves: Curves) -> str:
    """Medians over seeds as a Markdown table; the interval of the win rate is its range."""
    budgets = " | ".join(f"best at KL ≤ {b:g}" for b in BUDGETS)
    lines = [
        f"| variant | seeds | win rate after (least, most) | KL after | {budgets} | "
        "learned reward after | gold reward after | perplexity, diluted |",
        "|---|---|---|---|" + "---|" * len(BUDGETS) + "---|---|---|",
    ]
    for variant, seeds in curves.items():
        last = [records[-1] for records in seeds]

        def median(name: str, last: Sequence[Mapping[str, Any]] = last) -> float:
            return float(np.median([record[name] for record in last]))

        wins = [100 * record[Y] for record in last]
        within = [
            f"{100 * float(np.median([best_within(records, b) for records in seeds])):.1f} %"
            for b in BUDGETS
        ]
        lines.append(
            f"| {variant} | {len(seeds)} | {np.median(wins):.1f} % ({min(wins):.1f}, "
            f"{max(wins):.1f}) | {median(X):.2f} | {' | '.join(within)} | "
            f"{median('eval/reward_mean'):.3f} | {median('eval/gold_reward_mean'):.3f} | "
            f"{median('eval/perplexity'):.2f}, {median('eval/perplexity_diluted'):.3f} |"
        )
    return "\n".join(lines)


def figure(curves: Curves) -> bytes:
    """Each seed's path thin, the median over seeds at each evaluated step thick, as PNG."""
    picture = new_figure(7.0, 4.6, LIGHT)
    axes = picture.subplots()
    style_axes(axes, LIGHT)
    for i, (variant, seeds) in enumerate(curves.items()):
        # Colours for the first variants, then the same ones again with dashes.
        color, dashes = SERIES[i % len(SERIES)], "-" if i < len(SERIES) else "--"
        for records in seeds:
            axes.plot(
                [r[X] for r in records],
                [100 * r[Y] for r in records],
                color=color,
                alpha=0.25,
                linewidth=0.8,
                linestyle=dashes,
            )
        shared = sorted(set.intersection(*({r["step"] for r in records} for records in seeds)))
        by_step = [{r["step"]: r for r in records} for records in seeds]
        middle = np.array(
            [[np.median([run[s][name] for run in by_step]) for s in shared] for name in (X, Y)]
        )
        axes.plot(
            middle[0], 100 * middle[1], color=color, linewidth=2.0, linestyle=dashes, label=variant
        )
        axes.plot(middle[0, -1:], 100 * middle[1, -1:], "o", color=color)
    axes.set_xlabel("KL(policy || start model), nats per response")
    axes.set_ylabel("win rate over people's responses, %")
    axes.legend(frameon=False, loc="upper right")
    return to_png(picture)
