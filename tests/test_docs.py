# SPDX-License-Identifier: Apache-2.0
"""What pages and messages name exists: links, files, commands, settings and names in modules."""

import ast
import re
from pathlib import Path

import pytest

import tba_jax
from tba_jax.config.schema import SETTINGS
from tba_jax.train.objectives import own_names

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LAB = ROOT / "docs" / "lab"
SOURCES = [
    *(ROOT / "tba_jax").rglob("*.py"),
    *(ROOT / "configs").rglob("*.py"),
    *(ROOT / "launch").glob("*.sh"),
]
FOLDERS = ("tba_jax", "tests", "configs", "docs", "launch")
ROOMS = tuple(f"{path.name}/" for path in (ROOT / "tba_jax").iterdir() if path.is_dir())
FILES = [str(p.relative_to(ROOT)) for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")]
# Own settings of objectives, and `preset`, which is written out as the settings it stands for.
FIELDS = {*SETTINGS, "objective.preset", *(f"objective.{name}" for name in own_names())}


def prose(path):
    """A page without its fenced and indented code."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    return re.sub(r"^    .*$", "", text, flags=re.M)


def anchors(path):
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ +(.+)$", prose(path), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda x: x.stem)
def test_links_between_pages_resolve(path):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        file, _, heading = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if "://" not in file and (
            not there.exists() or (heading and heading not in anchors(there))
        ):
            broken.append(target)
    assert broken == []


def resolves(dotted):
    """Whether `tba_jax.x.y` is a module, or a name at the top level of one."""
    parts = dotted.split(".")
    for size in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:size])
        module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if size == len(parts) and (path.is_dir() or module.exists()):
            return True
        if module.exists():
            body = ast.parse(module.read_text()).body
            names = {x.asname or x.name for node in body for x in getattr(node, "names", ())}
            names |= {getattr(node, "name", None) for node in body}
            targets = [t for n in body for t in getattr(n, "targets", [getattr(n, "target", None)])]
            names |= {getattr(target, "id", None) for target in targets}
            return parts[size] in names | {*tba_jax.__all__}
    return False


def gone(text):
    """Files, modules, names in modules and settings in a text that the repository does not have."""
    found = []
    for name in re.findall(r"(?<![\w./])[\w/]+\.py\b", text):
        is_ours = name.split("/")[0] in FOLDERS or name.startswith(ROOMS)
        if is_ours and not any(f == name or f.endswith("/" + name) for f in FILES):
            found.append(name)
    for name in re.findall(r"(?<![\w./])((?:tba_jax|tests|docs)/[\w/]*\w)(?![\w.*{])", text):
        if not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists():
            found.append(name)
    for name in re.findall(r"--config\.([a-z_.]*[a-z_])(?![\w.{])", text):
        if name not in FIELDS:
            found.append(f"--config.{name}")
    found += [n for n in re.findall(r"\btba_jax(?:\.[A-Za-z_]\w*)+", text) if not resolves(n)]
    return [n for n in found if not re.search(r"\b[A-Z_]+\b", n)]  # NAME stands for any


@pytest.mark.parametrize("path", PAGES, ids=lambda x: x.stem)
def test_what_a_page_names_exists(path):
    text = path.read_text()
    # Recipes make their files (test_pages.py runs them); results keep old commands.
    if path.stem == "extend" or path.parent == LAB:
        text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    # A results page names the last commit that has a command that is gone.
    is_kept = path.parent == LAB and re.search(r"exists up to commit [0-9a-f]{7}", text)
    assert is_kept or gone(text) == []


def test_what_the_sources_name_exists():
    found = {path: gone(path.read_text()) for path in SOURCES}
    assert {path: names for path, names in found.items() if names} == {}
