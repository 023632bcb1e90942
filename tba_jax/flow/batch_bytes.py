# SPDX-License-Identifier: Apache-2.0
"""A batch as bytes and back, exact: on its way from the host that drew it to others that train.

It knows nothing of what the arrays mean.
"""

import json
import math

import numpy as np

from tba_jax.flow.batch import Batch, PackedBatch

_KINDS = {kind.__name__: kind for kind in (Batch, PackedBatch)}


def pack_batch(batch: Batch | PackedBatch) -> bytes:
    """A line of JSON that says what follows, then the arrays one after the other."""
    arrays = {name: np.asarray(x) for name, x in batch._asdict().items() if x is not None}
    head = {
        "kind": type(batch).__name__,
        "arrays": {name: [x.dtype.name, x.shape] for name, x in arrays.items()},
    }
    return b"\n".join([json.dumps(head).encode(), b"".join(x.tobytes() for x in arrays.values())])


def unpack_batch(data: bytes) -> Batch | PackedBatch:
    """Inverse of `pack_batch`."""
    line, _, body = data.partition(b"\n")
    head = json.loads(line)
    arrays, start = {}, 0
    for name, (dtype, shape) in head["arrays"].items():
        count = math.prod(shape)
        arrays[name] = np.frombuffer(body, dtype, count, start).reshape(shape)
        start += count * np.dtype(dtype).itemsize
    return _KINDS[head["kind"]](**arrays)
