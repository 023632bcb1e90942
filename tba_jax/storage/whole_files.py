# SPDX-License-Identifier: Apache-2.0
"""Files that are replaced whole, and never written through a symbolic link."""

import os
from pathlib import Path

from etils import epath

UNFINISHED = ".unfinished"


def open_no_follow(path: str, flags: int) -> int:
    """Open a file as `open(..., opener=open_no_follow)` does; refuse a symbolic link.

    Raises:
        OSError: the path is a symbolic link (ELOOP), or cannot be opened.
    """
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def write_whole(path: Path | epath.Path, data: bytes) -> None:
    """Replace a file; readers see the whole old content or the whole new content.

    Raises:
        OSError: the file cannot be written, or its temporary file is a symbolic link.
    """
    unfinished = path.with_name(path.name + UNFINISHED)
    if "://" in str(path):
        unfinished.write_bytes(data)
        epath.Path(unfinished).replace(path)
        return
    with open(unfinished, "wb", opener=open_no_follow) as file:
        file.write(data)
    os.replace(unfinished, path)
