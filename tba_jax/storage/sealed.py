# SPDX-License-Identifier: Apache-2.0
"""JSON objects in files, with their own digest, to detect damage.

A damaged JSON file is often still valid JSON, with another number in it. The key `crc32c` holds the
CRC-32C of the other entries. It detects accidents, not deliberate changes. Invariant: a file is
replaced whole or not at all.
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
    """Return an object as JSON text with its digest; a digest in the object is replaced."""
    facts = {name: value for name, value in facts.items() if name != KEY}
    return json.dumps({**facts, KEY: _digest(facts)}, indent=1)


def unseal(content: str | bytes) -> dict[str, Any]:
    """Return the object that `seal` received, with JSON's types: text keys, and lists for tuples.

    Raises:
        ValueError: the content is damaged; the message says how.
    """
    try:
        facts = json.loads(content)
    except RecursionError:
        raise ValueError("has JSON values that are nested too deep") from None
    if not isinstance(facts, dict):
        raise ValueError(f"holds a {type(facts).__name__}, wanted a JSON object")
    digest = facts.pop(KEY, None)
    if digest is None:
        raise ValueError(f"lacks the entry {KEY!r}")
    if digest != _digest(facts):
        raise ValueError(f"has the digest {_digest(facts)}, expected {digest}")
    return facts


def write(path: Path | epath.Path, facts: Mapping[str, Any]) -> None:
    """Write an object with its digest to a file, which is replaced whole."""
    write_whole(path, seal(facts).encode())


def read(path: Path | epath.Path) -> dict[str, Any]:
    """Return the object of a file that `write` wrote.

    Raises:
        ValueError: the file is damaged or cannot be read.
        FileNotFoundError: the file does not exist.
    """
    try:
        return unseal(path.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from error


def _digest(facts: Mapping[str, Any]) -> str:
    # The types of JSON: keys are texts, and tuples are lists.
    text = json.dumps(json.loads(json.dumps(facts)), sort_keys=True)
    return f"{google_crc32c.value(text.encode()):08x}"
