# SPDX-License-Identifier: Apache-2.0
"""The recipes of docs/extend.md, carried out in a copy of the package as a reader would."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.usefixtures("compiled_once")
PAGE = (ROOT / "docs" / "extend.md").read_text()
RECIPES = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.M | re.S))
RECIPES = {title: text for title, text in RECIPES.items() if "```" in text}


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
@pytest.mark.parametrize("title", RECIPES)
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
