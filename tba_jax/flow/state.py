# SPDX-License-Identifier: Apache-2.0
"""What a part of a run gives to a checkpoint, and takes back from one."""

import io
import json
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np


class PartState(NamedTuple):
    """State of one part at one instant, copied.

    Attributes:
        arrays: flat arrays by name.
        meta: the rest, JSON-compatible.
    """

    arrays: Mapping[str, np.ndarray]
    meta: Any


class Saveable(Protocol):
    """A part with state. Restored from its state it goes on as if it had never stopped."""

    def state(self) -> PartState:
        """Everything that it would need to go on; later changes of the part do not reach it."""
        ...

    def restore(self, state: PartState) -> None:
        """Replace everything by what `state` of an equally configured part returned."""
        ...


_META = "__meta__"


def pack_states(states: Mapping[str, PartState]) -> bytes:
    """States by name as npz bytes, exact; nothing is pickled."""
    arrays = {
        f"{name}/{key}": np.asarray(value)
        for name, state in states.items()
        for key, value in state.arrays.items()
    }
    metas = {name: state.meta for name, state in states.items()}
    arrays[_META] = np.frombuffer(json.dumps(metas).encode(), np.uint8)
    out = io.BytesIO()
    np.savez(out, allow_pickle=False, **arrays)
    return out.getvalue()


def unpack_states(data: bytes) -> dict[str, PartState]:
    """Inverse of `pack_states`."""
    with np.load(io.BytesIO(data), allow_pickle=False) as entries:
        metas = json.loads(entries[_META].tobytes().decode())
        arrays: dict[str, dict[str, np.ndarray]] = {name: {} for name in metas}
        for full_key in entries.files:
            if full_key != _META:
                name, key = full_key.split("/", 1)
                arrays[name][key] = entries[full_key]
    return {name: PartState(arrays[name], meta) for name, meta in metas.items()}
