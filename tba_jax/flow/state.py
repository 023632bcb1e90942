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
    """Interface of a part of a run whose state is saved in checkpoints.

    A restored part continues as if it had not been interrupted.
    """

    def state(self) -> PartState:
        """Return all state needed to continue; later changes of the part do not affect it."""
        ...

    def restore(self, state: PartState) -> None:
        """Replace the state by a result of `state`, of a part with the same settings."""
        ...
