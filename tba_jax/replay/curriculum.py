# SPDX-License-Identifier: Apache-2.0
"""Treatment of drawn groups whose rewards are all equal (replay.equal_rewards)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tba_jax.flow.trajectory import Draw
from tba_jax.replay.config import ReplaySettings

TRIES = 8
"""Maximum draws per slot; the last draw is trained on even if its rewards are equal."""


def is_wanted(settings: ReplaySettings, draw: Draw) -> bool:
    """Return False for a group of equal rewards with replay.equal_rewards=redraw."""
    return settings.equal_rewards != "redraw" or not _is_level(draw)


def without_level(settings: ReplaySettings, draws: Sequence[Draw]) -> tuple[list[Draw], int]:
    """Empty the slots of groups with equal rewards, for replay.equal_rewards=skip.

    A batch that has only such groups stays as it is.

    Returns:
        The batch, and the number of slots that were emptied.
    """
    level = [settings.equal_rewards == "skip" and _is_level(draw) for draw in draws]
    if all(level):
        return list(draws), 0
    nothing: dict[str, Any] = {
        "trajectories": (),
        "weights": (),
        "trajectory_ids": (),
        "num_repeats": 0,
    }
    kept = [
        draw._replace(**nothing) if is_level else draw
        for draw, is_level in zip(draws, level, strict=True)
    ]
    return kept, sum(level)


def _is_level(draw: Draw) -> bool:
    return float(np.ptp([y.reward for y in draw.trajectories])) == 0
