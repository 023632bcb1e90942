# SPDX-License-Identifier: Apache-2.0
"""The sample browser of a report: responses of samples.jsonl, with filters and a text search.

Invariant: the page contains the data as text, and the script inserts them as text only.
"""

import html
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tba_jax.report.document import section
from tba_jax.report.jsonl import parse_line, read_lines
from tba_jax.report.words import shown

_TEXTS = ("prompt", "answer", "finish")
_NUMBERS = ("reward", "version", "staleness", "searcher", "length", "reference_sum")
_NUMBER_LISTS = ("behavior", "reference", "is_sampled")


def wrong_sample(record: Mapping[str, Any]) -> str:
    """Return the error in a line of samples.jsonl; "" without one."""
    parts = record.get("parts", {})
    lists = {name: record.get(name, []) for name in ("tokens", *_NUMBER_LISTS)}
    checks = [
        ("step", type(record.get("step")) is int),
        ("of", record.get("of") in ("train", "eval")),
        ("parts", isinstance(parts, Mapping) and _are_numbers(parts.values())),
        *((name, isinstance(record.get(name, ""), str)) for name in _TEXTS),
        *((name, _are_numbers([record.get(name)])) for name in _NUMBERS),
        *((name, isinstance(values, list)) for name, values in lists.items()),
        *((name, _are_numbers(lists[name])) for name in _NUMBER_LISTS),
        ("tokens", all(isinstance(token, str) for token in lists["tokens"])),
    ]
    return next((f"{name!r} is {record.get(name)!r:.40}" for name, ok in checks if not ok), "")


def _are_numbers(values: Any) -> bool:
    return all(x is None or isinstance(x, int | float) for x in values)


def read_samples(path: Path, most_bytes: int) -> list[dict[str, Any]]:
    """Return evenly spaced responses of the log.

    Args:
        path: path of samples.jsonl, which need not exist.
        most_bytes: limit on the bytes of the returned lines.

    Raises:
        ValueError: one of the returned lines is damaged.
    """
    stride = -(-path.stat().st_size // most_bytes) if path.exists() else 1
    together = itertools.groupby(
        read_lines(path), lambda line: line[1][: line[1].find(b'"prompt_id"')]
    )
    return [
        parse_line(f"{path}, line {number}", line, wrong_sample)
        for index, (_, lines) in enumerate(together)
        if index % stride == 0
        for number, line in lines
    ]


def newest_evaluation(path: Path) -> list[dict[str, Any]]:
    """Return the responses of the newest evaluation of a log, in the format of report.json.

    Raises:
        ValueError: the newest line of an evaluation is damaged.
    """
    lines: list[tuple[int, bytes]] = []
    for number, line in read_lines(path):
        start = line[: line.find(b'"prompt_id"')]
        if b'"eval"' in start:
            lines = [x for x in lines if x[1].startswith(start)] + [(number, line)]
    records = [parse_line(f"{path}, line {number}", line, wrong_sample) for number, line in lines]
    return [
        {**x, "after": "".join(x.get("tokens", [])), "after_reward": x.get("reward")}
        for x in records
    ]


def browser(path: Path, most_bytes: int) -> str:
    """Return the section of a page; `SCRIPT` builds its controls.

    Raises:
        ValueError: as in `read_samples`.
    """
    samples = read_samples(path, most_bytes)
    if not samples:
        text = "Responses appear after the first training step."
        return section("Responses", f'<p class="missing">{text}</p>')
    prompts: dict[tuple[str, str, str], int] = {}
    rows = []
    for sample in samples:
        row = dict(sample)
        key = sample["of"], shown(row.pop("prompt", "")), shown(row.pop("answer", ""))
        row["tokens"] = [shown(token) for token in sample.get("tokens", [])]
        rows.append({**row, "prompt": prompts.setdefault(key, len(prompts))})
    data = json.dumps({"prompts": list(prompts), "rows": rows}, separators=(",", ":"))
    text = (
        "A sample of the trained responses and of the responses to held-out prompts, over the "
        "whole run. Click on a response to read it."
    )
    return section(
        "Responses",
        f'<p>{text}</p><div id="browser"><noscript><p class="missing">The list needs JavaScript.'
        f"</p></noscript></div><pre id=samples hidden>{html.escape(data, quote=False)}</pre>",
    )


SCRIPT = r"""
const FILTERS = ['step', 'reward', 'length', 'staleness'];
const view = {more: 20, open: new Set(), prompt: null, data: null};
function make(tag, facts = {}, ...children) {
  const node = Object.assign(document.createElement(tag), facts);
  node.append(...children);
  return node;
}
function choice(name, options) {
  return make('label', {}, name, make('select', {name},
    ...options.map(([value, text]) => make('option', {value, textContent: text}))));
}
function control(name) { return document.querySelector(`#browser [name="${name}"]`); }
function build(root) {
  root.append(make('form', {className: 'controls', onsubmit: () => false},
    make('label', {}, 'search', make('input', {name: 'text', type: 'search'})),
    choice('order', [['-step', 'newest step'], ['step', 'oldest step'],
      ['-reward', 'highest reward'], ['reward', 'lowest reward'], ['-length', 'longest'],
      ['-staleness', 'stalest']]),
    choice('colour', [['', 'none'], ['behavior', 'log π − log behavior'],
      ['reference', 'log π − log reference'], ['is_sampled', 'sampled by the policy']]),
    choice('from', [['', 'training and evaluation'], ['train', 'training'],
      ['eval', 'evaluation']]),
    ...FILTERS.map(name => make('label', {}, name, make('span', {},
      make('input', {name: name + '_min', type: 'number', step: 'any', placeholder: 'min'}),
      make('input', {name: name + '_max', type: 'number', step: 'any', placeholder: 'max'})))),
    choice('searcher', []), choice('finish', [])),
    make('p', {className: 'found', role: 'status'}), make('div', {className: 'rows'}),
    make('button', {className: 'more', textContent: 'show more', type: 'button'}));
  root.oninput = () => { view.more = 20; draw(); };
  root.querySelector('.more').onclick = () => { view.more += 200; draw(); };
}
function options(name) {
  const select = control(name), known = select.value;
  const found = [...new Set(view.data.rows.map(row => row[name]).filter(x => x != null))];
  select.replaceChildren(make('option', {value: '', textContent: 'any'}),
    ...found.sort((a, b) => a > b ? 1 : -1).map(x => make('option', {value: x, textContent: x})));
  select.value = known;
}
function browse() {
  const text = document.getElementById('samples'), root = document.getElementById('browser');
  if (!text || !root) return;
  view.data = JSON.parse(text.textContent);
  view.data.rows.forEach((row, i) => {
    row.text = row.tokens.join('');
    row.key = [row.step, row.of, view.data.prompts[row.prompt][1], row.text, row.searcher].join();
  });
  if (!root.querySelector('form')) { root.replaceChildren(); build(root); }
  options('searcher'); options('finish');
  draw();
}
function chosen() {
  const value = name => control(name).value, text = value('text').toLowerCase();
  const found = view.data.rows.filter(row => {
    const prompt = view.data.prompts[row.prompt][1];
    return (view.prompt === null || prompt === view.prompt)
      && (!value('from') || row.of === value('from'))
      && (!text || (prompt + '\n' + row.text).toLowerCase().includes(text))
      && ['searcher', 'finish'].every(x => !value(x) || String(row[x]) === value(x))
      && FILTERS.every(x => {
        const least = value(x + '_min'), most = value(x + '_max');
        return (!least || (row[x] != null && row[x] >= +least))
          && (!most || (row[x] != null && row[x] <= +most));
      });
  });
  const [, sign, name] = value('order').match(/^(-?)(.*)$/);
  const rank = row => row[name] == null ? Infinity : sign ? -row[name] : row[name];
  return found.sort((a, b) => rank(a) === rank(b) ? 0 : rank(a) - rank(b));
}
function number(x) { return x == null ? '–' : Number.isInteger(x) ? String(x) : x.toFixed(3); }
function toolCalls(text) {
  return [...text.matchAll(/<(tool|tool_call)>(.*?)<\/\1>/gs)].map(found => {
    let name = 'a tool';
    try { name = JSON.parse(found[2]).name; } catch { /* An invalid call has no name. */ }
    return {start: found.index, end: found.index + found[0].length, name};
  });
}
// An episode is shown as turns: what the policy sampled, and what the environment answered.
function coloured(row) {
  const name = control('colour').value, values = row[name], sampled = row.is_sampled || [];
  const isEpisode = sampled.includes(0), calls = toolCalls(row.text);
  const body = make('div', {className: 'response'});
  let turn = null, label = null, at = 0;
  row.tokens.forEach((token, i) => {
    if (!turn || (isEpisode && sampled[i] !== sampled[i - 1])) {
      turn = make('pre', {className: isEpisode && !sampled[i] ? 'environment' : 'policy'});
      label = make('small', {textContent: turn.className});
      body.append(...isEpisode ? [label, turn] : [turn]);
    }
    const call = sampled[i] !== 0 && calls.find(x => at >= x.start && at < x.end);
    if (call && at === call.start) label.textContent += ` · calls ${call.name}`;
    at += token.length;
    const piece = make('span', {textContent: token, className: call ? 'call' : ''});
    if (values) {
      const isMark = name === 'is_sampled';
      const size = isMark ? 1 - values[i] : Math.min(Math.abs(values[i]) / 200, 1);
      const tone = isMark ? '128,128,128' : values[i] > 0 ? '0,114,178' : '230,120,0';
      piece.style.background = `rgba(${tone},${(size * .7).toFixed(2)})`;
      piece.title = isMark ? '' : (values[i] / 100).toFixed(2);
    }
    turn.append(piece);
  });
  if (!name || row.of !== 'train') return body;
  const missing = name === 'is_sampled' ? 'The policy sampled every token.'
    : 'Not known token by token: the reference is scored by searchers, as a sum.';
  const legend = name === 'is_sampled' ? 'Grey: written by the environment.'
    : 'Blue: the trained policy gives the token a higher probability. Orange: a lower one.';
  return make('div', {}, body, make('small', {textContent: values ? legend : missing}));
}
function detail(row) {
  const [, prompt, answer] = view.data.prompts[row.prompt];
  const facts = {reward: row.reward, ...row.parts, 'weights of step': row.version,
    staleness: row.staleness, searcher: row.searcher, tokens: row.length, finish: row.finish,
    'log π − log reference, whole response': row.reference_sum};
  const said = Object.entries(facts).filter(([, x]) => x != null)
    .map(([name, x]) => `${name} ${typeof x === 'number' ? number(x) : x}`).join(' · ');
  const all = make('button', {type: 'button', className: 'prompt_filter',
    textContent: view.prompt === null ? 'all responses to this prompt' : 'all prompts'});
  all.onclick = () => { view.prompt = view.prompt === null ? prompt : null; draw(); };
  return make('div', {className: 'detail'}, make('pre', {textContent: prompt}),
    make('small', {textContent: answer && 'answer: ' + answer}), coloured(row),
    make('p', {textContent: said}), all);
}
function draw() {
  const root = document.getElementById('browser'), rows = chosen();
  root.querySelector('.found').textContent = `${rows.length} of ${view.data.rows.length} responses`
    + (view.prompt === null ? '' : ' · one prompt');
  root.querySelector('.rows').replaceChildren(...rows.slice(0, view.more).map(row => {
    const head = make('summary', {}, make('span', {textContent:
      `${row.of === 'eval' ? 'evaluation' : 'step'} ${row.step}`}),
      make('span', {textContent: 'reward ' + number(row.reward)}),
      make('span', {textContent: row.staleness == null ? '' : 'staleness ' + row.staleness}),
      make('code', {textContent: view.data.prompts[row.prompt][1].slice(-60)}),
      make('code', {textContent: row.text.slice(0, 120)}));
    const item = make('details', {open: view.open.has(row.key)}, head);
    if (item.open) item.append(detail(row));
    head.onclick = event => {
      event.preventDefault();
      view.open.has(row.key) ? view.open.delete(row.key) : view.open.add(row.key);
      draw();
    };
    return item;
  }));
  root.querySelector('.more').hidden = rows.length <= view.more;
}
browse();
"""

STYLE = """
.controls { display: grid; grid-template-columns: repeat(auto-fill, minmax(11.5rem, 1fr));
  gap: .6rem 1.1rem; font-size: .85rem; color: var(--muted); }
.controls label { display: flex; flex-direction: column; gap: .15rem; min-width: 0; }
.controls label span { display: flex; gap: .3rem; }
.controls input, .controls select, #browser button { font: inherit; color: var(--ink);
  background: var(--paper); border: 1px solid var(--line); border-radius: 6px;
  padding: .2rem .4rem; width: 100%; min-width: 0; }
#browser button { font: inherit; color: var(--ink);
  background: var(--paper); border: 1px solid var(--line); border-radius: 6px;
  padding: .15rem .4rem; }
.controls input[type=number] { width: 5rem; margin-right: .25rem; }
.controls select { max-width: 14rem; }
#browser button { width: auto; margin-top: .6rem; cursor: pointer; color: var(--accent); }
#browser .found { margin: .8rem 0 .3rem; color: var(--muted); font-size: .85rem; }
.rows details { margin: 0; border-bottom: 1px solid var(--line); }
.rows summary { display: grid; grid-template-columns: 7.5rem 6.5rem 6rem minmax(0, 1fr)
  minmax(0, 2fr); gap: .6rem; padding: .3rem 0; color: var(--ink); font-size: .85rem; }
.rows summary::marker { content: ""; }
.rows summary:hover { background: var(--soft); }
.rows code { overflow: hidden; white-space: nowrap; text-overflow: ellipsis; }
.rows code:first-of-type { color: var(--muted); }
.detail { padding: .4rem 1rem 1rem; background: var(--soft); border-radius: 8px; }
.detail .response { margin-top: .6rem; padding: .5rem .7rem; background: var(--paper);
  border-radius: 6px; }
.response small + pre { margin: 0 0 .5rem; padding-left: .6rem;
  border-left: 3px solid var(--accent); }
.response small + .environment { color: var(--muted); border-color: var(--line); }
.response .call { font-weight: 600; text-decoration: underline dotted; }
.detail p { margin: .5rem 0; color: var(--muted); font-size: .85rem; }
@media (max-width: 720px) { .rows summary { grid-template-columns: 1fr 1fr 1fr; }
  .rows summary code { grid-column: 1 / -1; } }
"""
