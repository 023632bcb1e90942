# SPDX-License-Identifier: Apache-2.0
"""Digests of the files of a folder: what is read is what was written.

Storage returns other bits than it was given, rarely and without a word, and neither Orbax nor
TensorStore looks. A digest is a CRC-32C of a whole file: against accidents, not against whoever may
write there. Digests of files hold whatever mesh reads them, which those of arrays in shard order
would not. It knows nothing of checkpoints. Invariant: a file that is listed has the digest that it
was listed with, or `damage` names it.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import google_crc32c
from etils import epath

NAME = "digests.json"
_PIECE = 2**22  # bytes read at a time
# Orbax writes these after the files are complete; they say when, and nothing that is restored.
_LATER = frozenset({"commit_success.txt", "_CHECKPOINT_METADATA", NAME})


def write(folder: epath.Path) -> None:
    """List the files of a folder that nobody writes to any more, with their sizes and digests."""
    files = {}
    for name, file in _files(folder):
        size, digest = _digest(file)
        files[name] = [size, digest]
    text = json.dumps(files, sort_keys=True)
    listed = {"files": files, "crc32c": _hex(google_crc32c.value(text.encode()))}
    (folder / NAME).write_text(json.dumps(listed, indent=1))


def damage(folder: epath.Path, *, below: str = "", share: tuple[int, int] = (0, 1)) -> list[str]:
    """What is not as it was listed, a clause for each file; nothing: all is well.

    Args:
        folder: that `write` was called with.
        below: look only at files below this folder of it.
        share: (i, n) for the i-th of n who divide the work.
    """
    try:
        listed = json.loads((folder / NAME).read_text())
        files: dict[str, Any] = listed["files"]
        own = _hex(google_crc32c.value(json.dumps(files, sort_keys=True).encode()))
    except (OSError, ValueError, TypeError, KeyError) as error:
        return [f"{NAME}, which lists its files, is missing or unreadable ({type(error).__name__})"]
    if own != listed.get("crc32c"):
        return [f"{NAME} has the digest {own}, not {listed.get('crc32c')}"]
    names = sorted(name for name in files if name.startswith(below))
    found = []
    for name in _largest_apart(names, files)[share[0] :: share[1]]:
        size, digest = files[name]
        try:
            now = _digest(folder / name)
        except OSError as error:
            found.append(f"{name} cannot be read ({error.strerror or type(error).__name__})")
            continue
        if now[0] != size:
            found.append(f"{name} has {now[0]:,} bytes, not {size:,}")
        elif now[1] != digest:
            found.append(f"{name} has the digest {now[1]}, not {digest}")
    return found


def _largest_apart(names: Sequence[str], files: dict[str, Any]) -> list[str]:
    """By size, so that every n-th of them is an equal share of the bytes."""
    return sorted(names, key=lambda name: (-files[name][0], name))


def _files(folder: epath.Path, prefix: str = "") -> Iterator[tuple[str, epath.Path]]:
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if path.is_dir():
            yield from _files(path, f"{prefix}{path.name}/")
        elif path.name not in _LATER:
            yield prefix + path.name, path


def _digest(file: epath.Path) -> tuple[int, str]:
    size, value = 0, 0
    with file.open("rb") as stream:
        while piece := stream.read(_PIECE):
            size += len(piece)
            value = google_crc32c.extend(value, piece)
    return size, _hex(value)


def _hex(value: int) -> str:
    return f"{value:08x}"
