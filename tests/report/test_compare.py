# SPDX-License-Identifier: Apache-2.0
import json
import re

import pytest
from browser import in_browser
from fake_workdir import fake_workdir

from tba_jax.commands.compare import main
from tba_jax.report import groups
from tba_jax.report.files import load_run
from tba_jax.storage.whole_files import read_json, write_json

HOSTILE = ("<script>document.title='hacked'</script>", '"><img src=x onerror="document.title=1">')


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    """Two objectives with three seeds; the last run is in progress; logs end in half a line."""
    folder = tmp_path_factory.mktemp("six")
    for number in range(6):
        name, seed = ("tb", "grpo")[number // 3], number % 3
        workdir = folder / f"{name}<b>{seed}"
        is_over = number < 5
        fake_workdir(workdir, num_steps=20, made_steps=20 if is_over else 9, report=is_over)
        told = read_json(workdir / "config.json")
        told["config"] |= {"seed": seed, "objective": {"name": name, "beta": 0.1 * number // 3}}
        told["config"] |= {"task": {"data_path": HOSTILE[1]}} if name == "tb" else {}
        write_json(workdir / "config.json", told)
        with open(workdir / "metrics.jsonl", "a") as log:
            if is_over:
                last = {"step": 20, "eval/n": 9, "eval/pass_at_1": 0.5 + 0.1 * seed}
                log.write(json.dumps(last) + "\n")
                report = read_json(workdir / "report.json")
                report["samples"][0] |= {"prompt": HOSTILE[0], "after": f"{HOSTILE[1]} seed {seed}"}
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
    assert "60.0\N{NO-BREAK SPACE}% [43.1, 76.9]" in text
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
    assert told == [["step"], ["tokens"], "6 runs in 2 groups · compare", HOSTILE[0]]
