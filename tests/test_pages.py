# SPDX-License-Identifier: Apache-2.0
"""Pages that are programs: the algorithm, the notebook, and the recipes of extend.md."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fake_batches import slow
from test_api import python

import tba_jax

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture
def page():
    spec = importlib.util.spec_from_file_location("one_page", ROOT / "docs" / "one_page.py")
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    return page


@pytest.mark.slow
def test_the_page_learns(page):
    means = page.train("embedded:start_model", num_steps=20)
    # The start model answers 40 % of the problems; untrained, the means stay within 0.09 of that
    # (two standard errors of 128 responses).
    assert sum(means[-3:]) / 3 > means[0] + 0.15


def test_the_page_runs_on_rows_and_a_reward_of_the_user(page, tmp_path, monkeypatch, capsys):
    rows = [{"prompt": f"{x}+1=", "wanted": str(x + 1)} for x in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "mine.py").write_text(
        "def score(prompts, completions, wanted):\n"
        "    assert len(prompts) == len(wanted) and prompts[-1] == '0+1='\n"  # 16 of three rows
        "    return [2.0 for _ in completions]\n"
    )
    given = [f"--data={tmp_path}/rows.jsonl", f"--reward={tmp_path}/mine.py:score", "--steps=2"]
    monkeypatch.setattr(sys, "argv", ["one_page.py", *given])
    page.main()
    assert capsys.readouterr().out == "step   0  reward 2.000\n"


# test_api.py calls the same functions.
@pytest.mark.slow
def test_the_cells_of_the_notebook_run_in_order(tmp_path):
    cells = json.loads((ROOT / "docs" / "first_run.ipynb").read_text())["cells"]
    code = "\n".join("".join(x["source"]) for x in cells if x["cell_type"] == "code")
    long, short = "num_steps=60", 'num_steps=3, task={"num_eval_prompts": 16}'
    assert code.count(long) == 1 and "before" in python(code.replace(long, short), tmp_path)
    assert len(tba_jax.load_run(tmp_path / "runs" / "first_run").metrics) >= 3


SECTIONS = re.findall(
    r"^## (.+?)\n(.*?)(?=^## |\Z)", (ROOT / "docs" / "extend.md").read_text(), flags=re.M | re.S
)
RECIPES = {title: text for title, text in SECTIONS if "```" in text}


def steps(text):
    """(kind, path or "", contents) of each block: new files, edits, commands."""
    for language, body in re.findall(r"^```(\w+)\n(.*?)^```", text, flags=re.M | re.S):
        head, _, rest = body.partition("\n")
        if language == "diff":
            yield "edit", head.removeprefix("--- "), rest
        elif re.fullmatch(r"# \S+\.py", head):
            yield "file", head.removeprefix("# "), rest
        else:
            yield language, "", body


def edited(source, change):
    """A source after a change that is written as a diff without line numbers."""
    lines = [(line[:1], line[1:]) for line in change.splitlines()]
    old = "".join(f"{text}\n" for sign, text in lines if sign != "+")
    new = "".join(f"{text}\n" for sign, text in lines if sign != "-")
    assert source.count(old) == 1, f"want these lines once, found {source.count(old)}:\n{old}"
    return source.replace(old, new)


@pytest.fixture
def copy(tmp_path):
    ignored = shutil.ignore_patterns("__pycache__", "bench", "studies")
    shutil.copytree(ROOT / "tba_jax", tmp_path / "tba_jax", ignore=ignored)
    return tmp_path


@pytest.mark.timeout(600)  # the objective trains; on a busy machine that takes minutes
@pytest.mark.parametrize("title", [x if x == "A reward" else slow(x) for x in RECIPES])
def test_recipe_works(title, copy):
    ran = 0
    for kind, path, text in steps(RECIPES[title]):
        if kind == "edit":
            source = (copy / path).read_text()
            (copy / path).write_text(edited(source, text))
        elif kind == "file":
            assert not (copy / path).exists(), f"{path} is there already"
            (copy / path).write_text(text)
        else:
            command = [sys.executable, "-c", text] if kind == "python" else ["bash", "-euc", text]
            folders = [str(Path(sys.executable).parent), os.environ["PATH"]]
            env = {**os.environ, "PYTHONPATH": str(copy), "PATH": os.pathsep.join(folders)}
            done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
            assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            ran += 1
    assert ran, "a recipe ends with something that is run"
