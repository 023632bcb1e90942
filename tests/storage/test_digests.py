# SPDX-License-Identifier: Apache-2.0
"""A file that changed is named, whatever its size."""

import json

import google_crc32c
import numpy as np
import pytest
from etils import epath

from tba_jax.storage import digests


@pytest.mark.parametrize("size", [0, 1, 100, 101])
def test_a_changed_byte_is_found(size, tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "_PIECE", 100)
    data = bytearray(np.random.default_rng(size).bytes(size))
    (tmp_path / "file").write_bytes(data)
    folder = epath.Path(tmp_path)
    digests.write(folder)
    found = json.loads((tmp_path / "digests.json").read_text())["files"]["file"]
    assert found == [size, f"{google_crc32c.value(bytes(data)):08x}"]
    assert digests.damage(folder) == []
    for position in {0, size // 2, size - 1} if size else ():
        data[position] ^= 1
        (tmp_path / "file").write_bytes(data)
        (clause,) = digests.damage(folder)
        assert clause.startswith("file has the digest ")
        data[position] ^= 1
    (tmp_path / "file").write_bytes(data + b"1")
    assert digests.damage(folder) == [f"file has {size + 1:,} bytes, not {size:,}"]
