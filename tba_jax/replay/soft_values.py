# SPDX-License-Identifier: Apache-2.0
"""SoftValues: soft value of every prompt under the run's start policy.

V(x) = t log mean exp(r / t) over the responses of version 0. If the reference is frozen, version 0
is the reference, and V at t = beta is beta log Z of the target, as in A*-PO and DISA. Invariants: a
response counts once, in order of arrival, so a replayed schedule has the same values; responses of
later versions never count.

References:
    A*-PO, arXiv:2505.20686; DISA, arXiv:2605.17295.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from tba_jax.flow.state import PartState
from tba_jax.flow.trajectory import Group

_NAMES = ("soft_ids", "soft_counts", "soft_sums")


class SoftValues:
    """Soft values by prompt.

    Args:
        temperature: t, in units of the reward.
        sampling_temperature: temperature of the policy; responses sampled at other temperatures
            do not count.
    """

    def __init__(self, temperature: float, sampling_temperature: float) -> None:
        self._temperature = temperature
        self._sampling_temperature = sampling_temperature
        # Number of responses of a prompt, and log sum exp(r / t) over them.
        self._known: dict[int, tuple[int, float]] = {}

    def __len__(self) -> int:
        """Return the number of prompts with a value."""
        return len(self._known)

    def take_in(self, group: Group) -> None:
        """Count the group's responses that the start policy drew."""
        for y in group.trajectories:
            if y.version_max == 0 and y.sampling_temperature == self._sampling_temperature:
                number, total = self._known.get(y.prompt_id, (0, -math.inf))
                total = float(np.logaddexp(total, y.reward / self._temperature))
                self._known[y.prompt_id] = (number + 1, total)

    def at(self, prompt_id: int) -> float:
        """Return V of a prompt; nan without responses of the start policy."""
        if prompt_id not in self._known:
            return math.nan
        number, total = self._known[prompt_id]
        return self._temperature * (total - math.log(number))

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the values as arrays, for a file."""
        counts, sums = zip(*self._known.values(), strict=True) if self._known else ((), ())
        columns = (
            np.array(list(self._known), np.int64),
            np.array(counts, np.int64),
            np.array(sums, np.float64),
        )
        return dict(zip(_NAMES, columns, strict=True))

    def restore(self, state: PartState) -> None:
        """Restore the values from saved arrays."""
        columns = (state.arrays[name].tolist() for name in _NAMES)
        self._known = {i: (n, x) for i, n, x in zip(*columns, strict=True)}


def divided(states: Sequence[PartState], keep: Callable[[int], bool]) -> dict[str, np.ndarray]:
    """Return the arrays of a new buffer, merged from old buffers; {} if all are empty.

    Args:
        states: states of the buffers.
        keep: prompt ID -> whether the new buffer has that prompt.
    """
    if _NAMES[0] not in states[0].arrays:
        return {}
    merged = SoftValues(1.0, 1.0)
    for state in states:
        of_one = SoftValues(1.0, 1.0)
        of_one.restore(state)
        for prompt_id, (number, total) in of_one._known.items():
            if keep(prompt_id):
                before, known = merged._known.get(prompt_id, (0, -math.inf))
                total = float(np.logaddexp(known, total))
                merged._known[prompt_id] = (before + number, total)
    return merged.arrays()
