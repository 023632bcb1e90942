# SPDX-License-Identifier: Apache-2.0
"""The page of a run's report as HTML text.

If a part of the page has no data, a sentence replaces it.

Invariant: the page fetches nothing, and every text in it is escaped, because model outputs may
contain anything.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tba_jax.report import sample_browser
from tba_jax.report.document import (
    details,
    document,
    escaped,
    pairs,
    picture,
    section,
    table,
)
from tba_jax.report.figures import FIGURES, HEALTHY, LEARNED
from tba_jax.report.files import Facts, Run
from tba_jax.report.words import duration, held_out, percent, plain
from tba_jax.report.writers import format_count, format_metric, is_share, metric_label

_SAMPLE_BYTES = 6 * 2**20  # bytes of responses in a page
_NEWEST = 20  # number of last steps whose mean is the speed of a run in progress


def headline(run: Run) -> str:
    """Return one sentence: the improvement of the headline metric and the steps for it."""
    evals = run.evals
    seconds = run.report.get("wall_s") or _last_time(run)
    if len(evals) == 2:
        before, after = (_headline_value(run, e) for e in evals)
        change = f"{metric_label(run.metric)} {before} → {after}"
        if run.is_finished:
            return f"{change} in {duration(seconds)}"
        return f"{change} after {evals[1]['step']} of {run.num_steps} steps"
    if evals:
        return f"{metric_label(run.metric)} {_headline_value(run, evals[0])} before training"
    if run.last_step:
        return f"{run.last_step} steps, no evaluation yet"
    return "No step made yet"


def _headline_value(run: Run, evaluation: Facts) -> str:
    value = evaluation[run.metric]
    return percent(value) if is_share(run.metric) else format_metric(run.metric, value)


def _last_time(run: Run) -> float:
    times, _ = run.metrics.column("time_s", "step")
    return float(times.max(initial=0.0))


def _subline(run: Run) -> str:
    evals = run.evals
    parts = []
    if len(evals) == 2:
        gain = evals[1][run.metric] - evals[0][run.metric]
        change = f"{100 * gain:+.1f} points" if is_share(run.metric) else f"{gain:+.3f}"
        n = evals[0].get("n")
        problems = f" on {held_out(n)}" if n else ""
        parts.append(f"{change}{problems}, {run.decoding}")
    elif evals and evals[0].get("n"):
        parts.append(f"{held_out(evals[0]['n'])}, {run.decoding}")
    driver = {"async": "asynchronous", "sync": "synchronous"}.get(
        run.report.get("driver") or run.config.get("driver", ""), ""
    )
    if run.last_step:
        parts.append(f"{run.last_step} steps of {driver + ' ' if driver else ''}training")
    skipped = run.report.get("skipped_prompts") or {}
    if any(skipped.values()):
        parts.append(f"prompts skipped as too long: {plain(skipped)}")
    hardware = run.report.get("hardware")
    if hardware:  # The name of the operating system, if it is there, comes last.
        parts.append("on " + ", ".join(plain(hardware).split(", ")[:2]))
    return ". ".join(part[0].upper() + part[1:] for part in parts) + "." if parts else ""


def _notice(run: Run) -> str:
    if run.is_finished:
        return ""
    if run.last_step >= run.num_steps:
        text = (
            f"All {run.num_steps} steps are done, but the run ended before it wrote report.json; "
            "the figures below come from its logs."
        )
    else:
        text = (
            f"This run is not finished: {run.last_step} of {run.num_steps} steps. Run the same "
            "command on this work directory to continue; the figures below show the run so far."
        )
    return f'<p class="notice" role="status">{escaped(text)}</p>'


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


def _tiles(run: Run) -> str:
    told = run.report or _so_far(run)
    speed = told.get("tokens_per_s") or {}
    stale = told.get("staleness") or {}
    sync = told.get("sync") or {}
    wall = told.get("wall_s")
    tiles: list[tuple[str, str, str]] = []
    if told.get("time_to_first_step_s") is not None:
        tiles.append((duration(told["time_to_first_step_s"]), "to the first training step", ""))
    if speed.get("decoded") is not None:
        trained = f"{format_count(speed['trained'])}/s trained" if speed.get("trained") else ""
        tiles.append((f"{format_count(speed['decoded'])}/s", "tokens decoded", trained))
    if stale.get("mean") is not None:
        tail = f"95 % within {stale['p95']:g}, maximum {stale['max']:g}" if "p95" in stale else ""
        tiles.append((f"{stale['mean']:.1f} steps", "mean staleness", tail))
    if sync.get("count"):
        pause = f"{sync['count']} publications, {1000 * sync['mean_s']:.0f} ms each"
        share = sync["count"] * sync["mean_s"] / wall if wall else 0.0
        tiles.append((percent(share), "of the time spent on publishing weights", pause))
    generated = (told.get("ledger") or {}).get("generated")
    if generated:
        used = (told.get("ledger") or {}).get("trained_unique")
        detail = f"{format_count(used)} of them trained on" if used else ""
        tiles.append((format_count(generated), "responses sampled", detail))
    cells = [
        f"<div><dt>{escaped(label)}</dt><dd><b>{escaped(value)}</b><small>{escaped(detail)}</small></dd></div>"
        for value, label, detail in tiles
    ]
    return f'<dl class="tiles">{"".join(cells)}</dl>' if cells else ""


def _pictures(run: Run, pictures: Mapping[str, bytes], section: str) -> str:
    """Return the pictures of a section; a single picture has no title."""
    of_section = [figure for figure in FIGURES if figure.section == section]
    cells = []
    for figure in of_section:
        if figure.name not in pictures:
            continue
        title, text = (x if isinstance(x, str) else x(run) for x in (figure.title, figure.text))
        heading = f"<h3>{escaped(title)}</h3>" if len(of_section) > 1 else ""
        drawn = picture(pictures[figure.name], f"{title}. {text}")
        cells.append(
            f'<figure class="{figure.name}"><figcaption>{heading}<p>{escaped(text)}</p>'
            f"</figcaption>{drawn}</figure>"
        )
    return "".join(cells)


def _missing(text: str) -> str:
    return f'<p class="missing">{escaped(text)}</p>'


def _mark(reward: Any, *, is_graded: bool) -> str:
    """Return HTML for the reward of a response: right for 1, wrong for 0, else the number."""
    if reward is None:
        return '<span class="mark none">– no reward</span>'
    if is_graded and reward >= 1:
        return '<span class="mark right">✓ right</span>'
    if is_graded and reward <= 0:
        return '<span class="mark wrong">✗ wrong</span>'
    return f'<span class="mark none">reward {reward:.2f}</span>'


def _gold(answer: str) -> str:
    """Return HTML of the reference answer; all lines but the last of a solution are folded."""
    *work, last = answer.strip().splitlines() or [""]
    if work:
        return details(f"answer: {last}", f"<pre>{escaped(answer)}</pre>")
    return f"<small>answer: {escaped(last)}</small>" if last else ""


def _samples(run: Run) -> str:
    samples = run.report.get("samples") or []
    if not samples:
        text = "Side-by-side answers appear when the run has made its last evaluation."
        return section("Before and after", _missing(text))
    rows = []
    is_graded = run.metric == "pass_at_1"
    for sample in samples:
        cells = []
        for when in ("before", "after"):
            text = sample.get(when)
            shown = "(empty)" if text == "" else "(not sampled)" if text is None else text
            mark = _mark(sample.get(f"{when}_reward"), is_graded=is_graded)
            cells.append(f"{mark}<pre>{escaped(shown)}</pre>")
        gold = _gold(str(sample.get("answer") or ""))
        rows.append([f"<pre>{escaped(sample.get('prompt', ''))}</pre>{gold}", *cells])
    known = [
        [r for sample in samples if (r := sample.get(f"{when}_reward")) is not None]
        for when in ("before", "after")
    ]
    if len(samples) > 1 and len({sample.get("prompt") for sample in samples}) == 1:
        text = f"{len(samples)} responses to the one held-out problem"
    else:
        text = f"The same {held_out(len(samples))}, {run.decoding}"
    if is_graded:
        right = [sum(r >= 1 for r in rewards) for rewards in known]
        text += f": {right[0]} right before training, {right[1]} after."
    elif all(known):
        mean = [sum(rewards) / len(rewards) for rewards in known]
        text += f": mean reward {mean[0]:.2f} before training, {mean[1]:.2f} after."
    else:
        text += "."
    shown = table(("problem", "before", "after"), rows, "samples")
    return section("Before and after", f"<p>{escaped(text)}</p>{shown}")


LEDGER_ROWS = {
    "waiting": "waiting to be merged",
    "stored": "stored in the replay buffer",
    "lost": "lost with a searcher; its prompts were drawn again",
    "evicted_capacity": "evicted: limit of the prompt reached",
    "evicted_bytes": "evicted: buffer full",
    "evicted_age": "evicted: older than replay.max_staleness",
}


def _ledger(run: Run) -> str:
    ledger = run.report.get("ledger") or {}
    generated = ledger.get("generated")
    if not generated:
        return ""
    rows = [(label, ledger.get(name) or 0) for name, label in LEDGER_ROWS.items()]
    rejected = ledger.get("rejected") or {}
    rows += [(f"rejected: {name.replace('_', ' ')}", n or 0) for name, n in rejected.items()]
    total = sum(count for _, count in rows)
    balance = (
        "Every sampled response is accounted for."
        if total == generated
        else f"The entries add up to {total:,}, {generated - total:+,} short of what was sampled."
    )
    cells = [
        (
            escaped(label),
            f"{count:,}",
            percent(count / generated),
            f'<i style="width:{100 * count / generated:.2f}%"></i>',
        )
        for label, count in rows
        if count
    ]
    cells.append(("sampled", f"{generated:,}", percent(1.0), ""))
    uses = ""
    if ledger.get("used") and ledger.get("trained_unique"):
        often = ledger["used"] / ledger["trained_unique"]
        uses = (
            f" {ledger['trained_unique']:,} of them were trained on, {often:.1f} times each "
            "on average."
        )
    text = f"<p>{escaped(balance + uses + _economy(run.report.get('economy') or {}))}</p>"
    warnings = "".join(
        f'<p class="notice">{escaped(sentence[:1].upper() + sentence[1:])}.</p>'
        for sentence in (run.report.get("economy") or {}).get("warnings", [])
    )
    where = table((), cells, "ledger sums")
    return section("Where every response went", f"{text}{warnings}{where}")


def _economy(told: Mapping[str, Any]) -> str:
    """Return a sentence on the share of responses that were trained on, and on their bias."""
    names = ("trained_share", "length_rank", "effective_m")
    if any(told.get(name) is None for name in names):
        return ""
    return (
        f" The trainer used {percent(told['trained_share'])} of the groups while "
        "they were new; the mean length rank of the trained responses "
        f"is {told['length_rank']:.2f} (0.5 is unbiased), and {percent(told['effective_m'])} of "
        "the batch slots used the newest data."
    )


def _settings(run: Run) -> str:
    """Return the settings: chosen by the run, changed from the defaults, and all of them."""
    chosen = [
        (escaped(name), escaped(plain(run.config.get(name, ""))), escaped(reason))
        for name, reason in run.chosen.items()
    ]
    body = ""
    if chosen:
        body = (
            "<h3>Chosen by the run</h3><p>The run chose these values, because the config left "
            "them open. To use another value, set it, for example <code>--config."
            f"{chosen[0][0]}={chosen[0][1]}</code>.</p>"
            + table(("setting", "value", "reason"), chosen, "choices")
        )
    if changes := run.report.get("config_changes"):
        lines = [line.replace("->", "→").partition(": ") for line in changes]
        shown = pairs((field, change) for field, _, change in lines)
        body += f"<h3>Changed from the default</h3>{shown}"
    body += details("All settings", pairs(run.config.items()))
    machine = {"hardware": run.report.get("hardware"), **run.versions}
    body += details("Versions and hardware", pairs((n, v) for n, v in machine.items() if v))
    return section("Settings", body) if body else ""


def _fleet(run: Run) -> str:
    """Return the section on searchers of a fleet, one row for each searcher ID."""
    fleet = run.report.get("fleet") or {}
    rows = fleet.get("by_searcher") or []
    if not rows:
        return ""
    text = (
        f"{fleet['searchers']:.0f} of {fleet['slots']:.0f} searchers were connected at the end, "
        f"on {fleet['hosts']:.0f} hosts. Searchers died or missed their heartbeat "
        f"{fleet['searchers_lost']:.0f} times; {fleet['lost']:.0f} tickets were lost and issued "
        f"again, and {fleet['duplicates']:.0f} late results were dropped"
    )
    cells = [
        (
            f"searcher {row['searcher']}",
            escaped(row["host"] or "–"),
            escaped(row["state"]),
            f"{row['joins']}",
            f"{row['groups']:,}",
            "–" if row.get("staleness_mean") is None else f"{row['staleness_mean']:.1f}",
            f"{row['idle_s']:,.0f} s",
        )
        for row in rows
    ]
    head = ("", "host", "state", "joins", "groups", "staleness on arrival", "idle")
    return section("The fleet", f"<p>{escaped(text)}.</p>{table(head, cells, 'ledger')}")


def render(run: Run, pictures: Mapping[str, bytes]) -> str:
    """Return the page as HTML text.

    Args:
        pictures: figure -> PNG file.
    """
    body = _body(run, pictures)
    return document(headline(run), run_name(run), body, sample_browser.STYLE, sample_browser.SCRIPT)


def run_name(run: Run) -> str:
    return str(run.report.get("name") or run.config.get("name") or run.workdir.name)


def _body(run: Run, pictures: Mapping[str, bytes]) -> str:
    seed = run.report.get("seed", run.config.get("seed"))
    eyebrow = f"tba_jax · {run_name(run)}" + ("" if seed is None else f" · seed {seed}")
    learned, healthy = (_pictures(run, pictures, x) for x in (LEARNED, HEALTHY))
    no_evaluation = "" if run.evals else _missing("No evaluation has been logged yet.")
    parts = [
        f'<header><p class="eyebrow">{escaped(eyebrow)}</p><h1>{escaped(headline(run))}</h1>'
        f'<p class="lead">{escaped(_subline(run))}</p></header>',
        _notice(run),
        _tiles(run),
        section(LEARNED, f'{no_evaluation}<div class="grid">{learned}</div>'),
        _samples(run),
        sample_browser.browser(run.workdir / "samples.jsonl", _SAMPLE_BYTES),
        section(HEALTHY, healthy) if healthy else "",
        _ledger(run),
        _fleet(run),
        _settings(run),
        f"<footer><p>Rebuild this page with <code>python -m tba_jax.report {escaped(run.workdir)}"
        "</code>"
        ". The figures are also in <code>plots/</code>, every number in "
        "<code>metrics.jsonl</code> and <code>report.json</code>.</p></footer>",
    ]
    return "\n".join(part for part in parts if part)
