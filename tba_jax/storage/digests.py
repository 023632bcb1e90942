# SPDX-License-Identifier: Apache-2.0
"""Digests of the files of a folder, to detect files that changed after they were written.

Storage sometimes returns other bits than were written, and neither Orbax nor TensorStore checks. A
digest is the CRC-32C of a file, or of each part of a large file. It detects accidents, not
deliberate changes. Digests of files are valid for every mesh, unlike digests of array shards.
Invariant: `damage` names every listed file whose content changed.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import Any

import google_crc32c
import numpy as np
from etils import epath

NAME = "digests.json"
_PIECE = 2**18  # bytes read at a time
# Bytes per part of a large file; each part has a digest. Stored lists depend on this size.
_PART = 2**25
_READERS = 4  # threads that read the parts of a file
# Orbax writes these after the files are complete. They hold a time, and are not restored.
_LATER = frozenset({"commit_success.txt", "_CHECKPOINT_METADATA", NAME})


def write(folder: epath.Path, run_id: str = "") -> None:
    """Write digests.json: the size and digest of every file of a complete folder, and its run."""
    files = {}
    for name, file in _files(folder):
        size, digest = _digest(file)
        files[name] = [size, digest]
    listed = {"run": run_id, "files": files}
    (folder / NAME).write_text(json.dumps(listed | {"crc32c": _own(listed)}, indent=1))


def run_of(folder: epath.Path) -> str | None:
    """Return the ID of the run that wrote a folder; None without a readable digests.json."""
    try:
        listed = json.loads((folder / NAME).read_text())
        return str(listed["run"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _own(listed: dict[str, Any]) -> str:
    """Return the digest of the content of digests.json."""
    content = {"run": listed["run"], "files": listed["files"]}
    return _hex(google_crc32c.value(json.dumps(content, sort_keys=True).encode()))


def damage(folder: epath.Path, *, below: str = "", share: tuple[int, int] = (0, 1)) -> list[str]:
    """Compare the files of a folder with its digests.json.

    Args:
        folder: a folder that `write` was called with.
        below: relative path; only files below it are compared.
        share: (i, n): only the i-th of n shares of the files is compared.

    Returns:
        A clause for each file that is missing, unreadable or changed; empty if there is none.
    """
    try:
        listed = json.loads((folder / NAME).read_text())
        files: dict[str, Any] = listed["files"]
        own = _own(listed)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
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
            found.append(f"{name} has the digest {_shown(now[1])}, not {_shown(digest)}")
    return found


def _largest_apart(names: Sequence[str], files: dict[str, Any]) -> list[str]:
    """Return file names by descending size; n slices [i::n] then have similar total sizes."""
    return sorted(names, key=lambda name: (-files[name][0], name))


def _files(folder: epath.Path, prefix: str = "") -> Iterator[tuple[str, epath.Path]]:
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if path.is_dir():
            yield from _files(path, f"{prefix}{path.name}/")
        elif path.name not in _LATER:
            yield prefix + path.name, path


def _digest(file: epath.Path) -> tuple[int, str | list[str]]:
    """Return the size in bytes, and the digest of the file or the digests of its parts."""
    if file.stat().length < 2 * _PART:
        size, digest = _crc(file, 0, None)
        return size, digest
    starts = range(0, file.stat().length, _PART)
    # The threads end with this call, and only read storage.
    with futures.ThreadPoolExecutor(max(1, min(len(starts), _READERS)), "digest") as readers:
        parts = list(readers.map(lambda start: _crc(file, start, _PART), starts))
    return sum(size for size, _ in parts), [digest for _, digest in parts]


def _crc(file: epath.Path, start: int, length: int | None) -> tuple[int, str]:
    """Return the number of bytes from `start` on, at most `length`, and their CRC-32C in hex.

    Reads into one buffer that stays in the processor's cache, because new memory for each piece
    would take longer than the CRC. The file is not memory-mapped, because an unreadable page would
    end the process.
    """
    buffer, read, value = np.empty(_PIECE, np.uint8), 0, 0
    with file.open("rb") as opened:
        stream: Any = opened  # the type of `open` has no `readinto`
        stream.seek(start)
        while length is None or read < length:
            wanted = _PIECE if length is None else min(_PIECE, length - read)
            count = stream.readinto(buffer[:wanted])
            if not count:
                break
            value = google_crc32c.extend(value, buffer[:count])
            read += count
    return read, _hex(value)


def _shown(digest: str | list[str]) -> str:
    return digest if isinstance(digest, str) else " ".join(map(str, digest))


def _hex(value: int) -> str:
    return f"{value:08x}"
