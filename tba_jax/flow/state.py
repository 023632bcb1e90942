# SPDX-License-Identifier: Apache-2.0
"""What a part of a run gives to a checkpoint, and takes back from one."""

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
