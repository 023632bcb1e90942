# SPDX-License-Identifier: Apache-2.0
"""JSON objects in files, with their own digest, to detect damage.

A damaged JSON file is usually still valid JSON, with another number in it. The digest is a CRC-32C
of the other entries under the key `crc32c`: against accidents, not against deliberate changes.
Invariant: a file is replaced whole or not at all.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import google_crc32c
from etils import epath

from tba_jax.storage.whole_files import write_whole

KEY = "crc32c"


def seal(facts: Mapping[str, Any]) -> str:
    """Return an object as JSON with its digest, which replaces an existing one."""
    facts = {name: value for name, value in facts.items() if name != KEY}
    return json.dumps({**facts, KEY: _digest(facts)}, indent=1)


def unseal(content: str | bytes) -> dict[str, Any]:
    """Return the argument of `seal` after a conversion to JSON and back.

    Raises:
        ValueError: the content is damaged; the message says how.
    """
    try:
        facts = json.loads(content)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(facts, dict):
        raise ValueError(f"got {type(facts).__name__}, wanted a JSON object")
    digest = facts.pop(KEY, None)
    if digest is None:
        raise ValueError(f"lacks the entry {KEY!r}")
    if digest != _digest(facts):
        raise ValueError(f"has the digest {_digest(facts)}, expected {digest}")
    return facts


def write(path: Path | epath.Path, facts: Mapping[str, Any]) -> None:
    """Replace a file by the object with its digest."""
    write_whole(path, seal(facts).encode())


def read(path: Path | epath.Path) -> dict[str, Any]:
    """Return the object in a file.

    Raises:
        ValueError: as `unseal`, or the file cannot be read. FileNotFoundError: there is none.
    """
    try:
        return unseal(path.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from error


def _digest(facts: Mapping[str, Any]) -> str:
    # As JSON has them: keys are texts, and tuples are lists.
    text = json.dumps(json.loads(json.dumps(facts)), sort_keys=True)
    return f"{google_crc32c.value(text.encode()):08x}"
