# SPDX-License-Identifier: Apache-2.0
"""Arrays with JSON: the state of a part of a run, and its bytes in a checkpoint.

Bytes are safetensors; nothing is pickled. Invariant: `unpack_arrays` is the exact inverse of
`pack_arrays`.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load, save

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
    return save(entries | {_META: np.frombuffer(json.dumps(meta).encode(), np.uint8)})


def unpack_arrays(data: bytes) -> tuple[dict[str, np.ndarray], Any]:
    """Inverse of `pack_arrays`."""
    arrays = load(data)
    return arrays, json.loads(arrays.pop(_META).tobytes())
