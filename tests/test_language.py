# SPDX-License-Identifier: Apache-2.0
"""Words that the code and the pages do not use, because a reader has to decode them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
IDENTIFIERS = r"(Desk|Seat|Link|Door|Courier|Loan|Gang|Notice|Keeper|Vitals)s?"
PHRASES = (
    "desk|seats?|courier|loans?|unsay|vitals|gang|whoever|nobody|last words|home host|keepers|"
    "(is|are|was|were) told|signs? of life|(be|is|are) let in|early warnings?|spent strata|"
    "searched elsewhere|weights on their way|beside a trainer"
)
BANNED = re.compile(rf"\b(?:(?-i:{IDENTIFIERS})|{PHRASES})\b", re.IGNORECASE)
FILES = [
    *sorted((ROOT / "tba_jax").rglob("*.py")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
]


def banned_words(path: Path) -> list[str]:
    lines = path.read_text().splitlines()
    return [f"{path}:{i}: {m[0]!r}" for i, x in enumerate(lines, 1) for m in BANNED.finditer(x)]


def test_no_banned_words():
    assert [found for path in FILES for found in banned_words(path)] == []
