# SPDX-License-Identifier: Apache-2.0
"""docs/one_page.py runs, learns, and is what it says: one page without `run/`."""

import ast
import importlib.util
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "one_page.py"


def test_the_page_learns():
    spec = importlib.util.spec_from_file_location("one_page", PAGE)
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    means = page.train("embedded:start_model", num_steps=20)
    # The start model answers 40 % of the problems; untrained, the means stay within 0.09 of that
    # (two standard errors of 128 responses).
    assert sum(means[-3:]) / 3 > means[0] + 0.15


def test_the_page_is_one_page_and_stands_on_parts_alone():
    text = PAGE.read_text()
    assert len(text.splitlines()) <= 200
    modules = {
        node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)
    }
    ours = {name.split(".")[1] for name in modules if name and name.startswith("tba_jax.")}
    assert ours <= {"decoding", "flow", "models", "tasks", "train"}
