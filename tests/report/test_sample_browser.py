# SPDX-License-Identifier: Apache-2.0
"""The sample browser of a page, read back from Chromium."""

import json

import pytest
from browser import in_browser
from fake_workdir import fake_workdir
from hostile import HOSTILE
from markupsafe import escape

from tba_jax.report.files import load_run
from tba_jax.report.page import render
from tba_jax.report.words import shown
from tba_jax.storage.whole_files import read_json, write_json


def line(step, number, **facts):
    """A response of a training step."""
    of = {"of": "train", "prompt_id": step % 3, "prompt": f"prompt {step % 3}", "answer": "7"}
    of |= {"reward": step / 100, "parts": {"format": 0.25}, "finish": "eos", "length": 2 + number}
    of |= {"version": max(step - 3, 0), "staleness": min(step, 3), "searcher": number}
    of |= {"tokens": ["one ", f"word{step}"], "behavior": [30, -200]}
    return {"step": step, **of, **facts}


def page_of(folder, records, name="run"):
    workdir = folder / name
    fake_workdir(workdir, num_steps=4)
    text = "".join(json.dumps(record) + "\n" for record in records)
    (workdir / "samples.jsonl").write_text(text)
    page = folder / "page.html"
    page.write_text(render(load_run(workdir), {}), encoding="utf-8", errors="strict")
    return page


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    held_out = {"of": "eval", "prompt": "held out", "tokens": ["x"]}
    records = [{"step": 0, "prompt_id": 0, **held_out}]
    records += [line(step, number) for step in range(1, 41) for number in (0, 1)]
    return page_of(tmp_path_factory.mktemp("samples"), records)


HANDS = """
    const set = (name, value) => { const x = document.querySelector(`#controls [name="${name}"]`);
      x.value = value; x.dispatchEvent(new Event('input', {bubbles: true})); };
    const found = () => document.getElementById('found').textContent;
    const click = selector => document.querySelector(selector).click();
"""


def test_responses_are_filtered_and_one_opens_with_its_parts_colours_and_prompt(page, tmp_path):
    script = """
        const told = [found()];
        const ask = (name, value) => { set(name, value); told.push(found()); set(name, ''); };
        ask('text', 'WORD7'); ask('step_min', '31'); ask('searcher', '1'); ask('of', 'eval');
        set('of', 'train'); set('order', '-step'); set('colour', 'behavior');
        click('#rows summary');
        const pieces = [...document.querySelectorAll('.response span')];
        const colours = pieces.map(x => [x.textContent, x.style.background, x.title]);
        const said = document.querySelector('.detail p').innerText;
        set('colour', 'reference');
        const none = document.querySelector('.response small').innerText;
        click('.same');
        return [told, colours, said, none, found()];
    """
    told, colours, said, none, count = in_browser(page, tmp_path, script=HANDS + script)
    assert [int(text.split()[0]) for text in told] == [81, 2, 20, 40, 1]
    assert colours == [
        ["one ", "rgba(0, 114, 178, 0.1)", "0.30"],
        ["word40", "rgba(230, 120, 0, 0.7)", "-2.00"],
    ]
    assert "reward 0.400 · format 0.250" in said and "staleness 3" in said
    assert "Not known for each token" in none
    assert count == "28 of 81 responses · one prompt"


def test_hostile_texts_stay_texts(tmp_path):
    path = "<img src=x onerror=document.title=`hacked`>"
    records = [
        line(i, 0, prompt=text, answer=text, tokens=[text, "end"], parts={text: 1.0})
        for i, text in enumerate(HOSTILE)
    ]
    page = page_of(tmp_path, records, path)
    config = tmp_path / path / "config.json"
    told = read_json(config)
    told["config"] |= {"name": HOSTILE[0], "task": {text: text for text in HOSTILE[:20]}}
    write_json(config, told)
    page.write_text(render(load_run(config.parent), {}), encoding="utf-8")
    text = page.read_text(encoding="utf-8")
    assert text.count("<script") == 2 and "<img src=x" not in text and str(escape(path)) in text
    script = """
        const seen = [];
        set('order', 'step'); click('#more');
        for (const item of [...document.querySelectorAll('#rows summary')].keys()) {
          document.querySelectorAll('#rows summary')[item].click();
          const [prompt, response] = document.querySelectorAll('#rows details[open] pre');
          seen.push([prompt.textContent, response.firstChild.textContent]);
          document.querySelectorAll('#rows summary')[item].click();
        }
        const made = document.querySelectorAll(
          'main img, #rows script, #rows style, iframe, svg, link, base, plaintext, a');
        return [seen, made.length, document.title.includes('hacked'), document.scripts.length];
    """
    seen, made, title_hacked, scripts = in_browser(page, tmp_path, script=HANDS + script)
    assert seen == [[shown(text), shown(text)] for text in HOSTILE]
    assert made == 0 and scripts == 3  # the data, the page's script and that of this test
    assert not title_hacked or "hacked" in HOSTILE[0]
