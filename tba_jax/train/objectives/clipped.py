# SPDX-License-Identifier: Apache-2.0
"""Objectives that clip the ratio to the sampler: GRPO and its relatives, proximal RLOO, VinePPO.

Pi is the policy and mu the sampler. A_j is the advantage of response j, w_j its weight, and rho the
ratio pi / mu of a token. Each loss has the form -mean of min(rho A, clip(rho, 1 - low, 1 + high)
A), except that of CISPO.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tba_jax.settings import Schedule, field
from tba_jax.train.objectives.base import GroupData, Loss, Objective
from tba_jax.train.objectives.pieces import (
    centred,
    clipped_gain,
    group_normalised,
    is_clipped,
    k3,
    leave_one_out,
    log_ratio,
    mean_of_each,
    num_counted,
    regularised,
    sum_over_tokens,
    summed_behavior,
    with_balance,
)


@dataclasses.dataclass(frozen=True)
class Clipped(Objective):
    """Base of the objectives with two clips.

    Attributes:
        clip_low, clip_high: how far a ratio may fall below and rise above 1.
    """

    clip_low: float = field(0.2, "how far a ratio may fall below 1 before it is clipped", above=0)
    clip_high: float = field(0.2, "how far a ratio may rise above 1 before it is clipped", above=0)

    needs_behavior = True
    beta_is = "unused"

    def clip(
        self, ratio: Float[Array, "*n"], advantage: Float[Array, "*n"]
    ) -> tuple[Float[Array, "*n"], Float[Array, "*n"]]:
        """Return (min(rho A, clip(rho) A), 1 where it has no gradient)."""
        clips = self.clip_low, self.clip_high
        return clipped_gain(ratio, advantage, *clips), is_clipped(ratio, advantage, *clips)


@dataclasses.dataclass(frozen=True)
class Grpo(Clipped):
    """Group-relative policy optimisation: deviations of the group, and a KL term per token.

    A_j = (r_j - mean) / (std + 1e-4), std with K - 1
    loss = -(1 / (p K)) sum_j w_j (1 / |y_j|) sum_t [min(rho A, clip(rho) A) - beta k3]

    for k3 = exp(g) - g - 1, g = log pi_ref - log pi.

    Attributes:
        beta: KL coefficient of the run, read only to detect beta = 0 in every step: no reference is
            needed then.

    References:
        DeepSeekMath, arXiv:2402.03300, eq. 3 and 4; TRL `GRPOTrainer`, loss_type="grpo".
    """

    beta: Schedule = Schedule(0.04)

    beta_is = "any"

    @property
    def needs_token_reference(self) -> bool:
        return not self.beta.is_always(0.0)

    def __call__(self, data: GroupData, beta: Float[Array, ""] | float) -> Loss:
        advantage = group_normalised(data, data.reward)[..., None]
        gain, clipped = self.clip(jnp.exp(log_ratio(data)), advantage)
        if self.needs_token_reference:
            gain = gain - beta * k3(data)
        loss = -data.mean_over_responses(mean_of_each(data, gain))
        return with_balance(data, beta, loss, clip_fraction=data.mean_over_tokens(clipped))


@dataclasses.dataclass(frozen=True)
class DrGrpo(Clipped):
    """GRPO with centred rewards, without division by deviation or length, and without a KL term.

    A_j = r_j - mean
    loss = -(1 / (p K)) sum_j w_j sum_t min(rho A_j, clip(rho) A_j)

    The paper divides by the maximum response length. Here the divisor is 1, so that gradients are
    in units of the reward, as in RLOO.

    References:
        Understanding R1-Zero-like training, arXiv:2503.20783.
    """

    def __call__(self, data: GroupData, beta: Float[Array, ""] | float) -> Loss:
        advantage = centred(data, data.reward)[..., None]
        gain, clipped = self.clip(jnp.exp(log_ratio(data)), advantage)
        loss = -data.mean_over_responses(sum_over_tokens(data, gain))
        return with_balance(data, beta, loss, clip_fraction=data.mean_over_tokens(clipped))


@dataclasses.dataclass(frozen=True)
class Dapo(Clipped):
    """GRPO with a wider upper clip and a mean over all tokens of the batch, without a KL term.

    loss = -(1 / sum |y_j|) sum_j w_j sum_t min(rho A_j, clip(rho, 1 - low, 1 + high) A_j)

    DAPO's dynamic sampling is a setting of the buffer: `replay.equal_rewards=redraw`.

    References:
        DAPO, arXiv:2503.14476, eq. 8.
    """

    clip_high: float = field(0.28, "how far a ratio may rise above 1 before it is clipped", above=0)

    def __call__(self, data: GroupData, beta: Float[Array, ""] | float) -> Loss:
        advantage = group_normalised(data, data.reward)[..., None]
        gain, clipped = self.clip(jnp.exp(log_ratio(data)), advantage)
        loss = -data.mean_over_tokens(gain)
        return with_balance(data, beta, loss, clip_fraction=data.mean_over_tokens(clipped))


@dataclasses.dataclass(frozen=True)
class Gspo(Clipped):
    """GRPO with one ratio per response, the geometric mean of its token ratios.

    s_j = (pi(y_j) / mu(y_j))^(1 / |y_j|)
    loss = -(1 / (p K)) sum_j w_j min(s_j A_j, clip(s_j, 1 - low, 1 + high) A_j)

    References:
        GSPO, arXiv:2507.18071, eq. 5 to 7; clips of section 5.1.
    """

    clip_low: float = field(3e-4, "how far a ratio may fall below 1 before it is clipped", above=0)
    clip_high: float = field(4e-4, "how far a ratio may rise above 1 before it is clipped", above=0)

    def __call__(self, data: GroupData, beta: Float[Array, ""] | float) -> Loss:
        advantage = group_normalised(data, data.reward)
        gain, clipped = self.clip(jnp.exp(mean_of_each(data, log_ratio(data))), advantage)
        loss = -data.mean_over_responses(gain)
        return with_balance(data, beta, loss, clip_fraction=data.mean_over_responses(clipped))


@dataclasses.dataclass(frozen=True)
class ProximalRloo(Clipped):
    """Leave-one-out advantages with PPO's clip of the ratio of whole responses.

    R_j = r_j - beta (log mu - log pi_ref)
    A_j = R_j - mean of the other K - 1
    loss = -(1 / (p K)) sum w_j min(rho_j A_j, clip(rho_j) A_j),  rho_j = pi / mu of a response

    References:
        TBA, arXiv:2503.18929, eq. 6 (a baseline); TRL 0.9 `RLOOTrainer`; arXiv:2410.18252.
    """

    beta_is = "any"

    def __call__(self, data: GroupData, beta: Float[Array, ""] | float) -> Loss:
        reward = regularised(data, summed_behavior(data), beta)
        advantage = reward - leave_one_out(data, reward)
        gain, clipped = self.clip(jnp.exp(jnp.sum(log_ratio(data), axis=-1)), advantage)
        loss = -data.mean_over_responses(gain)
        return with_balance(data, beta, loss, clip_fraction=data.mean_over_responses(clipped))


@dataclasses.dataclass(frozen=True)
class VinePpo(Clipped):
    """Clipped token ratios; advantages are differences of values that the searcher estimated.

    loss = -mean over tokens of min(rho A_t, clip(rho) A_t)

    A_t comes from `search.state_values`: the value of the next state minus the value of the state.
    Each value is the mean reward of continuations by the policy that drew the response. There is no
    KL term and no learned value.

    References:
        VinePPO, arXiv:2410.01679.
    """

    epochs: int = field(1, "passes over each batch", at_least=1)
    minibatches: int = field(
        1, "optimiser updates of a pass, each by an equal part of the batch", at_least=1
    )
    vine_tokens: int = field(
        8, "tokens of a response between two states with estimated values", at_least=1
    )
    vine_samples: int = field(
        4, "continuations per state for the estimate of its value", at_least=1
    )

    needs_advantages = True

    def __call__(self, data: GroupData, beta: Float[Array, ""] | float) -> Loss:
        advantage = data.token_advantages
        assert advantage is not None, "VinePPO needs the searcher's advantages"
        gain, clipped = self.clip(jnp.exp(log_ratio(data)), advantage)
        loss = -data.mean_over_tokens(gain)
        return with_balance(data, beta, loss, clip_fraction=data.mean_over_tokens(clipped))


@dataclasses.dataclass(frozen=True)
class Cispo(Objective):
    """Score of each token times a capped ratio without gradient, averaged over a prompt's tokens.

    loss = -(1 / p) sum_i (1 / sum_j w_j |y_ij|) sum_j w_j A_ij sum_t stop(min(rho, cap)) log pi

    A group of equal rewards has A = 0, which matches the paper's filter. Log-probs are float32
    throughout.

    References:
        MiniMax-M1, arXiv:2506.13585, eq. 4; scale of the cap and mean over prompts:
        arXiv:2510.13786; TRL loss_type="cispo".
    """

    importance_cap: float = field(
        5.0, "largest ratio to the sampler, 1 + epsilon_high of the paper", above=0
    )

    needs_behavior = True
    beta_is = "unused"

    def __call__(self, data: GroupData, beta: Float[Array, ""] | float) -> Loss:
        advantage = group_normalised(data, data.reward)
        ratio = jnp.exp(log_ratio(data))
        weight = jax.lax.stop_gradient(jnp.minimum(ratio, self.importance_cap))
        scores = sum_over_tokens(data, weight * data.policy_token_logprobs)
        # Tokens of a response over the mean of its group; these factors sum to K over a group.
        per_token = 1 / jnp.maximum(data.mean_over_group(num_counted(data)), 1)
        loss = -data.mean_over_prompts(per_token * data.mean_over_group(advantage * scores))
        share = data.mean_over_tokens((ratio > self.importance_cap).astype(ratio.dtype))
        return with_balance(data, beta, loss, clip_fraction=share)
