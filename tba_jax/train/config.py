# SPDX-License-Identifier: Apache-2.0
"""Settings of training: batches, objective, optimizer and reference."""

from dataclasses import dataclass
from typing import Literal

from tba_jax.settings import Section, field, need, share
from tba_jax.train.objectives.registry import make_objective, objective_names


@dataclass(frozen=True)
class BatchSettings(Section):
    """Batches of the train step."""

    num_prompts: int = field(16, "p: prompts per optimiser step", at_least=1)
    num_length_buckets: int = field(
        3, "padded lengths that training and decoding compile for", at_least=1
    )
    micro_batch_rows: int = field(
        0,
        "responses (or packed rows) per micro-batch, whose gradients are summed; 0: all",
        at_least=0,
    )
    share_prompts: bool = field(
        False,
        "compute a prompt once for its responses, in training and for the reference, where they "
        "fit a micro-batch; gains where prompts are not far shorter than responses",
    )
    packed_length: int = field(
        0, "tokens of rows that hold several responses; 0: one response a row", at_least=0
    )
    logprob_chunk_tokens: int = field(
        8192,
        "tokens, over all devices, for which a block of logits (of the vocabulary) exists at a "
        "time",
        at_least=1,
    )


@dataclass(frozen=True)
class ObjectiveSettings(Section):
    """What is minimised."""

    name: str = field(
        "tb", "tb: Trajectory Balance; the others are baselines", among=objective_names()
    )
    group_size: int = field(16, "K: responses per prompt in a training group", at_least=2)
    beta: float = field(
        0.05, "KL coefficient at step 0; the target is pi_ref exp(r / beta)", above=0
    )
    beta_schedule: Literal["constant", "linear", "linear_then_jump"] = field(
        "constant", "how beta moves to beta_final"
    )
    beta_final: float = field(0.05, "beta after the schedule", above=0)
    beta_steps: int = field(0, "steps over which beta moves linearly to beta_final", at_least=0)
    beta_jump_step: int = field(0, "linear_then_jump: step of the jump to beta_final", at_least=0)
    weights: Literal["drawn", "equal"] = field(
        "drawn",
        "drawn: a response counts as often as it was drawn; equal: every distinct response of a "
        "group the same, which learns from rare ones sooner; only where the objective assumes "
        "nothing of the sampler, as Trajectory Balance, else as drawn",
    )
    scale: Literal["advantage", "paper"] = field(
        "advantage", "advantage: beta/2 of the variance; paper: mean of squares"
    )
    log_z: Literal["vargrad", "learned"] = field(
        "vargrad", "vargrad: the group's estimate; learned: a head on the prompt"
    )
    log_z_rate: float = field(1.0, "learned log Z: its learning rate over the policy's", above=0)
    reference_temperature: float = field(1.0, "gamma: divides log pi_ref in the target", above=0)
    reference_temperature_final: float = field(
        1.0, "gamma after reference_temperature_steps", above=0
    )
    reference_temperature_steps: int = field(
        0, "steps over which gamma moves; 0: constant", at_least=0
    )
    reward_temperature: float = field(1.0, "divides the log of the whole target", above=0)
    reward_temperature_final: float = field(
        1.0, "its value after reward_temperature_steps", above=0
    )
    reward_temperature_steps: int = field(0, "steps over which it moves; 0: constant", at_least=0)
    mask_eos: bool = field(False, "leave EOS out of log pi, as the official GSM8K code does")

    def check(self) -> None:
        if self.beta_schedule == "constant":
            need(
                self.beta_final == self.beta or self.beta_steps == 0,
                "objective.beta_final",
                self.beta_final,
                "a constant beta does not move",
                "Set --config.objective.beta_schedule=linear.",
            )
        need(
            self.beta_schedule == "constant" or self.beta_steps >= 1,
            "objective.beta_steps",
            self.beta_steps,
            f"objective.beta_schedule={self.beta_schedule} needs a length",
            "Give the number of steps.",
        )
        for name in ("reference_temperature", "reward_temperature"):
            start, final = getattr(self, name), getattr(self, f"{name}_final")
            need(
                getattr(self, f"{name}_steps") > 0 or final == start,
                f"objective.{name}_final",
                final,
                "a temperature that is constant does not move",
                f"Set --config.objective.{name}_steps to the number of steps.",
            )
        need(
            self.log_z == "vargrad" or "log_z" in make_objective(self).heads,
            "objective.log_z",
            self.log_z,
            f"objective.name={self.name} has no log Z to learn",
            "Set --config.objective.log_z=vargrad.",
        )


@dataclass(frozen=True)
class OptimizerSettings(Section):
    """The optimizer and its learning rate."""

    name: Literal["adamw", "adafactor"] = field(
        "adamw", "adafactor has little state, and no use for b1, b2 and eps"
    )
    learning_rate: float = field(1e-4, "peak", above=0)
    schedule: Literal["constant", "linear", "cosine", "wsd"] = field(
        "constant", "after warm-up; wsd: warm-up, stable, decay"
    )
    warmup_steps: int = field(0, "linear from 0", at_least=0)
    stable_steps: int = field(0, "wsd: steps at the peak after warm-up", at_least=0)
    decay_steps: int = field(
        0, "wsd, linear, cosine: decay horizon; 0: to the last step", at_least=0
    )
    b1: float = share(0.9, "AdamW: decay of the gradient's mean")
    b2: float = share(0.999, "AdamW: decay of the squared gradient's mean")
    eps: float = field(1e-8, "AdamW: added to the root of the squared gradient's mean", above=0)
    weight_decay: float = field(0.0, "on matrices, not on norms and biases", at_least=0.0)
    clip_norm: float = field(1.0, "global gradient norm; 0: no clipping", at_least=0.0)
    rounding: Literal["nearest", "stochastic"] = field(
        "nearest",
        "of what is trained and kept in bfloat16; stochastic: computed in float32, rounded up or "
        "down at random, so that small updates count",
    )
    max_nonfinite_steps: int = field(3, "skipped steps in a row that end the run", at_least=1)

    def check(self) -> None:
        need(
            self.schedule != "wsd" or self.decay_steps >= 1,
            "optimizer.decay_steps",
            self.decay_steps,
            "optimizer.schedule=wsd needs a decay horizon",
            "Give the number of steps.",
        )


@dataclass(frozen=True)
class ReferenceSettings(Section):
    """The reference policy pi_ref."""

    placement: Literal["searcher", "trainer"] = field(
        "searcher", "where log pi_ref is scored: when drawn, or at use"
    )
    reset_period: int = field(0, "steps between reference := policy; 0: never", at_least=0)

    def check(self) -> None:
        need(
            not self.reset_period or self.placement == "trainer",
            "reference.reset_period",
            self.reset_period,
            "a reference that moves must be scored at use",
            "Set --config.reference.placement=trainer.",
        )
