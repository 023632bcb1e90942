# SPDX-License-Identifier: Apache-2.0
"""Which drawn groups a batch wants: those that teach something, by their prompt's past too.

It looks at rewards alone; the buffer draws, and draws again. Invariant: with the default settings
every group is wanted, and nothing is drawn that would not be drawn without it.
"""

import numpy as np

from tba_jax.flow.trajectory import Draw
from tba_jax.replay.config import ReplaySettings
from tba_jax.replay.store import TrajectoryStore

# A slot is drawn at most so often; what comes last is trained on whatever it is.
TRIES = 8


def pass_rates(settings: ReplaySettings, step: int) -> tuple[float, float]:
    """The bounds of a prompt's mean reward at a step of the trainer."""
    low, high = settings.pass_rate_low, settings.pass_rate_high
    if not settings.pass_rate_steps:
        return low, high
    share = min(1.0, step / settings.pass_rate_steps)
    final = settings.pass_rate_low_final, settings.pass_rate_high_final
    return low + share * (final[0] - low), high + share * (final[1] - high)


def is_wanted(settings: ReplaySettings, draw: Draw, store: TrajectoryStore, step: int) -> bool:
    """Whether a group is to be trained on.

    Args:
        settings: what is asked of a group.
        draw: the group.
        store: holds what else its prompt has, unless this draw used it up.
        step: of the trainer.
    """
    low, high = pass_rates(settings, step)
    rewards = [y.reward for y in draw.trajectories]
    if settings.equal_rewards == "redraw" and np.ptp(rewards) == 0:
        return False
    if low == 0.0 and high == 1.0:
        return True
    weights = draw.weights
    if draw.prompt.prompt_id in store:
        slots = store.slots(draw.prompt.prompt_id)
        rewards, weights = store.rows["reward"][slots], store.rows["count"][slots]
    return low <= float(np.average(rewards, weights=weights)) <= high
