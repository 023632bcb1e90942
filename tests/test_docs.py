# SPDX-License-Identifier: Apache-2.0
"""What the pages say exists: files and names they mention, and links."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tba_jax.config.schema import SETTINGS
from tba_jax.train.objectives import own_names

ROOT = Path(__file__).parents[1]
MODULES = defaultdict(list)  # module or room -> the files that `module.name` may be of
for path in sorted((ROOT / "tba_jax").rglob("*.py")):
    for owner in {path.stem, path.parent.name} - {"config"}:
        MODULES[owner].append(path)
SUFFIXES = {"py", "sh", "md", "json", "jsonl", "html", "parquet"}
FIELDS_OF = defaultdict(set)  # section of the config -> its fields
for field in SETTINGS:
    FIELDS_OF[field.split(".")[0]].add(field.split(".")[-1])
# Own settings of objectives, and `preset`, which is written out as the settings it stands for.
FIELDS_OF["objective"] |= {"preset", *own_names()}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LAB = ROOT / "docs" / "lab"
SOURCES = [
    *(ROOT / "tba_jax").rglob("*.py"),
    *(ROOT / "configs").rglob("*.py"),
    *(ROOT / "launch").glob("*.sh"),
]
FOLDERS = ("tba_jax", "tests", "configs", "docs", "launch")
ROOMS = tuple(f"{path.name}/" for path in sorted((ROOT / "tba_jax").iterdir()) if path.is_dir())
FILES = [str(p.relative_to(ROOT)) for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")]


def prose(path):
    """A page without its fenced and indented code."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    return re.sub(r"^    .*$", "", text, flags=re.M)


def anchors(path):
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ +(.+)$", prose(path), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def broken_links(path):
    """Links of a page to a file that is not there, or to a heading that its page lacks."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        file, _, heading = target.partition("#")
        if "://" in file:
            continue
        there = (path.parent / file).resolve() if file else path
        if not there.exists() or (heading and heading not in anchors(there)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("path", PAGES, ids=lambda x: x.stem)
def test_links_between_pages_resolve(path):
    assert broken_links(path) == []


def defined(path):
    """Names that a module defines at its top level."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {
                name.id for t in targets for name in ast.walk(t) if isinstance(name, ast.Name)
            }
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def resolves(dotted):
    """Whether `tba_jax.x.y` is a module, or a name in one; methods are not looked at."""
    parts = dotted.split(".")
    for size in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:size])
        if path.is_dir() and size == len(parts):
            return True
        module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if module.exists():
            return size == len(parts) or parts[size] in defined(module)
    return False


def gone(text, files=FILES):
    """Files and dotted names in a text that the repository does not have."""
    found = []
    for name in re.findall(r"(?<![\w./])[\w/]+\.py\b", text):
        is_ours = name.split("/")[0] in FOLDERS or name.startswith(ROOMS)
        if is_ours and not any(f == name or f.endswith("/" + name) for f in files):
            found.append(name)
    for name in re.findall(r"(?<![\w./])((?:tba_jax|tests|docs)/[\w/]*\w)(?![\w.*{])", text):
        if not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists():
            found.append(name)
    for owner, name in re.findall(r"`([a-z_]+)\.([A-Za-z_]+)`", text):
        is_local = re.search(rf"\b{owner}(: | = |\.{name}\b(?!`))", text)  # an argument, say
        is_known = owner in MODULES or owner in FIELDS_OF
        if is_known and not is_local and name not in SUFFIXES | FIELDS_OF.get(owner, set()):
            if not any(name == path.stem or name in defined(path) for path in MODULES[owner]):
                found.append(f"{owner}.{name}")
    for name in re.findall(r"--config\.([a-z_.]*[a-z_])(?![\w.{])", text):
        owner, _, field = name.rpartition(".")
        if field not in FIELDS_OF.get(owner or field, ()):
            found.append(f"--config.{name}")
    found += [n for n in re.findall(r"\btba_jax(?:\.[A-Za-z_]\w*)+", text) if not resolves(n)]
    return [n for n in found if not re.search(r"\b[A-Z_]+\b", n)]  # NAME stands for any


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda x: x.stem)
def test_files_and_names_on_a_page_exist(path):
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    missing = gone(text)
    # A results page keeps the command that made it, and names the last commit that has the command.
    if path.parent == LAB and re.search(r"exists up to commit [0-9a-f]{7}", text):
        missing = []
    assert missing == []


def test_files_and_names_in_the_sources_exist():
    found = {path: gone(path.read_text()) for path in SOURCES}
    assert {path: names for path, names in found.items() if names} == {}
