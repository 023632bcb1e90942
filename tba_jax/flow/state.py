# SPDX-License-Identifier: Apache-2.0
"""Arrays with JSON: the state of a part of a run, and bytes for messages between processes.

Bytes are a checksum and safetensors; nothing is pickled. Invariants: `unpack_arrays` is the exact
inverse of `pack_arrays`, and damaged bytes are refused.
"""

import json
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load, save

_CHECKSUM = 8
# Entry with the JSON value; no array has this name.
_META = "meta.json"


class PartState(NamedTuple):
    """State of one part at one instant, copied; `restore` of an equal part continues from it.

    Attributes:
        arrays: flat arrays by name.
        meta: JSON-compatible values of the state besides the arrays.
    """

    arrays: Mapping[str, np.ndarray]
    meta: Any


def pack_arrays(arrays: Mapping[str, np.ndarray], meta: Any) -> bytes:
    """Return arrays and a JSON-compatible value as bytes."""
    entries = {name: np.ascontiguousarray(x).reshape(np.shape(x)) for name, x in arrays.items()}
    body = save(entries | {_META: np.frombuffer(json.dumps(meta).encode(), np.uint8)})
    return b"%08x" % zlib.crc32(body) + body


def unpack_arrays(data: bytes) -> tuple[dict[str, np.ndarray], Any]:
    """Inverse of `pack_arrays`.

    Raises:
        ValueError: the bytes are not intact.
    """
    body = data[_CHECKSUM:]
    if data[:_CHECKSUM] != b"%08x" % zlib.crc32(body):
        raise ValueError(f"the checksum of {len(data):,} bytes is wrong")
    arrays = load(body)
    return arrays, json.loads(arrays.pop(_META).tobytes())
