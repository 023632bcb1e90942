# SPDX-License-Identifier: Apache-2.0
"""Static settings of a train step, derived from the config."""

import dataclasses

from tba_jax.models.scoring import Scoring
from tba_jax.models.transformer import Remat
from tba_jax.train.objectives.base import Objective
from tba_jax.train.target import Target


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """Static settings of a train step (hashable).

    Attributes:
        objective: objective to minimise.
        target: target distribution of training.
        scoring: settings of the log-probs of policy and reference.
        log_z_rate: learning rate of a learned log Z, relative to the policy's.
        reference_reset_period: steps between reference := policy; 0: never.
        reference_ema_decay: decay per step of a moving-average reference; 0: no average.
        optimizer_reset_period: steps between resets of the moments; 0: never.
        micro_batch_rows: rows per micro-batch; 0: all.
        row_multiple: number of devices that share the rows of a micro-batch; it divides them.
        is_whole: whether each group is in a single micro-batch.
        remat: as in `transformer.apply`.
        epochs: passes over a batch.
        minibatches: optimiser updates per pass.
        rounding_seed: seed of the stochastic rounding of arrays stored in bfloat16; None: round
            to nearest.
        shows_tokens: whether a step also returns token log-probs of one prompt's responses.
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
        """Number of optimiser updates per batch."""
        return self.epochs * self.minibatches
