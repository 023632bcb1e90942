# SPDX-License-Identifier: Apache-2.0
"""Arrays and JSON as bytes, for messages between processes.

Nothing is pickled. The format may change with each version of tba_jax; use npz for files.
Invariants: `unpack_arrays` is the exact inverse of `pack_arrays`, and damaged bytes are refused.
"""

import json
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

# Arrays begin at multiples of the largest item size.
_ALIGNMENT = 8
_CHECKSUM = 8


def pack_arrays(arrays: Mapping[str, np.ndarray], meta: Any) -> bytes:
    """Return bytes: a checksum, a line of JSON that describes the contents, and the arrays.

    Args:
        meta: JSON-compatible value.

    Raises:
        ValueError: an array has objects, or a dtype that numpy lacks (bfloat16).
    """
    arrays = {name: np.asarray(x) for name, x in arrays.items()}
    for name, x in arrays.items():
        if x.dtype.hasobject or x.dtype.kind == "V":
            raise ValueError(f"array {name!r} has dtype {x.dtype}; wanted a numpy dtype")
    said = {name: [x.dtype.str, x.shape] for name, x in arrays.items()}
    head = json.dumps({"arrays": said, "meta": meta}).encode()
    # Length of the header with checksum and line end.
    head += b" " * (-(_CHECKSUM + len(head) + 1) % _ALIGNMENT) + b"\n"
    parts = [head]
    for x in arrays.values():
        parts += [x.tobytes(), bytes(-x.nbytes % _ALIGNMENT)]
    body = b"".join(parts)
    return b"%08x" % zlib.crc32(body) + body


def unpack_arrays(data: bytes) -> tuple[dict[str, np.ndarray], Any]:
    """Inverse of `pack_arrays`; the arrays are read-only views of the bytes.

    Raises:
        ValueError: the bytes are not intact.
    """
    body = memoryview(data)[_CHECKSUM:]
    if data[:_CHECKSUM] != b"%08x" % zlib.crc32(body):
        raise ValueError(f"the checksum of {len(data):,} bytes is wrong")
    end = data.index(b"\n")
    head = json.loads(data[_CHECKSUM:end])
    arrays, start = {}, end + 1
    for name, (dtype, shape) in head["arrays"].items():
        count = math.prod(shape)
        x = np.frombuffer(data, dtype, count, start) if count else np.zeros(0, dtype)
        arrays[name] = x.reshape(shape)
        start += -(-x.nbytes // _ALIGNMENT) * _ALIGNMENT
    return arrays, head["meta"]
