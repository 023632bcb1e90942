# SPDX-License-Identifier: Apache-2.0
"""Static settings of a train step: the target pi_ref exp(r / beta), its schedules, and sizes."""

import dataclasses

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from tba_jax.models.scoring import Scoring
from tba_jax.models.transformer import Remat
from tba_jax.settings import Schedule
from tba_jax.train.objectives.base import Objective


def value_at(schedule: Schedule, step: ArrayLike) -> Float[Array, ""]:
    """Return the schedule's value at an optimiser step, float32.

    Args:
        schedule: schedule with STEPS filled in (`Schedule.over`).
        step: step, counted from 0.

    References:
        Linear and step schedules of beta: TBA, arXiv:2503.18929, appendix B.1 and B.2.
    """
    start, final, steps = schedule.start, schedule.final, schedule.steps
    if schedule.shape == "constant":
        value = jnp.float32(start)
    else:
        assert steps is not None, "Schedule.over fills in STEPS"
        share = jnp.asarray(step, jnp.float32) - schedule.begin
        share = jnp.clip(share / steps, 0.0, 1.0)
        if schedule.shape == "cosine":
            share = (1 - jnp.cos(jnp.pi * share)) / 2
        value = start + (final - start) * share
    if schedule.warmup:
        # The first step uses START / warmup, because a rate of 0 would waste the first batch.
        rising = start * (jnp.asarray(step, jnp.float32) + 1) / schedule.warmup
        value = jnp.where(jnp.asarray(step) < schedule.warmup, rising, value)
    if schedule.jump is not None:
        value = jnp.where(jnp.asarray(step) >= schedule.jump, final, value)
    return value.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Target:
    """Target distribution of training.

    log R = [log pi_ref(y|x) / reference_temperature + r(x, y) / beta] / reward_temperature

    A high reference temperature flattens the reference, so fluency counts less; a high reward
    temperature flattens the whole target.

    Attributes:
        beta: KL coefficient, > 0.
        reference_temperature: gamma, > 0.
        reward_temperature: T_r, > 0.

    References:
        TBA, arXiv:2503.18929, section 3.1; temperatures: appendix B.3 (red-teaming).
    """

    beta: Schedule
    reference_temperature: Schedule = Schedule(1.0)
    reward_temperature: Schedule = Schedule(1.0)

    def temperatures(self, step: Array | int) -> dict[str, Float[Array, ""]]:
        """Return the temperatures at a step by name; {} for the target pi_ref exp(r / beta)."""
        if self.reference_temperature.is_always(1.0) and self.reward_temperature.is_always(1.0):
            return {}
        return {
            "reference_temperature": value_at(self.reference_temperature, step),
            "reward_temperature": value_at(self.reward_temperature, step),
        }


def tempered_target(
    reference_logprob: Float[Array, "*groups"],
    reward: Float[Array, "p k"],
    *,
    reference_temperature: Float[Array, ""] | float,
    reward_temperature: Float[Array, ""] | float,
) -> tuple[Float[Array, "*groups"], Float[Array, "p k"]]:
    """Return (reference_logprob, reward), scaled so that an objective's target is tempered.

    Args:
        reference_logprob: log pi_ref, per token or per response.
        reward: raw reward.
        reference_temperature, reward_temperature: as in `Target`.
    """
    return (
        reference_logprob / (reference_temperature * reward_temperature),
        reward / reward_temperature,
    )


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """Static settings of a train step (hashable).

    Attributes:
        objective: objective to minimise.
        target: target distribution of training.
        scoring: settings of the log-probs of policy and reference.
        log_z_rate: learning rate of a learned log Z, relative to the policy's.
        reference_reset_period: steps between updates of the reference to the policy; 0: never.
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
