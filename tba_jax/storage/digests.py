# SPDX-License-Identifier: Apache-2.0
"""Digests of the files of a folder: what is read is what was written.

Storage returns other bits than it was given, rarely and without a word, and neither Orbax nor
TensorStore looks. A digest is a CRC-32C of a whole file: against accidents, not against whoever may
write there. Digests of files hold whatever mesh reads them, which those of arrays in shard order
would not. It knows nothing of checkpoints. Invariant: a file that is listed has the digest that it
was listed with, or `damage` names it.
"""

import functools
import json
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import Any

import google_crc32c
import numpy as np
from etils import epath

NAME = "digests.json"
_PIECE = 2**18  # bytes read at a time
_PART = 2**25  # bytes of a large file that one thread reads
_READERS = 4
_POLYNOMIAL = 0x82F63B78  # of CRC-32C, lowest bit first
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
    """Size and digest; of a large file several parts are read at once."""
    size = file.stat().length
    num_parts = size // _PART
    value = 0
    if num_parts > 1:
        # They end with this call, and nobody waits for anything but the disk in them.
        with futures.ThreadPoolExecutor(min(num_parts, _READERS), "digest") as readers:
            parts = readers.map(lambda i: _crc(file, i * _PART, _PART, 0)[1], range(num_parts))
            for part in parts:
                value = _joined(value, part)
    else:
        num_parts = 0
    rest, value = _crc(file, num_parts * _PART, None, value)
    return num_parts * _PART + rest, _hex(value)


def _crc(file: epath.Path, start: int, length: int | None, value: int) -> tuple[int, int]:
    """Bytes read of a part of a file, and their CRC after `value`.

    Into one buffer that stays in the processor's cache: memory for each piece that is read costs
    more than the CRC. Not mapped: what cannot be read would then end the process.
    """
    buffer, read = np.empty(_PIECE, np.uint8), 0
    with file.open("rb") as opened:
        stream: Any = opened  # the type of `open` knows no `readinto`
        stream.seek(start)
        while length is None or read < length:
            wanted = _PIECE if length is None else min(_PIECE, length - read)
            count = stream.readinto(buffer[:wanted])
            if not count:
                break
            value = google_crc32c.extend(value, buffer[:count])
            read += count
    return read, value


def _joined(before: int, part: int) -> int:
    """CRC of bytes and a part of `_PART` bytes that follows them, from that of each."""
    return _applied(_shift_of_a_part(), before) ^ part


@functools.cache
def _shift_of_a_part() -> tuple[int, ...]:
    """What `_PART` zero bytes make of each bit of a CRC: a linear map, row by row."""
    rows = [_POLYNOMIAL, *(1 << bit for bit in range(31))]  # one zero bit
    for _ in range(3 + _PART.bit_length() - 1):  # twice as many each time
        rows = [_applied(rows, row) for row in rows]
    return tuple(rows)


def _applied(rows: Sequence[int], value: int) -> int:
    out = 0
    for row in rows:
        if value & 1:
            out ^= row
        value >>= 1
    return out


def _hex(value: int) -> str:
    return f"{value:08x}"
