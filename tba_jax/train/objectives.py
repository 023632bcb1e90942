# SPDX-License-Identifier: Apache-2.0
"""The objectives: Trajectory Balance in its VarGrad form, baselines (RLOO, online DPO).

Arrays in, arrays out. Every function takes summed log-probs on an explicit [p k] group axis; this
module does not know where log-probs come from, what a token is, or what a config looks like. It
owns one invariant: nothing is ever averaged across prompts before log Z is taken.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Loss(NamedTuple):
    """A scalar to minimise and what is worth logging about it.

    Attributes:
        loss: float32 scalar; gradients flow through `policy_logprob` only.
        residual: [p k] balance residual (no log Z), gradient stopped.
        log_z: [p] estimate of log Z(x), gradient stopped.
        tb_loss: scalar, mean of (residual + log_z)^2 whatever the objective, gradient stopped.
    """

    loss: Float[Array, ""]
    residual: Float[Array, "p k"]
    log_z: Float[Array, " p"]
    tb_loss: Float[Array, ""]


def tb_residual(
    policy_logprob: Float[Array, "p k"],
    reference_logprob: Float[Array, "p k"],
    reward: Float[Array, "p k"],
    *,
    beta: Float[Array, ""] | float,
) -> Float[Array, "p k"]:
    """Trajectory-balance residual of each response, up to log Z(x).

    residual = log pi(y|x) - log pi_ref(y|x) - r(x, y) / beta

    It is constant over y for a fixed prompt exactly when pi is the target
    pi_ref * exp(r / beta) / Z.

    Args:
        policy_logprob: log pi(y|x), summed over response tokens; gradients flow here.
        reference_logprob: log pi_ref(y|x), same tokens.
        reward: raw reward, not divided by beta.
        beta: KL coefficient, > 0.

    Returns:
        One residual per response, float32.

    References:
        TBA, arXiv:2503.18929, section 3.2.
    """
    return policy_logprob - reference_logprob - reward / beta


def vargrad_log_z(residual: Float[Array, "p k"]) -> Float[Array, " p"]:
    """VarGrad estimate of log Z(x): minus the mean residual of the prompt's own group.

    log_z(x) = -(1/K) sum_j residual(x, y_j), gradient stopped. Stopping the gradient changes
    nothing as the centred residuals of a group sum to zero; it states the intent.

    References:
        TBA, arXiv:2503.18929, eq. 4; log-partition-variance form, arXiv:2302.05446.
    """
    return jax.lax.stop_gradient(-residual.mean(axis=1))


def tb_loss(
    policy_logprob: Float[Array, "p k"],
    reference_logprob: Float[Array, "p k"],
    reward: Float[Array, "p k"],
    *,
    beta: Float[Array, ""] | float,
    scale: Literal["advantage", "paper"] = "advantage",
    log_z: Float[Array, " p"] | None = None,
) -> Loss:
    """Trajectory-balance loss, in VarGrad form unless log Z is given; responses of any sampler.

    paper:      (1 / (p K)) sum_ij (log_z_i + residual_ij)^2          (no factor 1/2)
    advantage:  beta / 2 times that, whose gradient is exactly
                -(1 / (p K)) sum_ij A_ij grad log pi(y_ij|x_i) with
                A = (r - mean r) - beta (kl - mean kl), kl = log pi - log pi_ref

    `advantage` keeps the gradient in units of the reward, so that gradient clipping means the same
    at every beta and a moving beta is not a hidden learning-rate schedule.

    Args:
        policy_logprob: log pi(y|x), summed; gradients flow here.
        reference_logprob: log pi_ref(y|x), summed; no gradient.
        reward: raw reward.
        beta: KL coefficient, > 0.
        scale: see above; the second form of the gradient holds for VarGrad alone.
        log_z: learned log Z(x), gradients flow here too; None: VarGrad.

    References:
        TBA, arXiv:2503.18929, eq. 3, 5 and 7; learned log Z: appendix B.3.
    """
    reference_logprob = jax.lax.stop_gradient(reference_logprob)
    residual = tb_residual(policy_logprob, reference_logprob, reward, beta=beta)
    if log_z is None:
        log_z = vargrad_log_z(residual)
    mean_square = jnp.mean(jnp.square(residual + log_z[:, None]))
    loss = mean_square * (beta / 2) if scale == "advantage" else mean_square
    stop = jax.lax.stop_gradient
    return Loss(loss, stop(residual), stop(log_z), stop(mean_square))


def tempered_target(
    reference_logprob: Float[Array, "p k"],
    reward: Float[Array, "p k"],
    *,
    reference_temperature: Float[Array, ""] | float,
    reward_temperature: Float[Array, ""] | float,
) -> tuple[Float[Array, "p k"], Float[Array, "p k"]]:
    """(reference_logprob, reward) scaled so that an objective's target becomes a tempered one.

    log R = [log pi_ref(y|x) / reference_temperature + r(x, y) / beta] / reward_temperature

    In the untempered target both temperatures are 1. A high reference temperature flattens the
    reference, so fluency counts less; a high reward temperature flattens the whole target.

    Args:
        reference_logprob: log pi_ref(y|x), summed.
        reward: raw reward.
        reference_temperature: gamma, > 0.
        reward_temperature: T_r, > 0.

    References:
        TBA, arXiv:2503.18929, appendix B.3 (red-teaming).
    """
    return (
        reference_logprob / (reference_temperature * reward_temperature),
        reward / reward_temperature,
    )


def rloo_loss(
    policy_logprob: Float[Array, "p k"],
    reference_logprob: Float[Array, "p k"],
    reward: Float[Array, "p k"],
    *,
    beta: Float[Array, ""] | float,
) -> Loss:
    """REINFORCE with a leave-one-out baseline and the KL penalty inside the reward.

    R_j = r_j - beta (log pi - log pi_ref), gradient stopped
    A_j = R_j - mean of the other K - 1
    loss = -(1 / (p K)) sum A_j log pi(y_j|x)

    An on-policy estimator: on stale responses it is biased, which is the comparison it is here for.

    Args:
        policy_logprob: log pi(y|x), summed; gradients flow here.
        reference_logprob: log pi_ref(y|x), summed.
        reward: raw reward.
        beta: KL coefficient.

    References:
        RLOO, arXiv:2402.14740; TBA, arXiv:2503.18929, eq. 6.
    """
    stop = jax.lax.stop_gradient
    k = policy_logprob.shape[1]
    residual = stop(tb_residual(policy_logprob, reference_logprob, reward, beta=beta))
    log_z = vargrad_log_z(residual)
    regularised = -beta * residual
    advantage = (regularised - regularised.mean(axis=1, keepdims=True)) * (k / (k - 1))
    loss = -jnp.mean(advantage * policy_logprob)
    return Loss(loss, residual, log_z, jnp.mean(jnp.square(residual + log_z[:, None])))


def online_dpo_loss(
    policy_logprob: Float[Array, "p k"],
    reference_logprob: Float[Array, "p k"],
    reward: Float[Array, "p k"],
    *,
    beta: Float[Array, ""] | float,
) -> Loss:
    """Online DPO: the group's best response by reward is preferred to its worst.

    loss = -(1 / p) sum_i log sigmoid(beta (h_best - h_worst)),  h = log pi - log pi_ref

    A group whose rewards are all equal prefers nothing and contributes 0. Responses between the
    best and the worst are not used.

    Args:
        policy_logprob: log pi(y|x), summed; gradients flow here.
        reference_logprob: log pi_ref(y|x), summed; no gradient.
        reward: raw reward; only the order within a group matters.
        beta: strength of the pull to the reference.

    References:
        Direct alignment from online feedback, Guo et al., arXiv:2402.04792; a baseline in TBA,
        arXiv:2503.18929, table 1.
    """
    stop = jax.lax.stop_gradient
    residual = stop(tb_residual(policy_logprob, reference_logprob, reward, beta=beta))
    log_z = vargrad_log_z(residual)
    log_ratio = policy_logprob - stop(reference_logprob)
    best, worst = jnp.argmax(reward, axis=1), jnp.argmin(reward, axis=1)
    rows = jnp.arange(reward.shape[0])
    margin = beta * (log_ratio[rows, best] - log_ratio[rows, worst])
    is_pair = reward[rows, best] > reward[rows, worst]
    loss = -jnp.mean(jnp.where(is_pair, jax.nn.log_sigmoid(margin), 0.0))
    return Loss(loss, residual, log_z, jnp.mean(jnp.square(residual + log_z[:, None])))


class OffPolicyStats(NamedTuple):
    """How far a batch is from the current policy; all scalars, float32.

    Attributes:
        ess_fraction: effective sample size of the sequence ratios pi / mu, over the batch size.
        log_ratio_p05: 5th percentile of log pi(y|x) - log mu(y|x), in nats per response.
        log_ratio_p50: median.
        log_ratio_p95: 95th percentile.
    """

    ess_fraction: Float[Array, ""]
    log_ratio_p05: Float[Array, ""]
    log_ratio_p50: Float[Array, ""]
    log_ratio_p95: Float[Array, ""]


def off_policy_stats(
    policy_logprob: Float[Array, "p k"], behavior_logprob: Float[Array, "p k"]
) -> OffPolicyStats:
    """Diagnostics of the ratio policy / behavior. TB itself needs no ratio (paper section 3.3).

    ess_fraction = (sum w)^2 / (n sum w^2), w = exp(log ratio), computed in log space.
    """
    log_ratio = (policy_logprob - behavior_logprob).reshape(-1)
    log_ess = 2 * jax.nn.logsumexp(log_ratio) - jax.nn.logsumexp(2 * log_ratio)
    p05, p50, p95 = jnp.quantile(log_ratio, jnp.array([0.05, 0.5, 0.95]))
    return OffPolicyStats(jnp.exp(log_ess) / log_ratio.size, p05, p50, p95)
