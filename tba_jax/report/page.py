# SPDX-License-Identifier: Apache-2.0
"""The page of a run's report: the values that templates/report.html shows."""

from collections.abc import Mapping
from typing import Any

import jinja2
import numpy as np

from tba_jax.report import template
from tba_jax.report.figures import FIGURES, HEALTHY, LEARNED
from tba_jax.report.files import Facts, Run
from tba_jax.report.samples import browser_data
from tba_jax.report.words import (
    duration,
    format_count,
    held_out,
    is_share,
    metric_label,
    percent,
    plain,
    spaced_metric,
)

_SAMPLE_BYTES = 6 * 2**20  # bytes of responses in a page
_NEWEST = 20  # number of last steps whose mean is the speed of a run in progress


def render(run: Run, pictures: Mapping[str, bytes]) -> str:
    """Return the page as HTML text.

    Args:
        pictures: name of a figure -> PNG file.

    Raises:
        ValueError: a file of the work directory has a value that cannot be shown.
    """
    try:
        browser = browser_data(run.workdir / "samples.jsonl", _SAMPLE_BYTES)
        return template.render(
            "report.html",
            script="samples.js",
            **_texts(run),
            **{section: _figures(run, pictures, section) for section in (LEARNED, HEALTHY)},
            browser=browser,
        )
    except (TypeError, AttributeError, LookupError, ArithmeticError, jinja2.TemplateError) as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"{run.workdir}: report.json, config.json or a log has a value of a wrong type "
            f"({type(error).__name__}: {why:.200}). Restore the file, or remove report.json to "
            "build the report without it"
        ) from error


def _texts(run: Run) -> dict[str, Any]:
    report = run.report
    economy = report.get("economy") or {}
    changes = [line.replace("->", "→").partition(": ") for line in report.get("config_changes", [])]
    machine = {"hardware": report.get("hardware"), **run.versions}
    return {
        "title": headline(run),
        "name": run.name,
        "workdir": run.workdir,
        "seed": report.get("seed", run.config.get("seed")),
        "lead": _lead(run),
        "notice": _notice(run),
        "warnings": [f"{x[:1].upper()}{x[1:]}." for x in economy.get("warnings", [])],
        "tiles": _tiles(run),
        "ledger": ledger_sentence(report.get("ledger") or {}, economy),
        "has_evals": bool(run.evals),
        "is_graded": run.metric == "pass_at_1",
        "samples": report.get("samples") or [],
        "samples_text": _samples_text(run),
        "fleet": report.get("fleet") or {},
        "chosen": [
            (name, plain(run.config.get(name, "")), why) for name, why in run.chosen.items()
        ],
        "changes": [(field, change) for field, _, change in changes],
        "config": [*run.config.items()],
        "machine": [(name, value) for name, value in machine.items() if value],
    }


def headline(run: Run) -> str:
    """Return one sentence: the improvement of the headline metric and the steps for it."""
    evals = run.evals
    if len(evals) == 2:
        before, after = (spaced_metric(run.metric, e[run.metric]) for e in evals)
        change = f"{metric_label(run.metric)} {before} → {after}"
        if run.is_finished:
            times, _ = run.metrics.column("time_s", "step")
            seconds = run.report.get("wall_s") or float(times.max(initial=0.0))
            return f"{change} in {duration(seconds)}"
        return f"{change} after {evals[1]['step']} of {run.num_steps} steps"
    if evals:
        value = spaced_metric(run.metric, evals[0][run.metric])
        return f"{metric_label(run.metric)} {value} before training"
    return f"{run.last_step} steps, no evaluation yet" if run.last_step else "No step made yet"


def _gain(run: Run) -> str:
    """Return the difference between the last and the first evaluation."""
    before, after = (e[run.metric] for e in run.evals)
    return (
        f"{100 * (after - before):+.1f} points"
        if is_share(run.metric)
        else f"{after - before:+.3f}"
    )


def _lead(run: Run) -> str:
    evals, parts = run.evals, []
    problems = held_out(evals[0]["n"]) if evals and evals[0].get("n") else ""
    if len(evals) == 2:
        parts.append(f"{_gain(run)}{' on ' * bool(problems)}{problems}, {run.decoding}")
    elif problems:
        parts.append(f"{problems}, {run.decoding}")
    driver = run.report.get("driver") or run.config.get("driver", "")
    if run.last_step:
        driver = {"async": "asynchronous ", "sync": "synchronous "}.get(driver, "")
        parts.append(f"{run.last_step} steps of {driver}training")
    skipped = run.report.get("skipped_prompts") or {}
    if any(skipped.values()):
        parts.append(f"prompts skipped as too long: {plain(skipped)}")
    if hardware := run.report.get("hardware"):  # The name of the operating system comes last.
        parts.append("on " + ", ".join(plain(hardware).split(", ")[:2]))
    return ". ".join(part[0].upper() + part[1:] for part in parts) + "." if parts else ""


def _notice(run: Run) -> str:
    if run.is_finished:
        return ""
    if run.last_step >= run.num_steps:
        return (
            f"All {run.num_steps} steps are done, but the run ended before it wrote report.json; "
            "the figures below come from its logs."
        )
    return (
        f"This run is not finished: {run.last_step} of {run.num_steps} steps. Run the same "
        "command on this work directory to continue; the figures below show the run so far."
    )


def _so_far(run: Run) -> Facts:
    """Return the figures of report.json, computed from the metrics of an unfinished run."""
    found: dict[str, Any] = {"tokens_per_s": {}}
    times, steps = run.metrics.column("time_s", "step")
    if (steps >= 1).any():
        found["time_to_first_step_s"] = float(times[steps >= 1][0])
    for name, key in (("decoded", "search/tokens_per_s"), ("trained", "train/tokens_per_s")):
        newest = run.metrics.column("step", key)[1][-_NEWEST:]
        if len(newest):
            found["tokens_per_s"][name] = float(newest.mean())
    if run.metrics.staleness:
        ages, uses = np.array([*run.metrics.staleness.items()]).T
        p95 = ages[np.searchsorted(np.cumsum(uses), 0.95 * uses.sum())]
        found["staleness"] = {"mean": float(np.average(ages, weights=uses))}
        found["staleness"] |= {"p95": int(p95), "max": int(ages.max())}
    return found


def _tiles(run: Run) -> list[dict[str, str]]:
    facts = run.report or _so_far(run)
    tiles = []

    def add(value: str, label: str, detail: str = "") -> None:
        tiles.append({"value": value, "label": label, "detail": detail})

    if evals := run.evals:
        values = [spaced_metric(run.metric, e[run.metric]) for e in evals]
        detail = _gain(run) if len(evals) == 2 else ""
        add(" → ".join(values), f"{metric_label(run.metric)}, held out", detail)
    if facts.get("time_to_first_step_s") is not None:
        add(duration(facts["time_to_first_step_s"]), "to the first training step")
    speed = facts.get("tokens_per_s") or {}
    if speed.get("decoded") is not None:
        trained = f"{format_count(speed['trained'])}/s trained" if speed.get("trained") else ""
        add(f"{format_count(speed['decoded'])}/s", "tokens decoded", trained)
    if stale := facts.get("staleness"):
        detail = f"95 % within {stale['p95']:g}, maximum {stale['max']:g}"
        add(f"{stale['mean']:.1f} steps", "mean staleness", detail)
    sync, wall_s = facts.get("sync") or {}, facts.get("wall_s")
    if sync.get("count") and wall_s:
        detail = f"{sync['count']} publications, {1000 * sync['mean_s']:.0f} ms each"
        share = percent(sync["count"] * sync["mean_s"] / wall_s)
        add(share, "of the time spent on publishing weights", detail)
    return tiles


def ledger_sentence(ledger: Facts, economy: Facts) -> str:
    """Return where every sampled response went, and how much of them was trained on."""
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
        text += f" These numbers are {missing:+,} short of what was sampled."
    if ledger.get("used") and ledger.get("trained_unique"):
        times = ledger["used"] / ledger["trained_unique"]
        text += f" {ledger['trained_unique']:,} were trained on, {times:.1f} times each on average."
    names = ("trained_share", "length_rank", "effective_m")
    if all(economy.get(name) is not None for name in names):
        text += (
            f" The trainer used {percent(economy['trained_share'])} of the groups while they were "
            f"new; the mean length rank of the trained responses is {economy['length_rank']:.2f} "
            f"(0.5 is unbiased), and {percent(economy['effective_m'])} of the batch slots used the "
            "newest data."
        )
    return text


def _samples_text(run: Run) -> str:
    samples = run.report.get("samples") or []
    text = f"The same {held_out(len(samples))}, {run.decoding}"
    if len(samples) > 1 and len({sample.get("prompt") for sample in samples}) == 1:
        text = f"{len(samples)} responses to the one held-out problem"
    before, after = (
        [r for sample in samples if (r := sample.get(f"{when}_reward")) is not None]
        for when in ("before", "after")
    )
    if run.metric == "pass_at_1":
        right = [sum(r >= 1 for r in rewards) for rewards in (before, after)]
        return f"{text}: {right[0]} right before training, {right[1]} after."
    if before and after:
        mean = [sum(rewards) / len(rewards) for rewards in (before, after)]
        return f"{text}: mean reward {mean[0]:.2f} before training, {mean[1]:.2f} after."
    return f"{text}."


def _figures(run: Run, pictures: Mapping[str, bytes], section: str) -> list[dict[str, str]]:
    return [
        {
            "name": figure.name,
            "title": figure.title if isinstance(figure.title, str) else figure.title(run),
            "text": figure.text if isinstance(figure.text, str) else figure.text(run),
            "source": template.picture(pictures[figure.name]),
        }
        for figure in FIGURES
        if figure.section == section and figure.name in pictures
    ]
