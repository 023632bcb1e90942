# SPDX-License-Identifier: Apache-2.0
"""HTML common to all pages of the package: the document, sections, tables, escaped text.

Invariant: a page fetches nothing and runs only its own script, and every text is escaped, because
model outputs may contain anything.
"""

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence
from typing import Any

from tba_jax.report.words import plain, shown


def document(title: str, name: str, body: str, style: str = "", script: str = "") -> str:
    """Return a whole page as HTML text.

    Args:
        title: one sentence for the window title.
        style: additional CSS rules of this page.
        script: the only script that may run; "" for none.
    """
    policy, code = "", ""
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy = f"; script-src 'sha256-{digest}'"
        code = f"<script>{script}</script>"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        f"img-src data:; style-src 'unsafe-inline'{policy}\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escaped(title)} · {escaped(name)}</title><style>{STYLE}{style}</style></head>\n"
        f"<body><main>{body}</main>{code}</body></html>\n"
    )


def escaped(value: Any) -> str:
    """Return any value as escaped text; control characters appear as escapes."""
    return html.escape(shown(str(value)))


def section(title: str, body: str) -> str:
    return f"<section><h2>{escaped(title)}</h2>{body}</section>"


def table(head: Iterable[str], rows: Iterable[Sequence[str]], kind: str) -> str:
    """Return a table that scrolls sideways on a narrow screen; "" without rows.

    Args:
        head: names of the columns as text; empty for a table without names.
        rows: cells as HTML; the first cell of a row names the row.
    """
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        for first, *cells in rows
    )
    names = "".join(f'<th scope="col">{escaped(name)}</th>' for name in head)
    above = f"<thead><tr>{names}</tr></thead>" if names else ""
    whole = f'<table class="{kind}">{above}<tbody>{body}</tbody></table>'
    return f'<div class="scroll">{whole}</div>' if body else ""


def pairs(items: Iterable[tuple[str, Any]]) -> str:
    rows = ((escaped(name), escaped(plain(value))) for name, value in items)
    return table((), rows, "pairs")


def picture(png: bytes, text: str) -> str:
    """Return a picture that the page contains, with a description for readers who do not see it."""
    data = base64.b64encode(png).decode("ascii")
    return (
        f'<div class="scroll"><img alt="{escaped(text)}" src="data:image/png;base64,{data}"></div>'
    )


def details(summary: str, body: str) -> str:
    return f"<details><summary>{escaped(summary)}</summary>{body}</details>" if body else ""


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
img { display: block; width: 100%; height: auto; border-radius: 6px; }
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
.choices th { overflow-wrap: anywhere; min-width: 11rem; }
.choices tbody th, .choices td:first-of-type, p code
  { font: .84rem/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
section > h3 { margin-top: 1.6rem; }
.samples details { margin: .3rem 0 0; font-size: .85rem; font-weight: 400; }
.mark { display: inline-block; padding: .05rem .5rem; border-radius: 99px; font-size: .8rem;
  font-weight: 600; background: var(--soft); color: var(--muted); }
.mark.right { color: var(--right); background: var(--right-bg); }
.mark.wrong { color: var(--wrong); background: var(--wrong-bg); }
.ledger { max-width: 760px; }
.ledger td { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.sums td:last-child { width: 34%; padding-right: 0; vertical-align: middle; }
.ledger i { display: block; height: .55rem; min-width: 2px; border-radius: 2px;
  background: var(--accent); }
.sums tr:last-child > * { font-weight: 600; border-bottom: 0; }
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
  .optimisation img, .by_staleness img { width: auto; max-width: none; height: 330px; }
  .samples thead { display: none; }
  .samples, .samples tbody, .samples tr, .samples th, .samples td { display: block; width: auto; }
  .samples th:first-child { width: auto; }
  .samples tr { padding: .8rem 0; border-bottom: 1px solid var(--line); }
  .samples th, .samples td { border: 0; padding: .2rem 0; }
  .samples td::before { content: "before "; color: var(--muted); font-size: .85rem; }
  .samples td:last-child::before { content: "after "; }
  .sums td:last-child { display: none; }
}
@media print { details { display: none; } }
"""
