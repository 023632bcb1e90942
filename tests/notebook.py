# SPDX-License-Identifier: Apache-2.0
"""Runs the cells of a notebook in order, as Jupyter would, with nothing of Jupyter.

    python tests/notebook.py docs/first_run.ipynb    # and writes what the cells put out into it

Of outputs it knows what is printed, and the value of a cell's last expression as text or picture.
"""

import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path


def run_cell(source, names):
    """Outputs of one cell, as a notebook's file has them."""
    tree = ast.parse(source)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        if last is not None:
            value = eval(compile(last, "cell", "eval"), names)
    outputs = []
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_png_"):
            data["image/png"] = base64.b64encode(value._repr_png_()).decode()
        result = {"output_type": "execute_result", "data": data, "metadata": {}}
        outputs.append(result)
    return outputs


def run_notebook(notebook, change=lambda source: source):
    """Run all cells in one namespace; fills in their outputs.

    Args:
        notebook: contents of the file.
        change: what is run in place of a cell's source.
    """
    names = {"__name__": "__main__"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for count, cell in enumerate(code, start=1):
        cell["outputs"] = run_cell(change("".join(cell["source"])), names)
        cell["execution_count"] = count
        for output in cell["outputs"]:
            if output["output_type"] == "execute_result":
                output["execution_count"] = count


if __name__ == "__main__":
    path = Path(sys.argv[1]).resolve()
    contents = json.loads(path.read_text())
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        run_notebook(contents)
    path.write_text(json.dumps(contents, indent=1, ensure_ascii=False) + "\n")
