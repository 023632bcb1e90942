# SPDX-License-Identifier: Apache-2.0
"""Arrays as bytes: exact, and refused when one of them was damaged."""

import numpy as np
import pytest

from tba_jax.flow.state import pack_arrays, unpack_arrays

ARRAYS = {
    "odd": np.arange(3, dtype=np.uint8),
    "rows": np.arange(6, dtype="<i4").reshape(2, 3),
    "none": np.zeros((0, 4), np.float32),
    "flags": np.array([True, False]),
    "one": np.float64(0.1),
    "values": np.array([np.nan, -0.0, 1e-300]),
}
META = {"text": "zwei\nZeilen", "nested": [1, None, {"a": 0.5}]}


def test_what_was_packed_comes_back_exactly():
    arrays, meta = unpack_arrays(pack_arrays(ARRAYS, META))
    assert meta == META and set(arrays) == set(ARRAYS)
    for name, x in ARRAYS.items():
        got = arrays[name]
        assert (got.dtype, got.shape) == (x.dtype, x.shape), name
        assert got.tobytes() == x.tobytes(), name
    assert unpack_arrays(pack_arrays({}, None)) == ({}, None)


def test_whatever_byte_is_damaged_it_is_refused():
    data = pack_arrays(ARRAYS, META)
    for at in range(len(data)):
        damaged = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
        with pytest.raises(ValueError, match="checksum"):
            unpack_arrays(damaged)
    for end in range(len(data)):
        with pytest.raises(ValueError, match="checksum"):
            unpack_arrays(data[:end])
