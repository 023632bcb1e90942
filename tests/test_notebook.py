# SPDX-License-Identifier: Apache-2.0
"""The notebook of a first run works as it is written, and shows a real run where it is read."""

import json
from pathlib import Path

import pytest
from test_api import python

import tba_jax

NOTEBOOK = Path(__file__).parents[1] / "docs" / "first_run.ipynb"
CELLS = [x for x in json.loads(NOTEBOOK.read_text())["cells"] if x["cell_type"] == "code"]
LONG = "num_steps=150"
SHORT = 'num_steps=3, batch={"num_prompts": 4}, task={"num_eval_prompts": 16}'


# test_api.py calls the same functions.
@pytest.mark.slow
def test_the_cells_run_in_order(compiled_once, tmp_path):
    code = "\n".join("".join(cell["source"]) for cell in CELLS)
    assert code.count(LONG) == 1
    assert "before" in python(code.replace(LONG, SHORT), tmp_path)
    assert len(tba_jax.load_run(tmp_path / "runs" / "first_run").metrics) >= 3


def test_the_file_shows_outputs_and_no_folder_of_the_machine_that_made_it():
    shown = [cell["id"] for cell in CELLS if "image/png" in json.dumps(cell["outputs"])]
    assert shown == ["accuracy", "habits"]
    text = NOTEBOOK.read_text()
    assert str(NOTEBOOK.parents[1]) not in text and "/tmp/" not in text and len(text) < 500_000
