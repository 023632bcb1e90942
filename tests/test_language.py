# SPDX-License-Identifier: Apache-2.0
"""Words that the code and the pages do not use, because a reader has to decode them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
BANNED = re.compile(
    r"\b(?:(?-i:(Desk|Seat|Link|Door|Courier|Loan|Gang|Notice|Keeper|Vitals)s?)|"
    "desk|seats?|courier|loans?|unsay|vitals|gang|whoever|nobody|last words|home host|keepers|"
    "(is|are|was|were) told|signs? of life|(be|is|are) let in|early warnings?|spent strata|"
    r"searched elsewhere|weights on their way|beside a trainer)\b",
    re.IGNORECASE,
)


def test_no_banned_words():
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    texts = {path: path.read_text() for path in [*(ROOT / "tba_jax").rglob("*.py"), *pages]}
    assert {path: m[0] for path, text in texts.items() if (m := BANNED.search(text))} == {}
