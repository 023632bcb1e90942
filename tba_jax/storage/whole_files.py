# SPDX-License-Identifier: Apache-2.0
"""Files that are replaced whole."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etils import epath

UNFINISHED = ".unfinished"


def is_address(path: object) -> bool:
    """Return whether a path is an address of an object store, not a folder."""
    return "://" in str(path)


def write_whole(path: Path | epath.Path, data: bytes) -> None:
    """Replace a file; readers see the whole old content or the whole new content."""
    if is_address(path):
        path.write_bytes(data)  # an object appears when it is complete
        return
    unfinished = path.with_name(path.name + UNFINISHED)
    unfinished.write_bytes(data)
    os.replace(unfinished, path)


def write_json(path: Path | epath.Path, facts: Mapping[str, Any]) -> None:
    """Replace a file by a JSON object."""
    write_whole(path, json.dumps(facts, indent=1).encode())


def read_json(path: Path | epath.Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ValueError: the file holds no JSON object, or cannot be read.
        FileNotFoundError: the file does not exist.
    """
    try:
        facts = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, RecursionError) as error:
        raise ValueError(f"cannot be read ({type(error).__name__})") from error
    if not isinstance(facts, dict):
        raise ValueError(f"holds a {type(facts).__name__}, wanted a JSON object")
    return facts
