# SPDX-License-Identifier: Apache-2.0
"""Trajectory Balance and related methods: one loss with settings, exact TB by default."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tba_jax.settings import field, need
from tba_jax.train.objectives.base import (
    GroupData,
    Loss,
    Objective,
    balance_metrics,
    tb_residual,
    vargrad_log_z,
)
from tba_jax.train.objectives.pieces import (
    baseline,
    centred,
    leave_one_out,
    log_ratio,
    share_outside,
    sum_over_tokens,
    summed_behavior,
)

# Values of `importance` that weight tokens; the others weight responses.
_OF_TOKENS = ("token_clip", "truncated", "masked")


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
    (log pi - log anchor) - r / beta, with log_z from the group. Without an anchor the loss is
    -A log pi, A without gradient, and beta is not read. docs/objectives.md lists the methods that
    these settings express.

    References:
        TBA, arXiv:2503.18929, eq. 3, 5 and 7; learned log Z: appendix B.3; TBA': section 6.
    """

    scale: Literal["advantage", "paper"] = field(
        "advantage", "advantage: beta/2 times the group's variance; paper: mean of squares"
    )
    log_z: Literal["vargrad", "leave_one_out", "mean_reward", "learned"] = field(
        "vargrad",
        "estimate of log Z: vargrad: group mean of r / beta minus the log-ratio; leave_one_out: "
        "the same mean over the other responses; mean_reward: group mean of r / beta; learned: a "
        "head on the prompt",
    )
    log_z_rate: float = field(
        1.0, "log_z=learned: learning rate of the head, divided by that of the policy", above=0
    )
    log_z_layers: int = field(
        1,
        "log_z=learned: layers of the head: 1: linear; more: with GELU and LayerNorm between them",
        at_least=1,
    )
    anchor: Literal["reference", "behavior", "none"] = field(
        "reference",
        "denominator of log-ratios: the reference; behavior: the policy that drew the response; "
        "none: no ratio, a policy gradient",
    )
    kl_center: Literal["live", "behavior", "none"] = field(
        "live",
        "log-ratio whose group mean is part of log Z: live: of the current policy; behavior: of "
        "the policy that sampled the responses; none: no log-ratio",
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

    @property
    def needs_behavior(self) -> bool:
        """Whether the settings make the loss read the sampler's log-probs."""
        is_read = self.anchor == "behavior" or self.kl_center == "behavior"
        return is_read or self.importance != "none" or self.anchor == "none"

    @property
    def needs_token_reference(self) -> bool:
        """Whether the settings clamp log-ratios to the reference per token."""
        return self.anchor == "reference" and self.kl_clamp > 0

    @property
    def beta_is(self) -> str:
        """Values of beta that the loss accepts: positive (it divides by beta), or unused.

        Beta is unused if the loss has no anchor.
        """
        return "unused" if self.anchor == "none" else "positive"

    @property
    def heads(self) -> tuple[Literal["log_z"], ...]:
        """Learned heads: log Z of prompts with log_z=learned."""
        return ("log_z",) if self.log_z == "learned" else ()

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
        has_anchor = self.anchor != "none"
        need(
            has_anchor or self.log_z != "learned",
            "objective.log_z",
            self.log_z,
            "without an anchor the loss has a baseline and no log Z",
            "Set --config.objective.log_z=vargrad.",
        )
        need(
            has_anchor or not self.kl_clamp,
            "objective.kl_clamp",
            self.kl_clamp,
            "without an anchor there is no log-ratio to clamp",
            "Set --config.objective.kl_clamp=0.",
        )
        need(
            self.kl_center == "live" or (has_anchor and self.log_z in ("vargrad", "leave_one_out")),
            "objective.kl_center",
            self.kl_center,
            "a log-ratio is centred only with an anchor and log_z=vargrad or leave_one_out",
            "Set --config.objective.kl_center=live.",
        )

    def __call__(self, data: GroupData, beta: Float[Array, ""] | float) -> Loss:
        if self.anchor == "none":
            return self._without_anchor(data)
        if self.is_exact:
            return self._exact(data, beta)
        gap = self._anchored(data) + self._token_flow(data)
        log_z = self._log_z(data, gap, data.reward / beta)
        t = gap - data.reward / beta + log_z
        mean = data.mean_over_responses(self._response_weight(data) * (jnp.square(t) / 2))
        loss = mean * (beta if self.scale == "advantage" else 2)
        residual = jax.lax.stop_gradient(gap - data.reward / beta)
        known = balance_metrics(data, residual, data.mean_over_group(t - residual))
        return Loss(loss, {**known, **self._ratio_metrics(data)})

    def _exact(self, data: GroupData, beta: Float[Array, ""] | float) -> Loss:
        """Return the loss of exact Trajectory Balance."""
        reference_logprob = jax.lax.stop_gradient(data.reference_logprob)
        residual = tb_residual(data.policy_logprob, reference_logprob, data.reward, beta=beta)
        log_z = vargrad_log_z(data, residual) if data.log_z is None else data.log_z
        mean_square = data.mean_over_responses(jnp.square(residual + log_z[:, None]))
        loss = mean_square * (beta / 2) if self.scale == "advantage" else mean_square
        return Loss(loss, balance_metrics(data, residual, log_z))

    def _without_anchor(self, data: GroupData) -> Loss:
        """Return a policy-gradient loss: the score of each response times its advantage."""
        advantage = data.reward - estimated_log_z(
            data, self.log_z, jnp.zeros_like(data.reward), data.reward
        )
        logprob = data.policy_logprob + self._token_flow(data)
        advantage = jax.lax.stop_gradient(self._response_weight(data) * advantage)
        loss = -data.mean_over_responses(advantage * logprob)
        return Loss(loss, self._ratio_metrics(data))

    def _anchored(self, data: GroupData) -> Float[Array, "p k"]:
        """Return log pi - log anchor of each response; gradients flow as through log pi.

        `kl_clamp` bounds the value of each token, not its gradient.
        """
        if self.anchor == "reference":
            if not self.kl_clamp:
                return data.policy_logprob - jax.lax.stop_gradient(data.reference_logprob)
            assert data.reference_token_logprobs is not None
            gap = data.policy_token_logprobs - data.reference_token_logprobs
            gap = jnp.where(data.mask, gap, 0)
        else:
            gap = log_ratio(data)
        if self.kl_clamp:
            gap = jnp.clip(gap, -self.kl_clamp, self.kl_clamp)
        flow = data.policy_logprob - jax.lax.stop_gradient(data.policy_logprob)
        return jax.lax.stop_gradient(sum_over_tokens(data, gap)) + flow

    def _log_z(
        self, data: GroupData, gap: Float[Array, "p k"], scaled_reward: Float[Array, "p k"]
    ) -> Float[Array, "p k"]:
        """Return log Z of each response's prompt.

        Args:
            data: the groups.
            gap: log pi - log anchor.
            scaled_reward: r / beta.
        """
        if data.log_z is not None:
            return jnp.broadcast_to(data.log_z[:, None], gap.shape)
        if self.kl_center == "none" or (self.kl_center, self.anchor) == ("behavior", "behavior"):
            gap = jnp.zeros_like(gap)
        elif self.kl_center == "behavior":
            gap = summed_behavior(data) - data.reference_logprob
        return estimated_log_z(data, self.log_z, gap, scaled_reward)

    def _token_flow(self, data: GroupData) -> Float[Array, "p k"]:
        """Return zeros whose gradient, added to that of log pi, gives each token its weight."""
        if self.importance not in _OF_TOKENS:
            return jnp.zeros_like(data.reward)
        ratio = jnp.exp(jax.lax.stop_gradient(log_ratio(data)))
        if self.importance == "truncated":
            weight = jnp.minimum(ratio, self.importance_cap)
        else:
            is_kept = (ratio >= self._floor) & (ratio <= self.importance_cap)
            weight = jnp.where(is_kept, ratio, 0)
        extra = (weight - 1) * data.policy_token_logprobs
        return sum_over_tokens(data, extra - jax.lax.stop_gradient(extra))

    def _response_weight(self, data: GroupData) -> Float[Array, "p k"]:
        """Return the factor by which each response's loss is multiplied; gradient stopped."""
        if self.importance not in ("sequence_clip", "topr"):
            return jnp.ones_like(data.reward)
        log_weight = jax.lax.stop_gradient(jnp.sum(log_ratio(data), axis=-1))
        if self.importance == "sequence_clip":
            return jnp.exp(jnp.minimum(log_weight, jnp.log(self.importance_cap)))
        is_good = centred(data, data.reward) > 0
        return jnp.where(is_good, 1.0, jnp.exp(jnp.minimum(log_weight, 0)))

    def _ratio_metrics(self, data: GroupData) -> dict[str, Float[Array, ""]]:
        """Return the share of tokens or responses whose ratio to the sampler is bounded."""
        if self.importance == "none":
            return {}
        cap = 1.0 if self.importance == "topr" else self.importance_cap
        share = share_outside(data, self._floor, cap, self.importance in _OF_TOKENS)
        return {"clip_fraction": jax.lax.stop_gradient(share)}

    @property
    def _floor(self) -> float:
        return self.importance_floor if self.importance == "masked" else 0.0


def estimated_log_z(
    data: GroupData, log_z: str, gap: Float[Array, "p k"], scaled_reward: Float[Array, "p k"]
) -> Float[Array, "p k"]:
    """Return log Z of each response's prompt, gradient stopped.

    Args:
        data: the groups.
        log_z: vargrad: mean of r / beta - gap; leave_one_out: that mean over the other responses;
            mean_reward: mean of r / beta.
        gap: log pi - log anchor, or the log-ratio that is centred instead.
        scaled_reward: r / beta.
    """
    gap, scaled_reward = jax.lax.stop_gradient((gap, scaled_reward))
    if log_z == "leave_one_out":
        return leave_one_out(data, scaled_reward - gap)
    found = baseline(data, scaled_reward if log_z == "mean_reward" else scaled_reward - gap)
    return jnp.broadcast_to(found[:, None], scaled_reward.shape)
