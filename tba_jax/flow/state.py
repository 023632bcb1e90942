# SPDX-License-Identifier: Apache-2.0
"""Checkpoint interface of the parts of a run."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from tba_jax.flow.array_bytes import pack_arrays, unpack_arrays


class PartState(NamedTuple):
    """State of one part at one instant, copied.

    Attributes:
        arrays: flat arrays by name.
        meta: the rest, JSON-compatible.
    """

    arrays: Mapping[str, np.ndarray]
    meta: Any


class Saveable(Protocol):
    """A part with state. Restored from its state, it continues as if never interrupted."""

    def state(self) -> PartState:
        """Return all state needed to continue; later changes of the part do not affect it."""
        ...

    def restore(self, state: PartState) -> None:
        """Replace everything by the `state` of an equally configured part."""
        ...


def pack_states(states: Mapping[str, PartState]) -> bytes:
    """Return states by name as bytes, exact."""
    arrays = {
        f"{name}/{key}": np.asarray(value)
        for name, state in states.items()
        for key, value in state.arrays.items()
    }
    return pack_arrays(arrays, {name: state.meta for name, state in states.items()})


def unpack_states(data: bytes) -> dict[str, PartState]:
    """Inverse of `pack_states`.

    Raises:
        ValueError: the bytes are not intact.
    """
    entries, metas = unpack_arrays(data)
    arrays: dict[str, dict[str, np.ndarray]] = {name: {} for name in metas}
    for full_key, array in entries.items():
        name, key = full_key.split("/", 1)
        arrays[name][key] = array
    return {name: PartState(arrays[name], meta) for name, meta in metas.items()}
