# SPDX-License-Identifier: Apache-2.0
"""A batch as bytes and back, exact: on its way from the host that drew it to others that train."""

from tba_jax.flow.array_bytes import pack_arrays, unpack_arrays
from tba_jax.flow.batch import Batch, PackedBatch

_KINDS = {kind.__name__: kind for kind in (Batch, PackedBatch)}


def pack_batch(batch: Batch | PackedBatch) -> bytes:
    """Its arrays and which kind it is."""
    arrays = {name: x for name, x in batch._asdict().items() if x is not None}
    return pack_arrays(arrays, type(batch).__name__)


def unpack_batch(data: bytes) -> Batch | PackedBatch:
    """Inverse of `pack_batch`.

    Raises:
        ValueError: the bytes are not intact.
    """
    arrays, kind = unpack_arrays(data)
    return _KINDS[kind](**arrays)
