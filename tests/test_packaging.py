# SPDX-License-Identifier: Apache-2.0
"""What an installed package needs beyond its modules, and what pip can find of it."""

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_a_wheel_holds_the_package_whole_and_nothing_else(tmp_path):
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tba_jax", source / "tba_jax", ignore=ignored)
    only_in_checkouts = ("tba_jax/bench/", "tba_jax/studies/")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    files = {str(p.relative_to(source)) for p in (source / "tba_jax").rglob("*") if p.is_file()}
    subprocess.run(
        [sys.executable, "-c", "from setuptools import build_meta as b; b.build_wheel('..')"],
        cwd=source,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    held = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert held == {name for name in files if not name.startswith(only_in_checkouts)}
    assert {"tba_jax/presets/math.py", "tba_jax/assets/start_model/model.safetensors"} < held


def normal(name):
    return re.split(r"[\[<>=]", name)[0].lower().replace("_", "-")


def test_every_import_is_declared_and_none_is_torch():
    """Of what only an extra brings, the import names an extra's distribution."""
    extras = PROJECT["project"]["optional-dependencies"]
    texts = [*PROJECT["project"]["dependencies"], *(x for names in extras.values() for x in names)]
    declared = {normal(text) for text in texts} - {"torch"}
    sources = importlib.metadata.packages_distributions()
    undeclared = {}
    for path in (ROOT / "tba_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in {n.split(".")[0] for n in names} - {*sys.stdlib_module_names, "tba_jax"}:
                if declared.isdisjoint(map(normal, sources.get(name, [name]))):
                    undeclared[name] = str(path.relative_to(ROOT))
    assert undeclared == {}


def test_extras_that_are_named_exist_under_a_name_that_every_pip_finds():
    extras = set(PROJECT["project"]["optional-dependencies"])
    # pip 23.2 compares what a user asks for with the normalised name, as it was typed.
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", extra) for extra in extras)
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "launch").glob("*.sh")]
    text = "".join(path.read_text() for path in [*files, *(ROOT / "tba_jax").rglob("*.py")])
    found = re.findall(r"(?:tba_jax|'\.)\[([\w,-]+)\]", text)
    assert (
        {"hub", "math", "cuda", "tpu"} <= {x for names in found for x in names.split(",")} <= extras
    )
