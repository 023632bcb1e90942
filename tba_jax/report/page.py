# SPDX-License-Identifier: Apache-2.0
"""The page of a run's report: the values that templates/report.html shows."""

from collections.abc import Mapping

import jinja2
import numpy as np

from tba_jax.report import template
from tba_jax.report.files import Facts, Run
from tba_jax.report.samples import browser_data
from tba_jax.report.words import (
    format_count,
    format_duration,
    format_metric,
    held_out,
    is_share,
    metric_label,
    plain,
)

_SAMPLE_BYTES = 6 * 2**20  # bytes of responses in a page


def render(run: Run, pictures: Mapping[str, bytes]) -> str:
    """Return the page as HTML text.

    Args:
        pictures: name of a figure -> PNG file.

    Raises:
        ValueError: a file of the work directory has a value that cannot be shown.
    """
    try:
        report, economy = run.report, run.report.get("economy") or {}
        machine = {"hardware": report.get("hardware"), **run.versions}
        return template.render(
            "report.html",
            script="samples.js",
            title=headline(run),
            name=run.name,
            run=run,
            seed=report.get("seed", run.config.get("seed")),
            warnings=[f"{x[:1].upper()}{x[1:]}." for x in economy.get("warnings", [])],
            tiles=_tiles(run),
            ledger=ledger_sentence(report.get("ledger") or {}),
            economy=economy,
            is_graded=run.metric == "pass_at_1",
            samples=report.get("samples") or [],
            fleet=report.get("fleet") or {},
            chosen=[(x, plain(run.config.get(x, "")), why) for x, why in run.chosen.items()],
            changes=[x.replace("->", "→").split(": ", 1) for x in report.get("config_changes", [])],
            machine=[(name, value) for name, value in machine.items() if value],
            pictures={name: template.picture(png) for name, png in pictures.items()},
            browser=browser_data(run.workdir / "samples.jsonl", _SAMPLE_BYTES),
        )
    except (TypeError, AttributeError, LookupError, ArithmeticError, jinja2.TemplateError) as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"{run.workdir}: report.json, config.json or a log has a value of a wrong type "
            f"({type(error).__name__}: {why:.200}). Restore the file, or remove report.json to "
            "build the report without it"
        ) from error


def headline(run: Run) -> str:
    """Return one sentence: the change of the headline metric, and its time or steps."""
    values = [format_metric(run.metric, e[run.metric]) for e in run.evals]
    if not values:
        return f"{run.last_step} steps, no evaluation yet" if run.last_step else "No step made yet"
    if len(values) == 1:
        return f"{metric_label(run.metric)} {values[0]} before training"
    change = f"{metric_label(run.metric)} {values[0]} → {values[-1]}"
    if run.is_finished:
        return f"{change} in {format_duration(run.seconds)}"
    return f"{change} after {run.evals[-1]['step']} of {run.num_steps} steps"


def _tiles(run: Run) -> list[tuple[str, str, str]]:
    """Return (label, value, detail) of the key figures, from metrics.jsonl."""
    tiles, column = [], run.metrics.column
    if evals := run.evals:
        ends, detail = [evals[0][run.metric], evals[-1][run.metric]][: len(evals)], ""
        if len(ends) == 2:
            gain = ends[1] - ends[0]
            detail = f"{100 * gain:+.1f} points" if is_share(run.metric) else f"{gain:+.3f}"
            if n := evals[-1].get("n"):
                detail += f" on {held_out(n)}"
        value = " → ".join(format_metric(run.metric, x) for x in ends)
        tiles.append((f"{metric_label(run.metric)}, held out", value, detail))
    times, steps = column("time_s", "step")
    if (steps >= 1).any():
        tiles.append(("to the first training step", format_duration(times[steps >= 1][0]), ""))
    speeds = [column("step", f"{of}/tokens_per_s")[1] for of in ("search", "train")]
    if len(speeds[0]):
        trained = f"{format_count(speeds[1].mean())}/s trained" if len(speeds[1]) else ""
        tiles.append(("tokens decoded", f"{format_count(speeds[0].mean())}/s", trained))
    if run.metrics.staleness:
        ages, uses = np.array([*run.metrics.staleness.items()]).T
        p95 = ages[np.searchsorted(np.cumsum(uses), 0.95 * uses.sum())]
        mean = np.average(ages, weights=uses)
        detail = f"95 % within {p95}, maximum {ages.max()}"
        tiles.append(("mean staleness", f"{mean:.1f} steps", detail))
    return tiles


def ledger_sentence(ledger: Facts) -> str:
    """Return where every sampled response went, and how many were trained on."""
    generated = ledger.get("generated")
    if not generated:
        return ""
    places = {
        "stored in the replay buffer": ledger.get("stored"),
        "waiting to be merged": ledger.get("waiting"),
        "evicted because their prompt had more than its limit": ledger.get("evicted_capacity"),
        "evicted because the buffer was full": ledger.get("evicted_bytes"),
        "evicted because of replay.max_staleness": ledger.get("evicted_age"),
        "lost with a searcher, whose prompts were drawn again": ledger.get("lost"),
    }
    for reason, count in (ledger.get("rejected") or {}).items():
        places[f"rejected ({reason.replace('_', ' ')})"] = count
    found = [f"{count:,} were {place}" for place, count in places.items() if count]
    text = f"{generated:,} responses were sampled: {', '.join(found) or 'none is known'}."
    if missing := generated - sum(count or 0 for count in places.values()):
        text += f" The number of sampled responses minus their sum is {missing:+,}."
    if ledger.get("used") and ledger.get("trained_unique"):
        times = ledger["used"] / ledger["trained_unique"]
        text += f" {ledger['trained_unique']:,} were trained on, {times:.1f} times each on average."
    return text
