# SPDX-License-Identifier: Apache-2.0
"""Numbers that move with the optimiser step: beta and the temperatures of the target.

Not the learning rate, which is optax's and stands still in a skipped step. A schedule is a value:
frozen, hashable, and equal to another that gives the same numbers by the same words.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A number at every optimiser step.

    constant:          start
    linear:            from start to final over `steps`, then constant (GSM8K)
    linear_then_jump:  the same line, cut at `jump_step` where it jumps to final (TL;DR)

    Attributes:
        start: at step 0.
        final: from the last of `steps` on, or from the jump.
        steps: at least 1 unless constant.
        shape: see above.
        jump_step: read by linear_then_jump alone.

    References:
        TBA, arXiv:2503.18929, appendix B.1 and B.2.
    """

    start: float
    final: float = 0.0
    steps: int = 0
    shape: Literal["constant", "linear", "linear_then_jump"] = "constant"
    jump_step: int = 0

    def at(self, step: Array | int) -> Float[Array, ""]:
        """The number at an optimiser step, counted from 0."""
        if self.shape == "constant":
            return jnp.float32(self.start)
        share = jnp.clip(jnp.asarray(step, jnp.float32) / self.steps, 0.0, 1.0)
        value = self.start + (self.final - self.start) * share
        if self.shape == "linear_then_jump":
            value = jnp.where(jnp.asarray(step) >= self.jump_step, self.final, value)
        return value.astype(jnp.float32)

    def is_always(self, value: float) -> bool:
        """Whether it never leaves `value`."""
        return self.start == value and (self.shape == "constant" or self.final == value)
