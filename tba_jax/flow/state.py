# SPDX-License-Identifier: Apache-2.0
"""Checkpoint interface of the parts of a run."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np


class PartState(NamedTuple):
    """State of one part at one instant, copied.

    Attributes:
        arrays: flat arrays by name.
        meta: JSON-compatible values of the state besides the arrays.
    """

    arrays: Mapping[str, np.ndarray]
    meta: Any


class Saveable(Protocol):
    """A part with state. Restored from its state, it continues as if never interrupted."""

    def state(self) -> PartState:
        """Return all state needed to continue; later changes of the part do not affect it."""
        ...

    def restore(self, state: PartState) -> None:
        """Replace the state of this part by one that `state` returned, with the same settings."""
        ...
