# SPDX-License-Identifier: Apache-2.0
import html
import json
import re

import pytest
from fake_workdir import fake_workdir

from tba_jax.commands.entry_point import run_command
from tba_jax.commands.report import main
from tba_jax.report.build import write_report
from tba_jax.report.files import load_run
from tba_jax.report.page import ledger_sentence, render
from tba_jax.report.words import shown
from tba_jax.storage.whole_files import read_json, write_json


def words(page):
    """Visible text of a page."""
    page = re.sub(r"(?s)<(style|script)\b.*?</\1>|<[^>]*>", " ", page)
    return " ".join(html.unescape(page).split())


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("full")
    fake_workdir(workdir, num_steps=40)
    report = read_json(workdir / "report.json")
    report["skipped_prompts"] = {"train": 3, "eval": 6}
    report["samples"][0]["answer"] = "3 + 6 = <<3+6=9>>9 eggs\n#### 9"
    write_json(workdir / "report.json", report)
    return workdir, write_report(load_run(workdir)).read_text(encoding="utf-8")


def test_page_is_one_file_that_fetches_nothing(full):
    _, text = full
    assert "://" not in text and "@import" not in text and "url(" not in text
    (policy,) = re.findall('content="(default-src[^"]*)"', text)
    wanted = "default-src 'none'; img-src data:; style-src 'sha256-"
    assert html.unescape(policy).startswith(wanted)
    assert "unsafe" not in policy and not re.search("<[^>]* style=", text)
    assert not re.search("<(link|iframe|object|base)", text)
    images = re.findall("<img [^>]*>", text)
    assert len(images) == 6 and all('alt="' in image for image in images)


def test_headline_key_figures_and_ledger(full):
    workdir, text = full
    page, told = words(text), json.loads((workdir / "report.json").read_text())
    before, after = (100 * told["eval"][when]["pass_at_1"] for when in ("before", "after"))
    for part in (
        f"pass@1 {before:.1f}% → {after:.1f}% in 0:5",
        f"{after - before:+.1f} points on 512 held-out problems",
        "40 steps of asynchronous training. Prompts skipped as too long: train 3, eval 6. On 2 CPU",
        "objective.beta 0.1 → 0.05",
        "12,000 responses were sampled: 8,855 were stored in the replay buffer, 128",
        "14 were rejected (reward timeout)",
        "Only 62% of the merged groups have been trained on: use <less>.",
        "1 right before training, 3 after",
    ):
        assert part in page, part
    assert "not finished" not in page and "minus their sum" not in page
    marks = re.findall(r'class="mark ?(\w*)"', text)
    assert marks == ["wrong", "right", "right", "right", "wrong", "wrong", "", "right"]
    assert "answer: #### 9</summary><pre>3 + 6 = &lt;&lt;3+6=9&gt;&gt;9 eggs\n#### 9</pre>" in text
    ledger = {"generated": 100, "stored": 60, "evicted_bytes": 30, "rejected": {"reward_nan": 5}}
    assert "The number of sampled responses minus their sum is +5." in ledger_sentence(ledger)


def test_model_texts_are_escaped_and_control_characters_shown(full):
    _, text = full
    assert "&lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt; &amp; &lt;b&gt;11" in text
    assert "\x1b" not in text and "The answer" not in text and "is 8.\\x1b[0m" in text
    assert shown("naïve 👩‍🔬 \ud800\x00\n<") == "naïve 👩‍🔬 \\ud800\\x00\n<"
    assert shown("a\u202egnp.exe\u2066\u061c") == "a\\u202egnp.exe\\u2066\\u061c"


def test_another_headline_and_the_decoding_are_named(tmp_path):
    sampled = {"eval.temperature": 0.7, "eval.num_samples": 4}
    fake_workdir(tmp_path, num_steps=40, metric="win_rate", changes=sampled)
    page = words(render(load_run(tmp_path), {}))
    told = json.loads((tmp_path / "report.json").read_text())["eval"]
    before, after = (100 * told[when]["win_rate"] for when in ("before", "after"))
    assert f"win rate {before:.1f}% → {after:.1f}% in" in page
    assert "4 responses each at temperature 0.7. 40 steps" in page
    assert re.search(r"mean reward 0\.\d\d before training, 0\.\d\d after\.", page)
    assert "pass@1" not in page and "✓" not in page


def test_interrupted_run_says_so_and_shows_what_there_is(tmp_path):
    fake_workdir(tmp_path, num_steps=40, made_steps=25, report=False)
    page = words(render(load_run(tmp_path), {}))
    assert "This run is not finished: 25 of 40 steps." in page and "after 20 of 40 steps" in page


def test_a_page_is_not_replaced_by_one_with_fewer_steps(tmp_path, capsys):
    fake_workdir(tmp_path, num_steps=4)
    page, metrics = tmp_path / "report.html", tmp_path / "metrics.jsonl"
    page.write_text("the page of four steps")
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:3]))
    assert run_command(lambda: main([str(tmp_path)])) == 2
    assert "before step 4 of report.json: lines are missing" in capsys.readouterr().err
    assert page.read_text() == "the page of four steps"


def test_what_is_no_run_or_damaged_is_refused_in_one_line(tmp_path, capsys):
    assert run_command(lambda: main([str(tmp_path / "nothing")])) == 2
    assert "nothing holds no run: there is no" in capsys.readouterr().err
    theirs = dict.fromkeys(("report.html", "metrics.jsonl"), "of another program")
    for name, text in theirs.items():
        (tmp_path / name).write_text(text)
    assert run_command(lambda: main([str(tmp_path)])) == 2
    assert {x.name: x.read_text() for x in tmp_path.iterdir()} == theirs
    fake_workdir(tmp_path, num_steps=4)
    report = tmp_path / "report.json"
    write_json(report, {**json.loads(report.read_text()), "economy": 3})
    with pytest.raises(ValueError, match=r"or a log has a value of a wrong"):
        render(load_run(tmp_path), {})
    report.write_text("{")
    assert run_command(lambda: main([str(tmp_path)])) == 2
    assert "report.json is damaged (Expecting" in capsys.readouterr().err
