# SPDX-License-Identifier: Apache-2.0
"""Digests of the files of a folder: storage may return other bits than Orbax wrote.

A digest is the CRC-32C of a file. It detects accidents, not deliberate changes. An accident to
digests.json itself makes it unreadable, or names a missing file, another digest or another run.
Invariant: `damage` names each listed file that changed (tests/storage/test_saved_steps.py).
"""

import json
from collections.abc import Iterator
from concurrent import futures

import google_crc32c
from etils import epath

NAME = "digests.json"
_PIECE = 2**20  # bytes read at a time
_READERS = 4  # files read at a time
# Orbax writes these after the files are complete. They hold a time, and are not restored.
_LATER = ("commit_success.txt", "_CHECKPOINT_METADATA", NAME)


def write(folder: epath.Path, run_id: str = "") -> None:
    """Write digests.json: the size and digest of every file of a complete folder, and its run."""
    files = dict(_files(folder))
    with futures.ThreadPoolExecutor(_READERS, "digest") as readers:
        found = dict(zip(files, readers.map(_digest, files.values()), strict=True))
    (folder / NAME).write_text(json.dumps({"run": run_id, "files": found}, indent=1))


def run_of(folder: epath.Path) -> str | None:
    """Return the ID of the run that wrote a folder; None without a readable digests.json."""
    try:
        return str(json.loads((folder / NAME).read_text())["run"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def damage(folder: epath.Path, *, below: str = "", share: tuple[int, int] = (0, 1)) -> list[str]:
    """Return a clause for each file of digests.json that is missing, unreadable or changed.

    Args:
        below: prefix of the relative paths of the files that are compared.
        share: (i, n): only the i-th of n shares of the files is compared.
    """
    try:
        files = json.loads((folder / NAME).read_text())["files"]
        # By descending size, the shares have similar total sizes.
        names = sorted((x for x in files if x.startswith(below)), key=lambda x: (-files[x][0], x))
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        return [f"{NAME}, which lists its files, is missing or unreadable ({type(error).__name__})"]

    def compare(name: str) -> str:
        size, digest = files[name]
        try:
            now_size, now = _digest(folder / name)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror or type(error).__name__})"
        if now_size != size:
            return f"{name} has {now_size:,} bytes, not {size:,}"
        return "" if now == digest else f"{name} has the digest {now}, not {digest}"

    with futures.ThreadPoolExecutor(_READERS, "digest") as readers:
        return list(filter(None, readers.map(compare, names[share[0] :: share[1]])))


def _files(folder: epath.Path, prefix: str = "") -> Iterator[tuple[str, epath.Path]]:
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if path.is_dir():
            yield from _files(path, f"{prefix}{path.name}/")
        elif path.name not in _LATER:
            yield prefix + path.name, path


def _digest(file: epath.Path) -> tuple[int, str]:
    """Return the size in bytes and the CRC-32C in hex; memory mapping could end the process."""
    digest = google_crc32c.Checksum()
    with file.open("rb") as stream:
        size = sum(map(len, digest.consume(stream, _PIECE)))
    return size, digest.hexdigest().decode()
