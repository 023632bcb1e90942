# SPDX-License-Identifier: Apache-2.0
"""Files that are replaced whole, and never written through a symbolic link."""

import contextlib
import fcntl
import os
from pathlib import Path
from typing import BinaryIO

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
    while True:
        with open(unfinished, "r+b", opener=_create_no_follow) as file:
            # Processes of a pod that fail together write the same file. Some file systems of
            # clusters have no locks.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(file, unfinished):
                continue  # another process has put it into its place
            file.truncate()
            file.write(data)
            file.flush()
            os.replace(unfinished, path)
            return


def _create_no_follow(path: str, flags: int) -> int:
    return open_no_follow(path, flags | os.O_CREAT)


def _is_at(file: BinaryIO, path: Path | epath.Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
