# SPDX-License-Identifier: Apache-2.0
import html.parser
import json
import re

import pytest
from fake_workdir import fake_workdir

from tba_jax.commands.entry_point import run_command
from tba_jax.commands.report import main
from tba_jax.report.build import build_report
from tba_jax.report.files import load_run
from tba_jax.report.page import ledger_sentence, render
from tba_jax.report.words import shown
from tba_jax.storage.whole_files import read_json, write_json

VOID = {"meta", "img", "source", "br", "hr"}


class Page(html.parser.HTMLParser):
    """Checks nesting and collects the tags and the visible text of a page."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).replace("\N{NO-BREAK SPACE}", " ").split())


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("full")
    fake_workdir(workdir, num_steps=40)
    report = read_json(workdir / "report.json")
    report["skipped_prompts"] = {"train": 3, "eval": 6}
    report["samples"][0]["answer"] = "3 + 6 = <<3+6=9>>9 eggs\n#### 9"
    write_json(workdir / "report.json", report)
    return workdir, build_report(workdir).read_text(encoding="utf-8")


def built(tmp_path, **options):
    fake_workdir(tmp_path, num_steps=40, **options)
    return Page(build_report(tmp_path).read_text(encoding="utf-8")).text


def test_page_is_one_valid_file_that_fetches_nothing(full):
    _, text = full
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>\n<html lang=")
    assert "://" not in text and "@import" not in text and "url(" not in text
    policy = next(attrs["content"] for _, attrs in page.tags if "content" in attrs)
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    assert "unsafe" not in policy and not any("style" in attrs for _, attrs in page.tags)
    assert not {tag for tag, _ in page.tags} & {"link", "iframe", "object", "base"}
    for tag, attributes in page.tags:
        for name in ("src", "srcset", "href"):
            assert attributes.get(name, "data:image/png;base64,").startswith("data:image/png")
        if tag == "img":
            assert attributes["alt"]
    assert sum(tag == "img" for tag, _ in page.tags) == 6


def test_headline_key_figures_and_ledger(full):
    workdir, text = full
    page, told = Page(text).text, json.loads((workdir / "report.json").read_text())
    before, after = (100 * told["eval"][when]["pass_at_1"] for when in ("before", "after"))
    for part in (
        f"pass@1 {before:.1f} % → {after:.1f} % in 5",
        f"{after - before:+.1f} points on 512 held-out problems",
        "40 steps of asynchronous training. Prompts skipped as too long: train 3, eval 6. On 2 CPU",
        "to the first training step 10 s",
        "objective.beta 0.1 → 0.05",
        "12,000 responses were sampled: 8,855 were stored in the replay buffer, 128",
        "14 were rejected (reward timeout)",
        "The trainer used 62.0 % of the groups while they were new",
        "Only 62% of the merged groups have been trained on: use <less>.",
        "1 right before training, 3 after",
    ):
        assert part in page, part
    assert "not finished" not in page and "short of" not in page
    marks = re.findall(r'class="mark ?(\w*)"', text)
    assert marks == ["wrong", "right", "right", "right", "wrong", "wrong", "", "right"]
    assert (
        "<details><summary>answer: #### 9</summary>"
        "<pre>3 + 6 = &lt;&lt;3+6=9&gt;&gt;9 eggs\n#### 9</pre></details>" in text
    )
    ledger = {"generated": 100, "stored": 60, "evicted_bytes": 30, "rejected": {"reward_nan": 5}}
    assert "These numbers are +5 short of what was sampled." in ledger_sentence(ledger)


def test_model_texts_are_escaped_and_control_characters_shown(full):
    _, text = full
    assert "&lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt; &amp; &lt;b&gt;11" in text
    assert "\x1b" not in text and "The answer" not in text and "is 8.\\x1b[0m" in text
    assert shown("naïve 👩‍🔬 \ud800\x00\n<") == "naïve 👩‍🔬 \\ud800\\x00\n<"
    assert shown("a\u202egnp.exe\u2066\u061c") == "a\\u202egnp.exe\\u2066\\u061c"


def test_another_headline_and_the_decoding_are_named(tmp_path):
    sampled = {"eval.temperature": 0.7, "eval.num_samples": 4}
    page = built(tmp_path / "win", metric="win_rate", changes=sampled)
    told = json.loads((tmp_path / "win" / "report.json").read_text())["eval"]
    before, after = (100 * told[when]["win_rate"] for when in ("before", "after"))
    assert f"win rate {before:.1f} % → {after:.1f} % in" in page
    assert "4 responses each at temperature 0.7. 40 steps" in page
    assert re.search(r"mean reward 0\.\d\d before training, 0\.\d\d after\.", page)
    assert "pass@1" not in page and "✓" not in page and "Accuracy" not in page
    page = built(tmp_path / "reward", metric="reward_mean")
    assert "reward mean 0.4" in page and "greedy decoding" in page and "points" not in page


def test_interrupted_run_says_so_and_shows_what_there_is(tmp_path):
    page = built(tmp_path, made_steps=25, report=False)
    assert "This run is not finished: 25 of 40 steps." in page
    assert "after 20 of 40 steps" in page and "answers appear when" in page
    assert (tmp_path / "plots" / "accuracy.png").exists()


def test_a_page_is_not_replaced_by_one_with_fewer_steps(tmp_path, capsys):
    run = tmp_path / "run"
    fake_workdir(run, num_steps=4)
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(run / "report.html")
    page, metrics = (run / "report.html").read_bytes(), run / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:3]))
    assert run_command(lambda: main([str(run)])) == 2
    line = capsys.readouterr().err
    assert "before step 4 of report.json: lines are missing" in line
    assert "report.html is kept" in line and (run / "report.html").read_bytes() == page


def test_what_is_no_run_or_damaged_is_refused_in_one_line(tmp_path, capsys):
    assert run_command(lambda: main([str(tmp_path / "nothing")])) == 2
    assert "nothing holds no run: there is no" in capsys.readouterr().err
    fake_workdir(tmp_path, num_steps=4)
    report = tmp_path / "report.json"
    write_json(report, {**json.loads(report.read_text()), "economy": 3})
    with pytest.raises(ValueError, match=r"or a log has a value of a wrong"):
        render(load_run(tmp_path), {})
    report.write_text("{")
    assert run_command(lambda: main([str(tmp_path)])) == 2
    assert "report.json is damaged (Expecting" in capsys.readouterr().err
