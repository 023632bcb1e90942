# SPDX-License-Identifier: Apache-2.0
"""What the pages say exists: links lead somewhere, and decision records are listed once."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RECORDS = ROOT / "docs" / "decisions"


def name_of(path):
    return str(path.relative_to(ROOT))


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


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_between_pages_resolve(path):
    assert broken_links(path) == []


def test_a_broken_link_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A title\n[a](#a-title) [b](#b) [c](gone.md) [d](https://x.org/y)\n")
    assert broken_links(page) == ["#b", "gone.md"]


def test_every_decision_has_one_number_and_one_line_in_the_index():
    found = {}
    for path in sorted(RECORDS.glob("*.md")):
        for number, title in re.findall(r"^## (\d+)\. (.+)$", path.read_text(), flags=re.M):
            assert number not in found, f"record {number} is there twice: {found[number]}, {title}"
            found[number] = title
    index = (RECORDS / "README.md").read_text()
    listed = dict(re.findall(r"^(\d+)\. \[(.+)\]\(", index, flags=re.M))
    assert listed == found
