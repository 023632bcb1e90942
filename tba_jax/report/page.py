# SPDX-License-Identifier: Apache-2.0
"""The page of a run's report as HTML text.

It takes what a run left behind (`Run`) and its pictures as PNG bytes, leaves out what is missing
and says so. It knows nothing of files. It owns one invariant: the page fetches nothing and runs no
script, and every text in it is escaped, because model outputs may hold anything.
"""

import base64
import dataclasses
import html
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tba_jax.report import plots
from tba_jax.report.writers import format_count, format_metric, is_share, metric_label

Facts = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Run:
    """What a work directory tells about its run.

    Attributes:
        workdir: the directory.
        report: report.json, {} when the run has not written it.
        config: flat config fields, {} when absent.
        versions: of what decides the numbers, {} when absent.
        metrics: lines of metrics.jsonl.
        schedule: lines of schedule.jsonl.
    """

    workdir: Path
    report: Facts
    config: Facts
    versions: Facts
    metrics: Sequence[Facts]
    schedule: Sequence[Facts]

    @property
    def last_step(self) -> int:
        """Newest step that left a trace."""
        steps = [record.get("step", 0) for record in self.metrics]
        return max([self.report.get("steps") or 0, *steps])

    @property
    def num_steps(self) -> int:
        """Steps the run was asked for; those it made where no config says."""
        return self.config.get("num_steps") or self.last_step

    @property
    def is_finished(self) -> bool:
        """Whether the last step was made and the closing figures were written."""
        return bool(self.report) and self.last_step >= self.num_steps

    @property
    def evals(self) -> list[Facts]:
        """First and last evaluation: [], [before] or [before, after]."""
        found: list[Facts] = [
            {
                "step": record.get("step", 0),
                **{
                    name.removeprefix("eval/"): value
                    for name, value in record.items()
                    if name.startswith("eval/")
                },
            }
            for record in self.metrics
            if isinstance(record.get(f"eval/{self.metric}"), int | float)
        ]
        ends = found[:1] + found[1:][-1:]
        told = self.report.get("eval") or {}
        if told.get("before") and told.get("after"):
            after_step = ends[-1]["step"] if ends else self.last_step
            return [{"step": 0, **told["before"]}, {"step": after_step, **told["after"]}]
        return ends

    @property
    def metric(self) -> str:
        """Name of the headline metric, as the evaluations say it."""
        named = [record["eval/metric"] for record in self.metrics if "eval/metric" in record]
        return named[-1] if named else "pass_at_1"

    @property
    def decoding(self) -> str:
        """How evaluations decode, in words."""
        temperature = self.config.get("eval.temperature", 0.0)
        if not temperature:
            return "greedy decoding"
        n = self.config.get("eval.num_samples", 1)
        return f"{n} response{'s' if n > 1 else ''} each at temperature {temperature:g}"

    @property
    def kind(self) -> str:
        """Name of the response kind whose share was measured."""
        kinds = self.report.get("kinds") or []
        return kinds[0] if kinds else ""


def flat(facts: Facts, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one level with dotted names."""
    out: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping):
            out.update(flat(value, f"{prefix}{name}."))
        else:
            out[prefix + name] = value
    return out


def _e(value: Any) -> str:
    """Any value as escaped text; control characters, which HTML forbids, are shown as escapes."""
    text = "".join(
        char.encode("unicode_escape").decode("ascii")
        if char not in "\n\t" and unicodedata.category(char) in ("Cc", "Cs", "Cn")
        else char
        for char in str(value)
    )
    return html.escape(text)


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f}\N{NO-BREAK SPACE}%"


def _words(seconds: float) -> str:
    """ "48 s", "3 min 12 s", "2 h 5 min"."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60} s" if total % 60 else f"{total // 60} min"
    return f"{total // 3600} h {total // 60 % 60} min"


def headline(run: Run) -> str:
    """One sentence: what got better, by how much, how fast."""
    evals = run.evals
    seconds = run.report.get("wall_s") or _last_time(run)
    if len(evals) == 2:
        before, after = (_headline_value(run, e) for e in evals)
        change = f"{metric_label(run.metric)} {before} → {after}"
        if run.is_finished:
            return f"{change} in {_words(seconds)}"
        return f"{change} after {evals[1]['step']} of {run.num_steps} steps"
    if evals:
        return f"{metric_label(run.metric)} {_headline_value(run, evals[0])} before training"
    if run.last_step:
        return f"{run.last_step} steps, no evaluation yet"
    return "No step made yet"


def _headline_value(run: Run, evaluation: Facts) -> str:
    value = evaluation[run.metric]
    return _percent(value) if is_share(run.metric) else format_metric(run.metric, value)


def _last_time(run: Run) -> float:
    times = [record["time_s"] for record in run.metrics if record.get("time_s") is not None]
    return max(times, default=0.0)


def _held_out(n: int) -> str:
    return f"{n} held-out problem{'s' if n != 1 else ''}"


def _subline(run: Run) -> str:
    evals = run.evals
    parts = []
    if len(evals) == 2:
        gain = evals[1][run.metric] - evals[0][run.metric]
        change = f"{100 * gain:+.1f} points" if is_share(run.metric) else f"{gain:+.3f}"
        n = evals[0].get("n")
        problems = f" on {_held_out(n)}" if n else ""
        parts.append(f"{change}{problems}, {run.decoding}")
    elif evals and evals[0].get("n"):
        parts.append(f"{_held_out(evals[0]['n'])}, {run.decoding}")
    driver = {"async": "asynchronous", "sync": "synchronous"}.get(
        run.report.get("driver") or run.config.get("driver", ""), ""
    )
    if run.last_step:
        parts.append(f"{run.last_step} steps of {driver + ' ' if driver else ''}training")
    skipped = run.report.get("skipped_prompts") or {}
    if any(skipped.values()):
        parts.append(f"prompts skipped as too long: {_plain(skipped)}")
    hardware = run.report.get("hardware")
    if hardware:
        parts.append("on " + _plain(hardware))
    return ". ".join(part[0].upper() + part[1:] for part in parts) + "." if parts else ""


def _plain(value: Any) -> str:
    """A JSON value as one readable line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(_plain(item) for item in value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def _notice(run: Run) -> str:
    if run.is_finished:
        return ""
    if run.last_step >= run.num_steps:
        text = (
            f"All {run.num_steps} steps are made, but the run ended before its closing figures "
            "were written; what follows comes from its logs."
        )
    else:
        text = (
            f"This run is not finished: {run.last_step} of {run.num_steps} steps. Run the same "
            "command on this work directory to continue; the figures below are those so far."
        )
    return f'<p class="notice" role="status">{_e(text)}</p>'


def _tiles(run: Run) -> str:
    told = run.report
    shares = plots.busy_shares(run.schedule)
    searchers = [share for name, share in shares.items() if name.startswith("searcher")]
    speed = told.get("tokens_per_s") or {}
    stale = told.get("staleness") or {}
    sync = told.get("sync") or {}
    wall = told.get("wall_s")
    tiles: list[tuple[str, str, str]] = []
    if told.get("time_to_first_step_s") is not None:
        tiles.append((_words(told["time_to_first_step_s"]), "to the first training step", ""))
    if speed.get("decoded") is not None:
        trained = f"{format_count(speed['trained'])}/s trained" if speed.get("trained") else ""
        tiles.append((f"{format_count(speed['decoded'])}/s", "tokens decoded", trained))
    if shares:
        busy = f"trainer busy {_percent(shares['trainer'], 0)}"
        busy += f", searchers {_percent(sum(searchers) / len(searchers), 0)}"
        tiles.append((_percent(shares["both"], 0), "of the time both sides work", busy))
    if stale.get("mean") is not None:
        tail = f"95 % within {stale['p95']:g}, most {stale['max']:g}" if "p95" in stale else ""
        tiles.append((f"{stale['mean']:.1f} steps", "mean staleness", tail))
    if sync.get("count"):
        pause = f"{sync['count']} syncs, {1000 * sync['mean_s']:.0f} ms each"
        share = sync["count"] * sync["mean_s"] / wall if wall else 0.0
        tiles.append((_percent(share), "of the time spent syncing", pause))
    generated = (told.get("ledger") or {}).get("generated")
    if generated:
        used = (told.get("ledger") or {}).get("trained_unique")
        detail = f"{format_count(used)} of them trained on" if used else ""
        tiles.append((format_count(generated), "responses sampled", detail))
    cells = [
        f"<div><dt>{_e(label)}</dt><dd><b>{_e(value)}</b><small>{_e(detail)}</small></dd></div>"
        for value, label, detail in tiles
    ]
    return f'<dl class="tiles">{"".join(cells)}</dl>' if cells else ""


def _picture(
    pictures: Mapping[str, tuple[bytes, bytes]],
    name: str,
    title: str,
    text: str,
    *,
    is_titled: bool = True,
) -> str:
    if name not in pictures:
        return ""
    heading = f"<h3>{_e(title)}</h3>" if is_titled else ""
    light, dark = (base64.b64encode(png).decode("ascii") for png in pictures[name])
    return (
        f'<figure class="{_e(name)}"><figcaption>{heading}<p>{_e(text)}</p>'
        '</figcaption><div class="scroll"><picture>'
        f'<source media="(prefers-color-scheme: dark)" srcset="data:image/png;base64,{dark}">'
        f'<img alt="{_e(title)}. {_e(text)}" src="data:image/png;base64,{light}">'
        "</picture></div></figure>"
    )


def _learning(run: Run, pictures: Mapping[str, tuple[bytes, bytes]]) -> str:
    evals = run.evals
    name, interval = metric_label(run.metric), ""
    if len(evals) == 2:
        interval = " Bars: 90 % interval." if is_share(run.metric) else ""
    is_known = len(evals) == 2 and "n" in evals[-1]
    problems = _held_out(evals[-1]["n"]) if is_known else "held-out problems"
    text = f"{name[0].upper()}{name[1:]} on {problems}, {run.decoding}.{interval}"
    habit = "What the searchers sample, step by step."
    if (
        run.kind
        and len(evals) == 2
        and all("kind_share" in e and "response_length_mean" in e for e in evals)
    ):
        habit = (
            f"Held out, {run.kind} answers went from {_percent(evals[0]['kind_share'], 0)} to "
            f"{_percent(evals[1]['kind_share'], 0)}, the mean length from "
            f"{evals[0]['response_length_mean']:.0f} to {evals[1]['response_length_mean']:.0f} "
            "tokens."
        )
    title = "Accuracy" if run.metric == "pass_at_1" else name[0].upper() + name[1:]
    figures = [
        _picture(pictures, "accuracy", title, text),
        _picture(pictures, "reward", "Reward", "Mean reward of sampled responses, per step."),
        _picture(pictures, "habits", "How it answers", habit),
        _picture(
            pictures,
            "staleness",
            "Off-policy by how much",
            "Share of the responses trained on, by the age of the weights that sampled them.",
        ),
    ]
    missing = "" if evals else '<p class="missing">No evaluation has been logged yet.</p>'
    return _section("What it learned", missing + f'<div class="grid">{"".join(figures)}</div>')


def _mark(reward: Any, *, is_graded: bool) -> str:
    """How a response did; rewards of 0 and 1 mean wrong and right only where it is graded."""
    if reward is None:
        return '<span class="mark none">– no reward</span>'
    if is_graded and reward >= 1:
        return '<span class="mark right">✓ right</span>'
    if is_graded and reward <= 0:
        return '<span class="mark wrong">✗ wrong</span>'
    return f'<span class="mark none">reward {reward:.2f}</span>'


def _gold(answer: str) -> str:
    """The reference answer; of a worked solution the last line, with the rest folded away."""
    *work, last = answer.strip().splitlines() or [""]
    if work:
        return _details(f"answer: {last}", f"<pre>{_e(answer)}</pre>")
    return f"<small>answer: {_e(last)}</small>" if last else ""


def _samples(run: Run) -> str:
    samples = run.report.get("samples") or []
    if not samples:
        text = "Side-by-side answers appear when the run has made its last evaluation."
        return _section("Before and after", f'<p class="missing">{text}</p>')
    rows = []
    is_graded = run.metric == "pass_at_1"
    for sample in samples:
        cells = []
        for when in ("before", "after"):
            text = sample.get(when)
            shown = "(empty)" if text == "" else "(not sampled)" if text is None else text
            mark = _mark(sample.get(f"{when}_reward"), is_graded=is_graded)
            cells.append(f'<td data-label="{when}">{mark}<pre>{_e(shown)}</pre></td>')
        gold = _gold(str(sample.get("answer") or ""))
        prompt = f'<th scope="row"><pre>{_e(sample.get("prompt", ""))}</pre>{gold}</th>'
        rows.append(f"<tr>{prompt}{''.join(cells)}</tr>")
    known = [
        [r for sample in samples if (r := sample.get(f"{when}_reward")) is not None]
        for when in ("before", "after")
    ]
    if len(samples) > 1 and len({sample.get("prompt") for sample in samples}) == 1:
        text = f"{len(samples)} responses to the one held-out problem"
    else:
        text = f"The same {_held_out(len(samples))}, {run.decoding}"
    if is_graded:
        right = [sum(r >= 1 for r in rewards) for rewards in known]
        text += f": {right[0]} right before training, {right[1]} after."
    elif all(known):
        mean = [sum(rewards) / len(rewards) for rewards in known]
        text += f": mean reward {mean[0]:.2f} before training, {mean[1]:.2f} after."
    else:
        text += "."
    table = (
        '<table class="samples"><thead><tr><th scope="col">problem</th><th scope="col">before'
        f'</th><th scope="col">after</th></tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )
    return _section("Before and after", f"<p>{_e(text)}</p>{table}")


def _asynchrony(run: Run, pictures: Mapping[str, tuple[bytes, bytes]]) -> str:
    shares = plots.busy_shares(run.schedule)
    if "timeline" not in pictures or not shares:
        text = "No schedule has been logged yet, so there is no timeline."
        return _section("Who works when", f'<p class="missing">{text}</p>')
    text = (
        f"Trainer and searchers work at the same time for {_percent(shares['both'], 0)} of the "
        "run. Busy shares on the right are over the whole training time."
    )
    return _section(
        "Who works when", _picture(pictures, "timeline", "Timeline", text, is_titled=False)
    )


LEDGER_ROWS = {
    "outbox": "waiting in an outbox",
    "stored": "stored in the replay buffer",
    "duplicate": "replaced by an identical newer one",
    "evicted_capacity": "evicted: prompt's store full",
    "evicted_bytes": "evicted: buffer full",
    "evicted_age": "evicted: too old",
    "evicted_reuse": "evicted: used often enough",
    "evicted_similar": "evicted: worse of two similar ones",
}


def _ledger(run: Run) -> str:
    ledger = run.report.get("ledger") or {}
    generated = ledger.get("generated")
    if not generated:
        return ""
    rows = [(label, ledger.get(name) or 0) for name, label in LEDGER_ROWS.items()]
    rejected = ledger.get("rejected") or {}
    rows += [(f"rejected: {name.replace('_', ' ')}", count) for name, count in rejected.items()]
    total = sum(count for _, count in rows)
    balance = (
        "Every sampled response is accounted for."
        if total == generated
        else f"The entries add up to {total:,}, {generated - total:+,} short of what was sampled."
    )
    cells = [
        f'<tr><th scope="row">{_e(label)}</th><td>{count:,}</td>'
        f"<td>{_percent(count / generated)}</td>"
        f'<td class="bar"><i style="width:{100 * count / generated:.2f}%"></i></td></tr>'
        for label, count in rows
        if count
    ]
    cells.append(
        f'<tr class="total"><th scope="row">sampled</th><td>{generated:,}</td>'
        f"<td>{_percent(1.0)}</td><td></td></tr>"
    )
    table = f'<table class="ledger"><tbody>{"".join(cells)}</tbody></table>'
    uses = ""
    if ledger.get("used") and ledger.get("trained_unique"):
        often = ledger["used"] / ledger["trained_unique"]
        uses = (
            f" {ledger['trained_unique']:,} of them were trained on, {often:.1f} times each "
            "on average."
        )
    return _section("Where every response went", f"<p>{_e(balance + uses)}</p>{table}")


def _changes(run: Run) -> list[tuple[str, str]]:
    """config_changes as (field, text): a mapping field -> value, or lines "field: old -> new"."""
    changes = run.report.get("config_changes") or {}
    if isinstance(changes, Mapping):
        items = flat(changes).items()
    else:
        items = [str(line).replace("->", "→").partition(": ")[::2] for line in changes]
    return [
        (str(field), " → ".join(map(str, value)) if isinstance(value, list) else _plain(value))
        for field, value in items
    ]


def _pairs(items: Iterable[tuple[str, Any]]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{_e(name)}</th><td>{_e(_plain(value))}</td></tr>'
        for name, value in items
    )
    return f'<table class="pairs"><tbody>{rows}</tbody></table>' if rows else ""


def _details(summary: str, body: str) -> str:
    return f"<details><summary>{_e(summary)}</summary>{body}</details>" if body else ""


def _settings(run: Run) -> str:
    changes = _changes(run)
    body = "<p>Everything else is at its default.</p>" + _pairs(changes) if changes else ""
    body += _details("All config fields", _pairs(run.config.items()))
    versions = run.versions or run.report.get("versions") or {}
    body += _details("Versions and hardware", _pairs(flat(_machine(run, versions)).items()))
    return _section("What was run", body) if body else ""


def _machine(run: Run, versions: Facts) -> dict[str, Any]:
    hardware = run.report.get("hardware")
    return {**({"hardware": hardware} if hardware else {}), **versions}


def _section(title: str, body: str) -> str:
    return f"<section><h2>{_e(title)}</h2>{body}</section>"


def render(run: Run, pictures: Mapping[str, tuple[bytes, bytes]]) -> str:
    """The page as HTML text."""
    name = run.report.get("name") or run.config.get("name") or run.workdir.name
    seed = run.report.get("seed", run.config.get("seed"))
    eyebrow = f"tba_jax · {name}" + ("" if seed is None else f" · seed {seed}")
    health = _picture(
        pictures,
        "optimisation",
        "Optimisation",
        "Dots are steps, lines their moving mean.",
        is_titled=False,
    )
    parts = [
        f'<header><p class="eyebrow">{_e(eyebrow)}</p><h1>{_e(headline(run))}</h1>'
        f'<p class="lead">{_e(_subline(run))}</p></header>',
        _notice(run),
        _tiles(run),
        _learning(run, pictures),
        _samples(run),
        _asynchrony(run, pictures),
        _section("Is the optimisation healthy?", health) if health else "",
        _ledger(run),
        _settings(run),
        f"<footer><p>Rebuild this page with <code>python -m tba_jax.report {_e(run.workdir)}</code>"
        ". The figures are also in <code>plots/</code>, every number in "
        "<code>metrics.jsonl</code> and <code>report.json</code>.</p></footer>",
    ]
    body = "\n".join(part for part in parts if part)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "img-src data:; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{_e(headline(run))} · {_e(name)}</title><style>{STYLE}</style></head>\n<body>"
        f"<main>{body}</main></body></html>\n"
    )


STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2430; --muted: #5b6675;
  --line: #dfe3e8; --soft: #f5f7f9; --accent: #0072b2; --right: #00704f; --right-bg: #e3f4ee;
  --wrong: #b34700; --wrong-bg: #fcede3; }
@media (prefers-color-scheme: dark) { :root { --paper: #171c24; --ink: #e8ecf1;
  --muted: #9aa6b5; --line: #2f3844; --soft: #1f2630; --accent: #56b4e9; --right: #5fd6b0;
  --right-bg: #16372f; --wrong: #f5a36c; --wrong-bg: #3d2818; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 3rem 1.5rem 4rem; }
.eyebrow { margin: 0 0 .4rem; color: var(--accent); font-weight: 600; letter-spacing: .02em; }
h1 { margin: 0; font-size: clamp(1.9rem, 4.8vw, 2.9rem); line-height: 1.12;
  letter-spacing: -.025em; text-wrap: balance; }
.lead { margin: .8rem 0 0; font-size: 1.1rem; color: var(--muted); max-width: 60ch; }
h2 { margin: 3.2rem 0 .6rem; font-size: 1.45rem; letter-spacing: -.015em; }
h3 { margin: 0; font-size: 1.02rem; }
section > p { margin: .2rem 0 1rem; color: var(--muted); max-width: 70ch; }
.notice { margin: 1.6rem 0 0; padding: .8rem 1rem; border-left: 4px solid var(--wrong);
  background: var(--wrong-bg); }
.missing { padding: .8rem 1rem; background: var(--soft); border-radius: 8px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 1px;
  margin: 2rem 0 0; background: var(--line); border: 1px solid var(--line); border-radius: 10px;
  overflow: hidden; }
.tiles div { display: flex; flex-direction: column-reverse; justify-content: flex-end;
  padding: .9rem 1rem; background: var(--paper); }
.tiles dt { order: 0; color: var(--muted); font-size: .86rem; line-height: 1.3; }
.tiles dd { margin: 0; display: contents; }
.tiles b { order: 1; font-size: 1.5rem; letter-spacing: -.02em; line-height: 1.25;
  font-variant-numeric: tabular-nums; }
.tiles small { order: -1; color: var(--muted); font-size: .78rem; margin-top: .25rem; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 2.2rem 2.4rem;
  margin-top: 1.2rem; }
figure { margin: 0; min-width: 0; }
figcaption p { margin: .1rem 0 .5rem; color: var(--muted); font-size: .9rem; line-height: 1.4; }
.grid figcaption { min-height: 4.2rem; }
img { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th { text-align: left; font-weight: 400; }
thead th { color: var(--muted); font-size: .85rem; }
th, td { padding: .5rem .8rem .5rem 0; vertical-align: top; border-bottom: 1px solid var(--line); }
pre { margin: .25rem 0 0; white-space: pre-wrap; overflow-wrap: anywhere;
  font: .86rem/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
small { color: var(--muted); }
.samples { table-layout: fixed; }
.samples th:first-child { width: 26%; }
.samples details { margin: .3rem 0 0; font-size: .85rem; font-weight: 400; }
.mark { display: inline-block; padding: .05rem .5rem; border-radius: 99px; font-size: .8rem;
  font-weight: 600; background: var(--soft); color: var(--muted); }
.mark.right { color: var(--right); background: var(--right-bg); }
.mark.wrong { color: var(--wrong); background: var(--wrong-bg); }
.ledger { max-width: 760px; }
.ledger td { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.ledger .bar { width: 34%; padding-right: 0; vertical-align: middle; }
.ledger i { display: block; height: .55rem; min-width: 2px; border-radius: 2px;
  background: var(--accent); }
.total th, .total td { font-weight: 600; border-bottom: 0; }
.pairs { max-width: 760px; }
.pairs th { width: 45%; }
.pairs th, .pairs td { padding-top: .3rem; padding-bottom: .3rem; overflow-wrap: anywhere;
  font: .84rem/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
details { margin: 1rem 0 0; }
summary { cursor: pointer; color: var(--accent); }
footer { margin-top: 3.5rem; padding-top: 1rem; border-top: 1px solid var(--line);
  color: var(--muted); font-size: .88rem; overflow-wrap: anywhere; }
@media (max-width: 720px) {
  main { padding: 1.6rem 1rem 3rem; }
  .grid { grid-template-columns: 1fr; gap: 1.8rem; }
  .grid figcaption { min-height: 0; }
  .tiles { grid-template-columns: 1fr 1fr; }
  .timeline img, .optimisation img { width: auto; max-width: none; height: 330px; }
  .samples thead { display: none; }
  .samples, .samples tbody, .samples tr, .samples th, .samples td { display: block; width: auto; }
  .samples th:first-child { width: auto; }
  .samples tr { padding: .8rem 0; border-bottom: 1px solid var(--line); }
  .samples th, .samples td { border: 0; padding: .2rem 0; }
  .samples td::before { content: attr(data-label) " "; color: var(--muted); font-size: .85rem; }
  .ledger .bar { display: none; }
}
@media print { details { display: none; } }
"""
