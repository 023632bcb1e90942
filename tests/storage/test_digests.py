# SPDX-License-Identifier: Apache-2.0
"""A digest is that of the whole file, however it was read."""

import google_crc32c
import numpy as np
import pytest
from etils import epath

from tba_jax.storage import digests


@pytest.mark.parametrize("size", [0, 1, 255, 256, 511, 512, 513, 768, 1000, 1024, 5000])
def test_parts_read_at_once_give_the_digest_of_the_whole(size, tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "_PART", 256)
    monkeypatch.setattr(digests, "_PIECE", 100)
    digests._shift_of_a_part.cache_clear()
    data = np.random.default_rng(size).bytes(size)
    (tmp_path / "file").write_bytes(data)
    want = f"{google_crc32c.value(data):08x}"
    assert digests._digest(epath.Path(tmp_path / "file")) == (size, want)
    digests._shift_of_a_part.cache_clear()


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "a").write_bytes(b"1")
    digests.write(epath.Path(tmp_path))
    (tmp_path / "a").unlink()
    (tmp_path / "a").mkdir()
    assert digests.damage(epath.Path(tmp_path)) == ["a cannot be read (Is a directory)"]
