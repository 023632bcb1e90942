# SPDX-License-Identifier: Apache-2.0
"""The page of a comparison, and the sample browser of a page, in Chromium."""

import html
import itertools
import json
import re
import shutil
import subprocess

import pytest
from fake_workdir import fake_workdir
from markupsafe import escape

from tba_jax.commands.compare import main
from tba_jax.report import groups
from tba_jax.report.files import load_run
from tba_jax.report.page import render
from tba_jax.report.words import shown
from tba_jax.storage.whole_files import read_json, write_json

MARKUP = ("<script>document.title='hacked'</script>", '"><img src=x onerror="document.title=1">')


def in_browser(page, folder, *, script: str):
    """Open a page without a window; return the value of `script`.

    Args:
        page: file of the page, which is opened as a copy that has `script` and no security policy,
            so that the escaping of texts is all that protects it.
        folder: for the browser's files.
        script: body of a JavaScript function; what it returns is read back.
    """
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("chromium is not installed (apt-get install chromium)")
    text = page.read_text(encoding="utf-8")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    called = (
        f"<script>const told = (() => {{{script}}})();"
        "document.documentElement.setAttribute('data-told', JSON.stringify(told));</script>"
    )
    opened = folder / "opened.html"
    opened.write_text(text.replace("</body>", called + "</body>"), encoding="utf-8")
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={folder / 'browser'}", "--virtual-time-budget=8000", "--dump-dom"]
    done = subprocess.run(
        [*command, opened.as_uri()], capture_output=True, text=True, timeout=300, check=True
    )
    found = re.search(r'data-told="([^"]*)"', done.stdout)
    assert found is not None, done.stdout[:2000]
    return json.loads(html.unescape(found[1]))


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    """Two objectives with three seeds; the last run is in progress; logs end in half a line."""
    folder = tmp_path_factory.mktemp("six")
    for number in range(6):
        name, seed = ("tb", "grpo")[number // 3], number % 3
        workdir = folder / f"{name}<b>{seed}"
        is_over = number < 5
        changes = {"seed": seed, "objective": {"name": name, "beta": 0.1 * number // 3}}
        changes |= {"task": {"data_path": MARKUP[1]}} if name == "tb" else {}
        steps = {"num_steps": 20, "made_steps": 20 if is_over else 9}
        fake_workdir(workdir, **steps, report=is_over, changes=changes)
        with open(workdir / "metrics.jsonl", "a") as log:
            if is_over:
                last = {"step": 20, "eval/n": 9, "eval/pass_at_1": 0.5 + 0.1 * seed}
                log.write(json.dumps(last) + "\n")
                report = read_json(workdir / "report.json")
                report["samples"][0] |= {"prompt": MARKUP[0], "after": f"{MARKUP[1]} seed {seed}"}
                write_json(workdir / "report.json", report)
            log.write('{"step": 10, "time_s"')
    out = folder / "out" / "compare.html"
    assert main([*map(str, sorted(folder.glob("*[0-9]"))), f"--out={out}"]) == 0
    return folder, out


def test_a_comparison_has_groups_intervals_differences_and_responses(six):
    folder, out = six
    text = out.read_text(encoding="utf-8")
    assert "6 runs in 2 groups" in text and "1 of 6 runs are not finished" in text
    assert "objective.name=tb" in text and "objective.name=grpo" in text
    # Student's interval of .5, .6, .7 with two degrees of freedom: 2.92 x .1 / sqrt(3).
    assert "60.0% [43.1, 76.9]" in text
    assert "9–20 of 20<br><small>1 unfinished</small>" in text and "seed 2" in text
    assert not re.search(r"<script|<img src=x|<b>\d|https?://|@import", text)
    with pytest.raises(ValueError, match="--group=objective.nam: no config of these runs"):
        groups.group_runs([load_run(folder) for folder in folder.glob("*[0-9]")], ["objective.nam"])


def test_the_axis_is_chosen_and_no_text_runs_as_a_script(six, tmp_path):
    told = in_browser(
        six[1],
        tmp_path,
        script="""
        const seen = () => ['step', 'tokens', 'time'].filter(
            axis => document.querySelector('div.by_' + axis).offsetHeight > 100);
        const before = seen();
        document.querySelector('label[for=by_tokens]').click();
        return [before, seen(), document.title, document.querySelector('.beside pre').innerText]
        """,
    )
    assert told == [["step"], ["tokens"], "6 runs in 2 groups · compare", MARKUP[0]]


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


# Texts that try to become tags, scripts or addresses of a page.
TAGS = (
    "<script>document.title='hacked'</script>",
    '"><img src=x onerror="document.title=`hacked`">',
    "'><svg onload=document.title='hacked'>",
    "</pre></div></main><iframe srcdoc='<script>parent.document.title=`hacked`</script>'>",
    "<style>*{display:none}</style>",
    "<base href=//hacked.example><link rel=stylesheet href=//hacked.example/x.css>",
    "</script><script>document.title='hacked'</script>",
    "<!--<script>",
    "{{document.title='hacked'}}${document.title='hacked'}",
    "&lt;b&gt;&amp;\\u003cscript\\u003e",
    "<details open ontoggle=document.title='hacked'>",
    "javascript:document.title='hacked'",
    "</title><script>document.title='hacked'</script>",
    "<a href=javascript:alert(1) id=browser name=data>x</a>",
    "<form id=samples><input name=rows>",
    "__proto__",
    "]]>--></textarea><plaintext>",
    "\x00\x1b[31m\u202egnp.exe\u2028\u2029",
    "\ud800<b>\udfff",
    "<ScRiPt\n>document.title='hacked'</sCrIpT\n>",
)
AROUND = ("{}", "a {} b", '" {}', "' {}", "</pre>{}", "-->{}", "`{}`", "\\{}", "{}\\", "\r\n{}")
HOSTILE = [around.replace("{}", tag) for tag, around in itertools.product(TAGS, AROUND)]
assert len(set(HOSTILE)) == 200


@pytest.mark.slow
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
