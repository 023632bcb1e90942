# SPDX-License-Identifier: Apache-2.0
import html.parser
import json
import re

import pytest
from fake_workdir import fake_workdir

from tba_jax.commands.entry_point import run_command
from tba_jax.commands.report import main
from tba_jax.report import build as report
from tba_jax.report.page import ledger_sentence, render
from tba_jax.report.words import shown
from tba_jax.storage.whole_files import write_json

VOID = {"meta", "img", "source", "br", "hr"}
NAMES = {"accuracy", "reward", "habits", "staleness", "optimisation", "by_staleness"}


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
    page = report.build_report(workdir)
    return workdir, page.read_text(encoding="utf-8")


def built(tmp_path, **options):
    fake_workdir(tmp_path, num_steps=40, **options)
    return Page(report.build_report(tmp_path).read_text(encoding="utf-8"))


def test_skipped_prompts_are_reported_and_worked_solutions_are_folded(tmp_path):
    fake_workdir(tmp_path, num_steps=4)
    told = json.loads((tmp_path / "report.json").read_text())
    assert "skipped as" not in Page(report.build_report(tmp_path).read_text()).text
    told["skipped_prompts"] = {"train": 3, "eval": 6}
    told["samples"][0]["answer"] = "3 + 6 = <<3+6=9>>9 eggs\n#### 9"
    write_json(tmp_path / "report.json", told)
    page = report.build_report(tmp_path).read_text()
    assert "Prompts skipped as too long: train 3, eval 6." in Page(page).text
    assert (
        "<details><summary>answer: #### 9</summary>"
        "<pre>3 + 6 = &lt;&lt;3+6=9&gt;&gt;9 eggs\n#### 9</pre></details>" in page
    )
    assert page.count("<summary>answer") == 1 and "<small>answer: 16</small>" in page


def test_a_value_of_another_type_is_refused_in_one_line(tmp_path):
    fake_workdir(tmp_path, num_steps=4)
    facts = json.loads((tmp_path / "report.json").read_text())
    write_json(tmp_path / "report.json", {**facts, "wall_s": "long"})
    with pytest.raises(ValueError, match=r"or a log has a value of a wrong"):
        render(report.load_run(tmp_path), {})


def test_page_is_one_valid_file_that_fetches_nothing(full):
    _, text = full
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>\n<html lang=")
    assert "://" not in text and "@import" not in text and "url(" not in text
    policy = next(attrs["content"] for _, attrs in page.tags if "content" in attrs)
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    assert "unsafe" not in policy and not any("style" in attrs for _, attrs in page.tags)
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"link", "iframe", "object", "base"}
    for tag, attributes in page.tags:
        for name in ("src", "srcset", "href"):
            assert attributes.get(name, "data:image/png;base64,").startswith("data:image/png")
        if tag == "img":
            assert attributes["alt"]
    assert sum(tag == "img" for tag, _ in page.tags) == len(NAMES)


def test_headline_and_key_figures(full):
    workdir, text = full
    page, told = Page(text), json.loads((workdir / "report.json").read_text())
    before, after = (100 * told["eval"][when]["pass_at_1"] for when in ("before", "after"))
    assert f"pass@1 {before:.1f} % → {after:.1f} % in 5" in page.text
    assert f"{after - before:+.1f} points on 512 held-out problems" in page.text
    assert "40 steps of asynchronous training" in page.text and "2 CPU cores" in page.text
    assert "to the first training step 10 s" in page.text
    assert "objective.beta 0.1 → 0.05" in page.text
    assert "not finished" not in page.text


def test_model_texts_are_escaped_and_control_characters_shown(full):
    _, text = full
    assert "&lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt; &amp; &lt;b&gt;11" in text
    assert "\x1b" not in text and "The answer" not in text and "is 8.\\x1b[0m" in text
    assert shown("naïve 👩‍🔬 \ud800\x00\n<") == "naïve 👩‍🔬 \\ud800\\x00\n<"
    assert shown("a\u202egnp.exe\u2066\u061c") == "a\\u202egnp.exe\\u2066\\u061c"


def test_samples_are_marked_right_and_wrong(full):
    marks = re.findall(r'class="mark ?(\w*)"', full[1])
    assert marks == ["wrong", "right", "right", "right", "wrong", "wrong", "", "right"]
    assert "1 right before training, 3 after" in Page(full[1]).text


def test_another_headline_and_the_decoding_are_named(tmp_path):
    sampled = {"eval.temperature": 0.7, "eval.num_samples": 4}
    page = built(tmp_path / "win", metric="win_rate", changes=sampled).text
    told = json.loads((tmp_path / "win" / "report.json").read_text())["eval"]
    before, after = (100 * told[when]["win_rate"] for when in ("before", "after"))
    assert f"win rate {before:.1f} % → {after:.1f} % in" in page
    assert "4 responses each at temperature 0.7. 40 steps" in page
    assert re.search(r"mean reward 0\.\d\d before training, 0\.\d\d after\.", page)
    assert "pass@1" not in page and "✓" not in page and "Accuracy" not in page
    assert "reward 1.00" in page
    page = built(tmp_path / "reward", metric="reward_mean").text
    assert "reward mean 0.4" in page and "greedy decoding" in page and "points" not in page


def test_ledger_adds_up_or_says_so(full):
    text = Page(full[1]).text
    assert "12,000 responses were sampled: 8,855 were stored in the replay buffer, 128" in text
    assert "14 were rejected (reward timeout)" in text and "short of" not in text
    ledger = {"generated": 100, "stored": 60, "evicted_bytes": 30, "rejected": {"reward_nan": 5}}
    assert "These numbers are +5 short of what was sampled." in ledger_sentence(ledger, {})


def test_interrupted_run_says_so_and_shows_what_there_is(tmp_path):
    page = built(tmp_path, made_steps=25, report=False)
    assert "This run is not finished: 25 of 40 steps." in page.text
    assert "after 20 of 40 steps" in page.text
    assert "answers appear when" in page.text
    assert (tmp_path / "plots" / "accuracy.png").exists()


def test_a_page_is_not_replaced_by_one_with_fewer_steps(tmp_path, capsys):
    run = tmp_path / "run"
    fake_workdir(run, num_steps=4)
    assert main([str(run)]) == 0
    page, metrics = (run / "report.html").read_bytes(), run / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:3]))
    capsys.readouterr()
    assert run_command(lambda: main([str(run)])) == 2
    line = capsys.readouterr().err
    assert (
        "before step 4 of report.json: lines are missing" in line and "report.html is kept" in line
    )
    assert (run / "report.html").read_bytes() == page


def test_command_reports_and_refuses(tmp_path, capsys):
    fake_workdir(tmp_path / "run", num_steps=4)
    assert main([str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "run" / "report.html")
    assert run_command(lambda: main([str(tmp_path / "nothing")])) == 2
    assert "nothing holds no run: there is no" in capsys.readouterr().err
    (tmp_path / "run" / "report.json").write_text("{")
    assert run_command(lambda: main([str(tmp_path / "run")])) == 2
    assert "report.json is damaged (Expecting" in capsys.readouterr().err


def test_the_page_reports_the_use_of_generated_responses(full):
    text = Page(full[1]).text
    assert "The trainer used 62.0 % of the groups while they were new" in text
    assert "mean length rank of the trained responses is 0.41 (0.5 is unbiased)" in text
    assert "of the batch slots used the newest data." in text
    assert "Only 62% of the merged groups have been trained on: use <less>." in text
