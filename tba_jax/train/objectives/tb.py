# SPDX-License-Identifier: Apache-2.0
"""Trajectory Balance and related methods: one loss with settings, exact TB by default."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tba_jax.settings import field
from tba_jax.train.objectives import switches
from tba_jax.train.objectives.base import (
    BALANCE,
    GroupData,
    Loss,
    Objective,
    balance_metrics,
    tb_residual,
    vargrad_log_z,
)
from tba_jax.train.objectives.pieces import centred, group_normalised, share_outside


@dataclasses.dataclass(frozen=True)
class TrajectoryBalance(Objective):
    """Trajectory-balance loss, in VarGrad form unless log Z is learned; accepts any sampler.

    paper:      (1 / (p K)) sum_ij w_ij (log_z_i + residual_ij)^2     (no factor 1/2)
    advantage:  beta / 2 times the paper's loss; with VarGrad its gradient is exactly
                -(1 / (p K)) sum_ij w_ij A_ij grad log pi(y_ij|x_i) with
                A = (r - mean r) - beta (kl - mean kl), kl = log pi - log pi_ref

    A weight w_ij is the number of times that the batch contains y_ij. The weights of a prompt
    sum to K; all means are weighted.

    `advantage` keeps the gradient in units of the reward, so that gradient clipping has the same
    meaning at every beta, and a schedule of beta does not change the effective learning rate.

    Every other setting is independent, and the defaults are exact Trajectory Balance: residual =
    (log pi - log anchor) - r / beta, with log_z from the group. The loss is a convex function
    (`shape`) of t = residual + log_z. Without an anchor the loss is -A log pi, A without gradient,
    and beta is not read. docs/objectives.md lists the methods that these settings express. With
    balance=turn the terms of the mean are sums of squares over the turns of an episode.

    References:
        TBA, arXiv:2503.18929, eq. 3, 5 and 7; learned log Z: appendix B.3; TBA': section 6.
    """

    scale: Literal["advantage", "paper"] = field(
        "advantage", "advantage: beta/2 times the group's variance; paper: mean of squares"
    )
    log_z: Literal["vargrad", "leave_one_out", "mean_reward", "softmean", "learned", "cached"] = (
        field(
            "vargrad",
            "estimate of log Z: vargrad: group mean of r / beta minus the log-ratio; leave_one_out:"
            " the same mean over the other responses; mean_reward: group mean of r / beta; "
            "softmean: log mean exp r / beta; learned: a head on the prompt; cached: softmean of "
            "the start model's responses to the prompt, or vargrad for a prompt without them",
        )
    )
    value_temperature: float = field(
        0.0,
        "log_z=softmean or cached: temperature of the soft value, in units of the reward; 0: beta; "
        "higher values approach the mean reward",
        at_least=0,
    )
    log_z_rate: float = field(
        1.0, "log_z=learned: learning rate of the head, divided by that of the policy", above=0
    )
    log_z_layers: int = field(
        1,
        "log_z=learned: layers of the head: 1: linear; more: with GELU and LayerNorm between them",
        at_least=1,
    )
    balance: Literal["episode", "turn"] = field(
        "episode",
        "unit that has a residual: episode: the whole response; turn: each turn of an episode, "
        "between learned soft values, which is exact for random observations",
    )
    anchor: Literal["reference", "behavior", "ema_surrogate", "none"] = field(
        "reference",
        "denominator of log-ratios: the reference; behavior: the policy that drew the response; "
        "ema_surrogate: an estimate of a moving average of the policy; none: no ratio, a policy "
        "gradient",
    )
    shape: Literal["squared", "linex", "cosh"] = field(
        "squared",
        "convex function of the residual t: squared: t^2 / 2; linex: e^t - t - 1, which penalises "
        "too much probability more; cosh: cosh t - 1",
    )
    kl_center: Literal["live", "behavior", "none"] = field(
        "live",
        "log-ratio whose group mean is part of log Z: live: of the current policy; behavior: of "
        "the policy that sampled the responses; none: no log-ratio",
    )
    baseline_shift: float = field(
        0.0, "amount subtracted from the group's baseline, in units of the reward", at_least=0
    )
    length_normalise: bool = field(False, "divide log-ratios by the number of tokens")
    reward_transform: Literal["raw", "group_normalised"] = field(
        "raw", "group_normalised: (reward - group mean) / group standard deviation"
    )
    importance: Literal["none", "token_clip", "sequence_clip", "topr", "truncated", "masked"] = (
        field(
            "none",
            "weight by the ratio to the sampler, without gradient. Per token: token_clip: 0 above "
            "the cap; truncated: at most the cap; masked: 0 outside floor and cap. Per response: "
            "sequence_clip: at most the cap; topr: at most 1 for responses below the group's mean. "
            "If this setting is not given, exact Trajectory Balance uses token_clip where weights "
            "reach the searchers as files (fleet, whole_hosts)",
        )
    )
    importance_cap: float = field(8.0, "largest ratio to the sampler", above=0)
    importance_floor: float = field(
        0.5,
        "importance=masked: smallest ratio to the sampler; tokens below it have weight 0",
        above=0,
    )
    kl_clamp: float = field(0.0, "bound of each token's log-ratio; 0: none", at_least=0)
    ema_decay: float = field(
        0.9, "anchor=ema_surrogate: decay of the estimated average, per step", above=0, at_most=1
    )

    @property
    def needs_behavior(self) -> bool:
        """Whether the settings make the loss read the sampler's log-probs."""
        reads = self.anchor in ("behavior", "ema_surrogate") or self.kl_center == "behavior"
        return reads or self.importance != "none" or self.anchor == "none"

    @property
    def needs_token_reference(self) -> bool:
        """Whether the settings clamp log-ratios per token, or sum them per turn."""
        return self.balance == "turn" or (self.anchor == "reference" and self.kl_clamp > 0)

    @property
    def needs_soft_value(self) -> bool:
        """Whether log Z is cached."""
        return self.log_z == "cached"

    @property
    def beta_is(self) -> str:
        """Values of beta that the loss accepts: positive (it divides by beta), or unused.

        Beta is unused if the loss has no anchor.
        """
        return "unused" if self.anchor == "none" else "positive"

    @property
    def heads(self) -> tuple[Literal["log_z", "value"], ...]:
        """Learned heads, with log_z=learned: log Z of prompts, or the value of every state."""
        if self.log_z != "learned":
            return ()
        return ("value",) if self.balance == "turn" else ("log_z",)

    @property
    def is_exact(self) -> bool:
        """Whether the loss is exact Trajectory Balance, not bounded, clipped or approximated."""
        plain = TrajectoryBalance(
            self.scale,
            self.log_z,
            log_z_rate=self.log_z_rate,
            log_z_layers=self.log_z_layers,
        )
        return self == plain and self.log_z in ("vargrad", "learned")

    def check(self, shared: Any) -> None:
        switches.check(self, shared)

    def __call__(self, data: GroupData, beta: Float[Array, ""] | float) -> Loss:
        if self.anchor == "none":
            return self._without_anchor(data)
        if self.balance == "turn":
            return self._of_turns(data, beta)
        if self.is_exact:
            return self._exact(data, beta)
        reward = self._reward(data)
        gap = switches.anchored(data, self.anchor, self.ema_decay, self.kl_clamp)
        gap = gap + switches.token_flow(
            data, self.importance, self.importance_floor, self.importance_cap
        )
        if self.length_normalise:
            gap = gap * switches.per_token(data)
        log_z = self._log_z(data, gap, reward / beta, beta)
        t = gap - reward / beta + log_z - self.baseline_shift / beta
        weight = switches.response_weight(
            data, self.importance, self.importance_cap, centred(data, reward)
        )
        mean = data.mean_over_responses(weight * switches.shaped(t, self.shape))
        loss = mean * (beta if self.scale == "advantage" else 2)
        residual = jax.lax.stop_gradient(gap - reward / beta)
        known = balance_metrics(data, residual, data.mean_over_group(t - residual))
        return Loss(loss, {**known, **self._cache_metrics(data), **self._ratio_metrics(data)})

    def _exact(self, data: GroupData, beta: Float[Array, ""] | float) -> Loss:
        """Return the loss of exact Trajectory Balance."""
        reference_logprob = jax.lax.stop_gradient(data.reference_logprob)
        residual = tb_residual(data.policy_logprob, reference_logprob, data.reward, beta=beta)
        log_z = vargrad_log_z(data, residual) if data.log_z is None else data.log_z
        mean_square = data.mean_over_responses(jnp.square(residual + log_z[:, None]))
        loss = mean_square * (beta / 2) if self.scale == "advantage" else mean_square
        return Loss(loss, balance_metrics(data, residual, log_z))

    def _of_turns(self, data: GroupData, beta: Float[Array, ""] | float) -> Loss:
        """Return the loss of exact Trajectory Balance with a residual for every turn.

        residual = log pi - log pi_ref + log Z(s) - target     sums over the tokens of a turn

        log Z(s) is the learned soft value divided by beta, at the first token of a turn. The target
        is log Z(s) of the next turn, gradient stopped; for the last turn it is r / beta.
        """
        assert data.token_values is not None, "balance=turn needs the value head"
        assert data.reference_token_logprobs is not None, "balance=turn needs the reference"
        reference = jax.lax.stop_gradient(data.reference_token_logprobs)
        gap = jnp.where(data.mask, data.policy_token_logprobs - reference, 0)
        turns = switches.turns_of(data)
        log_z = turns.sums(jnp.where(turns.begins, data.token_values, 0))
        after = jnp.pad(log_z[..., 1:], ((0, 0), (0, 0), (0, 1)))
        target = jnp.where(turns.is_last, (data.reward / beta)[..., None], after)
        residual = turns.sums(gap) + log_z - jax.lax.stop_gradient(target)
        square = jnp.sum(jnp.where(turns.is_turn, jnp.square(residual), 0), axis=-1)
        mean_square = data.mean_over_responses(square)
        loss = mean_square * (beta / 2) if self.scale == "advantage" else mean_square
        first = data.mean_over_prompts(data.mean_over_group(log_z[..., 0]))
        values = jax.lax.stop_gradient((mean_square, first, jnp.sqrt(mean_square)))
        return Loss(loss, dict(zip(BALANCE, values, strict=True)))

    def _without_anchor(self, data: GroupData) -> Loss:
        """Return a policy-gradient loss: the score of each response times its advantage."""
        reward = self._reward(data)
        baseline = switches.estimated_log_z(data, self.log_z, jnp.zeros_like(reward), reward)
        advantage = reward - baseline + self.baseline_shift
        logprob = data.policy_logprob + switches.token_flow(
            data, self.importance, self.importance_floor, self.importance_cap
        )
        if self.length_normalise:
            logprob = logprob * switches.per_token(data)
        weight = switches.response_weight(
            data, self.importance, self.importance_cap, centred(data, reward)
        )
        advantage = jax.lax.stop_gradient(weight * advantage)
        loss = -data.mean_over_responses(advantage * logprob)
        return Loss(loss, self._ratio_metrics(data))

    def _reward(self, data: GroupData) -> Float[Array, "p k"]:
        is_raw = self.reward_transform == "raw"
        return data.reward if is_raw else group_normalised(data, data.reward)

    def _log_z(
        self,
        data: GroupData,
        gap: Float[Array, "p k"],
        scaled_reward: Float[Array, "p k"],
        beta: Float[Array, ""] | float,
    ) -> Float[Array, "p k"]:
        if data.log_z is not None:
            return jnp.broadcast_to(data.log_z[:, None], gap.shape)
        if self.log_z == "cached":
            assert data.soft_value is not None, "log_z=cached needs the buffer's soft values"
            own = switches.estimated_log_z(data, "vargrad", gap, scaled_reward)
            return jnp.where(jnp.isnan(data.soft_value), own, data.soft_value / beta)
        if self.kl_center == "behavior":
            gap = switches.sampled_anchored(data, self.anchor)
            gap = gap * switches.per_token(data) if self.length_normalise else gap
        elif self.kl_center == "none":
            gap = jnp.zeros_like(gap)
        sharpness = beta / self.value_temperature if self.value_temperature else 1.0
        return switches.estimated_log_z(data, self.log_z, gap, scaled_reward, sharpness)

    def _cache_metrics(self, data: GroupData) -> dict[str, Float[Array, ""]]:
        """Return the share of responses whose prompt has a cached soft value."""
        if data.soft_value is None:
            return {}
        is_known = (~jnp.isnan(data.soft_value)).astype(jnp.float32)
        return {"cached_share": data.mean_over_responses(is_known)}

    def _ratio_metrics(self, data: GroupData) -> dict[str, Float[Array, ""]]:
        """Return the share of tokens or responses whose ratio to the sampler is bounded."""
        if self.importance == "none":
            return {}
        floor = self.importance_floor if self.importance == "masked" else 0.0
        cap = 1.0 if self.importance == "topr" else self.importance_cap
        is_of_tokens = self.importance in ("token_clip", "truncated", "masked")
        return {
            "clip_fraction": jax.lax.stop_gradient(share_outside(data, floor, cap, is_of_tokens))
        }


OBJECTIVE = TrajectoryBalance
