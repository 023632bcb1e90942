# SPDX-License-Identifier: Apache-2.0
"""One safetensors file: check of its header, memory-mapped tensors, and streamed writing.

The library safetensors copies every tensor that it reads, and needs all tensors at once to write.
Here tensors are views of the mapped file, whose pages the system can drop, and are written one by
one. Invariant: an accepted header describes bytes that exist.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

# Storage dtypes of parameters. Integers and 8-bit floats have scales in other tensors, so their
# values alone would be wrong.
DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": jnp.dtype(jnp.bfloat16),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_LENGTH_BYTES = 8


class Entry(NamedTuple):
    """Location of a tensor in a file.

    Attributes:
        path: the file.
        dtype: dtype code in the file; `DTYPES` has the codes that can be read.
        shape: shape of the tensor.
        start: first byte, counted from the start of the file.
        num_bytes: number of bytes.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def entries(path: Path) -> dict[str, Entry]:
    """Return the tensors of a file, by name.

    Raises:
        ValueError: the file is truncated or is not in the format.
    """
    try:
        with safe_open(path, framework="np"):
            pass  # the library checks header and file size when it opens a file
    except SafetensorError as error:
        raise ValueError(
            f"{path}: not a complete safetensors file ({error}). Download it again"
        ) from error
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = json.loads(file.read(length))
    data = _LENGTH_BYTES + length
    found: dict[str, Entry] = {}
    for name, x in header.items():
        if name != "__metadata__":
            start, end = x["data_offsets"]
            found[name] = Entry(path, x["dtype"], tuple(x["shape"]), data + start, end - start)
    return found


def map_file(path: Path) -> np.ndarray:
    """Return the bytes of a file, read from disk on access."""
    return np.asarray(np.memmap(path, np.uint8, mode="r"))


def view(mapped: np.ndarray, entry: Entry) -> np.ndarray:
    """Return a view of a tensor in a mapped file; a dtype that `DTYPES` lacks becomes bytes."""
    data = mapped[entry.start : entry.start + entry.num_bytes]
    return data.view(DTYPES.get(entry.dtype, np.dtype(np.uint8))).reshape(entry.shape)


def write(
    path: Path,
    header: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    arrays: Iterable[np.ndarray],
) -> None:
    """Write a file; at most one array is in memory at a time.

    Args:
        path: file to write, overwritten.
        header: dtype and shape by name. Dtype sizes should not grow along the file, so that
            tensors are aligned.
        arrays: one array per name, in the same order.

    Raises:
        ValueError: a dtype that `DTYPES` lacks.
    """
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in header.items():
        if dtype not in _CODES:
            raise ValueError(
                f"{name} has dtype {dtype}, which is not supported in safetensors files here. "
                f"Convert the parameters to one of {', '.join(str(x) for x in _CODES)}"
            )
        start, end = end, end + math.prod(shape) * dtype.itemsize
        fields[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)  # align the data to eight bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little"))
        file.write(text)
        for (dtype, shape), array in zip(header.values(), arrays, strict=True):
            assert (array.dtype, array.shape) == (dtype, shape)
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
