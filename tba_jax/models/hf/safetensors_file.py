# SPDX-License-Identifier: Apache-2.0
"""One safetensors file: its header checked, its tensors mapped, or a new one written as a stream.

The library checks a file but copies every tensor it reads and wants all of them at once to write;
here tensors are views of the mapped file, whose pages the system can drop, and are written one
after the other. The invariant it owns: a header that was accepted describes bytes that are there.
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

# What a parameter may be stored in. Integers and eight-bit floats come with scales in other
# tensors, so that reading them as values would be wrong.
DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": jnp.dtype(jnp.bfloat16),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_LENGTH_BYTES = 8


class Entry(NamedTuple):
    """Where a tensor lies in a file.

    Attributes:
        path: the file.
        dtype: its code in the file; `DTYPES` has those that can be read.
        shape: its shape.
        start: first byte, counted from the start of the file.
        num_bytes: length.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def entries(path: Path) -> dict[str, Entry]:
    """The tensors of a file, by name.

    Raises:
        ValueError: the file is truncated or is not in the format.
    """
    try:
        with safe_open(path, framework="np"):
            pass  # opening compares the header with itself and with the size of the file
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
    """The bytes of a file, read when they are touched."""
    return np.asarray(np.memmap(path, np.uint8, mode="r"))


def view(mapped: np.ndarray, entry: Entry) -> np.ndarray:
    """A tensor of a mapped file; nothing is copied."""
    data = mapped[entry.start : entry.start + entry.num_bytes]
    return data.view(DTYPES[entry.dtype]).reshape(entry.shape)


def write(
    path: Path,
    header: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    arrays: Iterable[np.ndarray],
) -> None:
    """Write a file; no more than one array is held at a time.

    Args:
        path: file to write, overwritten.
        header: dtype and shape by name. Dtypes should not grow in size along the file, or tensors
            lie at odd addresses.
        arrays: one for each name, in the same order.

    Raises:
        ValueError: a dtype that `DTYPES` lacks.
    """
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in header.items():
        if dtype not in _CODES:
            raise ValueError(
                f"{name} is {dtype}, which is not written to safetensors files here. Convert the "
                f"parameters to one of {', '.join(str(x) for x in _CODES)}"
            )
        start, end = end, end + math.prod(shape) * dtype.itemsize
        fields[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)  # the data begin at a multiple of eight bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little"))
        file.write(text)
        for (dtype, shape), array in zip(header.values(), arrays, strict=True):
            assert (array.dtype, array.shape) == (dtype, shape)
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
