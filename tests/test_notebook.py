# SPDX-License-Identifier: Apache-2.0
"""The notebook of a first run works as it is written, and shows a real run where it is read."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tba_jax

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "first_run.ipynb"
LONG = 'load_config("math", num_steps=150)'
SHORT = (
    'load_config("math", num_steps=3, batch={"num_prompts": 4}, '
    'task={"num_eval_prompts": 16}, eval={"period": 1})'
)
RUN = """
import json, sys
from notebook import run_notebook
contents = json.load(open(sys.argv[1]))
run_notebook(contents, lambda source: source.replace(sys.argv[2], sys.argv[3]))
json.dump(contents, open("ran.ipynb", "w"))
"""


def outputs(contents):
    """Cell -> the kinds of its outputs."""
    cells = [cell for cell in contents["cells"] if cell["cell_type"] == "code"]
    return {c["id"]: [kind for o in c["outputs"] for kind in o.get("data", o)] for c in cells}


# test_api.py calls the same functions.
@pytest.mark.slow
def test_the_cells_run_in_order_and_put_out_what_is_shown(compiled_once, tmp_path):
    contents = json.loads(NOTEBOOK.read_text())
    assert sum("".join(cell["source"]).count(LONG) for cell in contents["cells"]) == 1
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(NOTEBOOK), LONG, SHORT],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    ran = json.loads((tmp_path / "ran.ipynb").read_text())
    assert outputs(ran) == outputs(contents)
    pictures = [cell for cell, kinds in outputs(contents).items() if "image/png" in kinds]
    assert pictures == ["accuracy", "habits"]
    assert len(tba_jax.load_run(tmp_path / "runs" / "first_run").metrics) >= 3


def test_the_file_names_no_folder_of_the_machine_that_made_it():
    text = NOTEBOOK.read_text()
    assert str(ROOT) not in text and "/tmp/" not in text and len(text) < 500_000
