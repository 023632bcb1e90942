# SPDX-License-Identifier: Apache-2.0
"""Settings of training: batches, objective, optimizer and reference."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from tba_jax.settings import IN_A_FILE, Schedule, Section, field, need, share
from tba_jax.train.objectives import (
    Objective,
    is_objective,
    make_objective,
    objective_names,
    own_settings,
)


@dataclass(frozen=True)
class BatchSettings(Section):
    """Settings of the batches of a train step."""

    num_prompts: int = field(16, "p: prompts per optimiser step", at_least=1)
    micro_batch_rows: int = field(
        0,
        "responses (or packed rows) per micro-batch, whose gradients are summed; 0: the fastest "
        "number that fits the devices, by an estimate",
        at_least=0,
    )
    packed_length: int = field(
        0, "tokens per row that holds several responses; 0: one response per row", at_least=0
    )


@dataclass(frozen=True)
class ObjectiveSettings(Section):
    """Settings that every training objective has."""

    name: str = field(
        "tb",
        "objective: tb is Trajectory Balance, the others are baselines; each has settings of its "
        "own, listed below",
        among=(*objective_names(), IN_A_FILE),
    )
    group_size: int = field(16, "K: responses per prompt in a training group", at_least=2)
    beta: Schedule = field(
        Schedule(0.05),
        "KL coefficient; the target is pi_ref exp(r / beta); 0 only where the objective allows it",
        at_least=0,
    )
    reference_temperature: Schedule = field(
        Schedule(1.0), "gamma: divides log pi_ref in the target", above=0
    )
    reward_temperature: Schedule = field(
        Schedule(1.0), "divides the log of the whole target", above=0
    )
    mask_eos: bool = field(False, "leave EOS out of log pi, as the official GSM8K code does")
    own: tuple[tuple[str, Any], ...] = ()
    """Settings of the chosen objective that differ from its defaults: (name, value), sorted."""

    def replaced(self, values: Mapping[str, Any]) -> Self:
        """Return the settings with these values; `own` gets those that only one objective has.

        None keeps the objective's default. A new name drops what only other objectives have.
        """
        shared = {f.name for f in dataclasses.fields(self)} - {"own"}
        name, before = values.get("name", self.name), dict(self.own)
        if name != self.name and is_objective(name):
            known = {setting.name for setting in own_settings(name)}
            before = {n: v for n, v in before.items() if f"objective.{n}" in known}
        own = before | {n: v for n, v in values.items() if n not in shared}
        changed = {n: v for n, v in values.items() if n in shared}
        kept = sorted((n, v) for n, v in own.items() if v is not None)
        return dataclasses.replace(self, **changed, own=tuple(kept))

    @functools.cached_property
    def built(self) -> Objective:
        """Return the objective that these settings describe.

        Raises:
            ConfigError: the objective lacks one of the settings, or a value has another type.
        """
        return make_objective(self.name, dict(self.own))

    def check(self) -> None:
        self.built.check()
        need(
            min(self.beta.numbers) > 0 or self.built.needs.beta != "positive",
            "objective.beta",
            self.beta.plain,
            f"objective.name={self.name} divides by beta",
            "Give a beta that is above 0 at every step.",
        )


@dataclass(frozen=True)
class OptimizerSettings(Section):
    """Settings of the optimizer and its learning rate."""

    name: Literal["adamw", "adafactor"] = field(
        "adamw", "adafactor needs little memory; it ignores b2"
    )
    learning_rate: Schedule = field(
        Schedule(1e-4),
        'learning rate by step, such as "linear(1e-4, 0, warmup=10)"; START is its peak; 0: '
        "chosen by the number of trained parameters",
        at_least=0,
    )
    b2: float = share(0.999, "AdamW: decay of the squared gradient's mean; b1 is 0.9 and eps 1e-8")
    weight_decay: float = field(
        0.0, "decay of matrices; norms and biases do not decay", at_least=0.0
    )
    clip_norm: float = field(
        1.0, "maximum global norm of the gradient; 0: no clipping", at_least=0.0
    )

    def check(self) -> None:
        need(
            self.learning_rate.start > 0 or self.learning_rate == Schedule(0.0),
            "optimizer.learning_rate",
            self.learning_rate.plain,
            "must start above 0",
            "Write 0, without a schedule, for a rate that suits the size of the model.",
        )


@dataclass(frozen=True)
class ReferenceSettings(Section):
    """Settings of the reference policy pi_ref."""

    reset_period: int = field(
        0, "steps after which the policy replaces the reference; 0: never", at_least=0
    )
