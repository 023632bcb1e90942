# SPDX-License-Identifier: Apache-2.0
"""The static part of a train step: a value, which a config is made into.

It computes nothing.
"""

import dataclasses

from tba_jax.models.scoring import Scoring
from tba_jax.models.transformer import Remat
from tba_jax.train.objectives.base import Objective
from tba_jax.train.target import Target


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """The static part of a train step (hashable).

    Attributes:
        objective: what is minimised.
        target: what is trained towards.
        scoring: how policy and reference are scored.
        log_z_rate: learning rate of a learned log Z over the policy's.
        reference_reset_period: steps between reference := policy; 0: never.
        reference_ema_decay: per step, of a reference that is an average of the policy; 0: none is.
        optimizer_reset_period: steps after which moments begin anew; 0: never.
        micro_batch_rows: responses whose gradients are made at a time; 0: all.
        row_multiple: rows of a micro-batch are a multiple (devices that divide them).
        is_whole: all rows of a group are in one micro-batch.
        remat: as in `transformer.apply`.
        epochs: passes over a batch.
        minibatches: updates of a pass, each by so large a part of the batch.
        rounding_seed: of the stochastic rounding of what is stored in bfloat16; None: what is
            stored there is computed there, to the nearest.
        shows_tokens: a step also returns log-probs of the tokens of one prompt's responses.
    """

    objective: Objective
    target: Target
    scoring: Scoring
    log_z_rate: float = 1.0
    reference_reset_period: int = 0
    reference_ema_decay: float = 0.0
    optimizer_reset_period: int = 0
    micro_batch_rows: int = 0
    row_multiple: int = 1
    is_whole: bool = False
    remat: Remat = "none"
    epochs: int = 1
    minibatches: int = 1
    rounding_seed: int | None = None
    shows_tokens: bool = False

    @property
    def num_updates(self) -> int:
        """Of the optimiser, by one batch."""
        return self.epochs * self.minibatches
