# SPDX-License-Identifier: Apache-2.0
"""Losses: pure functions of groups of responses that return one term per response.

    loss = sum of the terms / total        total: responses, tokens or prompts of the batch

A loss is `name(groups, beta, *, settings) -> Terms`. Its keyword arguments are the settings
`objective.NAME`, and `@objective` declares its total and its needs. pi is the policy, mu the
sampler, K the number of responses to a prompt, and rho = pi / mu the ratio of a token. A user's
objective is such a function in a file: `objective.name=FILE.py:FUNCTION`.

Invariant: a term depends on the responses to its own prompt only, so micro-batches change no loss.
"""

from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tba_jax.train.groups import Groups, Terms
from tba_jax.train.objectives import About, Needs, objective

# Added to the deviation of a group's rewards, as in TRL.
STD_EPS = 1e-4

Beta = Float[Array, ""] | float

# Settings that several objectives have. The step reads `epochs`, a loss does not.
ClipLow = Annotated[float, About("how far a ratio may fall below 1 before it is clipped", above=0)]
ClipHigh = Annotated[float, About("how far a ratio may rise above 1 before it is clipped", above=0)]
Epochs = Annotated[int, About("optimiser updates with each batch", at_least=1)]

_RATIO_WEIGHT = 1e-3  # of the squared log-ratio to the sampler, in `ipo`


# --- parts of losses ---------------------------------------------------------


def summed(groups: Groups, x: Float[Array, "p k t"]) -> Float[Array, "p k"]:
    """Return the sum over the counted tokens of each response."""
    return jnp.sum(jnp.where(groups.mask, x, 0), axis=-1)


def num_tokens(groups: Groups) -> Float[Array, "p k"]:
    """Return the number of counted tokens of each response, at least 1: means divide by it."""
    return jnp.maximum(jnp.sum(groups.mask, axis=-1), 1).astype(groups.reward.dtype)


def log_ratio(groups: Groups) -> Float[Array, "p k t"]:
    """Return log pi - log mu of each counted token; 0 at other tokens."""
    return jnp.where(groups.mask, groups.logp - groups.behavior, 0)


def group_mean(x: Float[Array, "p k"]) -> Float[Array, "p 1"]:
    """Return the mean of each group; exactly x where all x of a group are equal."""
    mean = jnp.mean(x, axis=1, keepdims=True)
    return jnp.clip(mean, x.min(1, keepdims=True), x.max(1, keepdims=True))


def mean_of_others(x: Float[Array, "p k"]) -> Float[Array, "p k"]:
    """Return the mean over the other K - 1 responses; exactly x in a group of equal x, 0 at K=1."""
    k = x.shape[1]
    if k == 1:
        return jnp.zeros_like(x)
    mean = (jnp.sum(x, axis=1, keepdims=True) - x) / (k - 1)
    return jnp.clip(mean, x.min(1, keepdims=True), x.max(1, keepdims=True))


def normalised(reward: Float[Array, "p k"]) -> Float[Array, "p k"]:
    """Return (r - mean) / (std + 1e-4) of each group, std with K - 1; 0 in a group of equal r."""
    gap = reward - group_mean(reward)
    variance = jnp.sum(jnp.square(gap), axis=1, keepdims=True) / max(reward.shape[1] - 1, 1)
    return gap / (jnp.sqrt(variance) + STD_EPS)


def regularised(groups: Groups, logp: Float[Array, "p k t"], beta: Beta) -> Float[Array, "p k"]:
    """Return r - beta (log pi - log pi_ref), gradient stopped, with `logp` for log pi."""
    kl = summed(groups, logp - groups.reference)
    return jax.lax.stop_gradient(groups.reward - beta * kl)


def k3(groups: Groups) -> Float[Array, "p k t"]:
    """Return Schulman's estimate of KL(pi || pi_ref) per token: exp(g) - g - 1, g = ref - pi."""
    gap = jnp.where(groups.mask, groups.reference - groups.logp, 0)
    return jnp.exp(gap) - gap - 1


def clipped(
    ratio: Float[Array, "*n"], advantage: Float[Array, "*#n"], clip_low: float, clip_high: float
) -> tuple[Float[Array, "*n"], dict[str, Array]]:
    """Return PPO's gain, and as metrics where either side of the clip stops the gradient.

    gain = min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)
    """
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantage)
    low = (ratio < 1 - clip_low) & (advantage < 0)
    high = (ratio > 1 + clip_high) & (advantage > 0)
    return gain, sides(low, high, ratio)


def sides(low: Array, high: Array, ratio: Array) -> dict[str, Array]:
    """Return the metrics of a clip: 1 where the ratio is below or above the bounds, else 0."""
    return {"clip_low": low.astype(ratio.dtype), "clip_high": high.astype(ratio.dtype)}


# --- Trajectory Balance ------------------------------------------------------


def _tb_needs(*, log_z: str, kl_center: str, importance: str, **_) -> Needs:
    is_learned = log_z == "learned"
    wrong = ("kl_center", "a learned log Z has no log-ratio to centre")
    return Needs(
        sampler="any" if importance == "none" and kl_center == "live" else "ratio",
        beta="positive",
        head="log_z" if is_learned else "",
        wrong=(wrong,) if is_learned and kl_center != "live" else (),
    )


@objective(_tb_needs)
def tb(
    groups: Groups,
    beta: Beta,
    *,
    scale: Annotated[
        Literal["advantage", "paper"],
        About("advantage: beta/2 times the group's variance; paper: mean of squares"),
    ] = "advantage",
    log_z: Annotated[
        Literal["vargrad", "learned"],
        About(
            "estimate of log Z: vargrad: group mean of r / beta minus the log-ratio; learned: a "
            "head on the prompt"
        ),
    ] = "vargrad",
    kl_center: Annotated[
        Literal["live", "behavior"],
        About(
            "policy whose log-ratio to the reference is in log Z: live: the current policy; "
            "behavior: the policy that sampled the responses"
        ),
    ] = "live",
    importance: Annotated[
        Literal["none", "token_clip"],
        About(
            "weight of each token's gradient: token_clip: the ratio to the sampler, 0 above the "
            "cap; none: exact Trajectory Balance, less stable on old responses"
        ),
    ] = "token_clip",
    importance_cap: Annotated[float, About("largest ratio to the sampler", above=0)] = 8.0,
    kl_clamp: Annotated[float, About("bound of each token's log-ratio; 0: none", at_least=0)] = 0.0,
) -> Terms:
    """Trajectory Balance, in VarGrad form unless log Z is learned; with importance=none exact.

    t_j = (log pi - log pi_ref)_j - r_j / beta + log Z       log-probs summed over tokens
    advantage: beta / 2 times the mean of t_j^2; with VarGrad its gradient is exactly that of
        -A_j log pi, A = (r - mean r) - beta (kl - mean kl), kl = log pi - log pi_ref
    paper: the mean of t_j^2

    `advantage` keeps the gradient in units of the reward at every beta. `kl_clamp` bounds the value
    of each token's log-ratio, not its gradient.

    References:
        TBA, arXiv:2503.18929, eq. 3 to 7; learned log Z: appendix B.3; TBA': section 6. VarGrad:
        arXiv:2302.05446.
    """
    weight, metrics = 1.0, {}
    if importance == "token_clip":
        ratio = jnp.exp(jax.lax.stop_gradient(log_ratio(groups)))
        high = ratio > importance_cap
        weight, metrics = jnp.where(high, 0, ratio), sides(jnp.zeros_like(high), high, ratio)
    weighted = summed(groups, weight * groups.logp)
    flow = weighted - jax.lax.stop_gradient(weighted)  # 0, with the gradient of log pi
    log_ratios = groups.logp - groups.reference
    if kl_clamp:
        log_ratios = jnp.clip(log_ratios, -kl_clamp, kl_clamp)
    kl = jax.lax.stop_gradient(summed(groups, log_ratios)) + flow
    if groups.log_z is not None:
        log_partition = groups.log_z[:, None]
    else:
        centre = summed(groups, groups.behavior - groups.reference)
        centre = kl if kl_center == "live" else centre
        log_partition = group_mean(groups.reward / beta - jax.lax.stop_gradient(centre))
    t = kl - groups.reward / beta + log_partition
    return Terms(jnp.square(t) * (beta / 2 if scale == "advantage" else 1.0), metrics)


# --- policy gradients --------------------------------------------------------


@objective(Needs(sampler="policy"))
def reinforce(groups: Groups, beta: Beta) -> Terms:
    """-R_j log pi(y_j|x), R = r - beta (log pi - log pi_ref) without gradient; no baseline.

    References:
        Williams, 1992; as a baseline for language models arXiv:2402.14740.
    """
    reward = regularised(groups, groups.logp, beta)
    return Terms(-reward * summed(groups, groups.logp))


@objective(Needs(sampler="policy"))
def rloo(groups: Groups, beta: Beta) -> Terms:
    """-(R_j - mean of the other R) log pi(y_j|x), R = r - beta (log pi - log pi_ref).

    Pi is the current policy and the loss has no ratio to the sampler, so for beta > 0 the gradient
    equals that of Trajectory Balance (scale=advantage) times K / (K - 1) on any data. To compare
    with a method that is biased on stale data, use beta = 0 or `proximal_rloo`.

    References:
        RLOO, arXiv:2402.14740; TBA, arXiv:2503.18929, section 3.3 and appendix A.
    """
    reward = regularised(groups, groups.logp, beta)
    return Terms(-(reward - mean_of_others(reward)) * summed(groups, groups.logp))


@objective(Needs())
def grpo(
    groups: Groups, beta: Beta, *, clip_low: ClipLow = 0.2, clip_high: ClipHigh = 0.2
) -> Terms:
    """-mean over tokens of [min(rho A, clip(rho) A) - beta k3], A normalised by the deviation.

    References:
        DeepSeekMath, arXiv:2402.03300, eq. 3 and 4; TRL `GRPOTrainer`, loss_type="grpo".
    """
    advantage = normalised(groups.reward)[..., None]
    gain, metrics = clipped(jnp.exp(log_ratio(groups)), advantage, clip_low, clip_high)
    return Terms(-summed(groups, gain - beta * k3(groups)) / num_tokens(groups), metrics)


@objective(Needs(beta="unused"))
def dr_grpo(
    groups: Groups, beta: Beta, *, clip_low: ClipLow = 0.2, clip_high: ClipHigh = 0.2
) -> Terms:
    """-sum over tokens of min(rho A, clip(rho) A), A = r - mean: no division by std or length.

    The paper divides by the maximum response length. Here the divisor is 1, so that gradients are
    in units of the reward, as in RLOO.

    References:
        Understanding R1-Zero-like training, arXiv:2503.20783.
    """
    advantage = (groups.reward - group_mean(groups.reward))[..., None]
    gain, metrics = clipped(jnp.exp(log_ratio(groups)), advantage, clip_low, clip_high)
    return Terms(-summed(groups, gain), metrics)


@objective(Needs(beta="unused", total="tokens"))
def dapo(
    groups: Groups, beta: Beta, *, clip_low: ClipLow = 0.2, clip_high: ClipHigh = 0.28
) -> Terms:
    """GRPO with a wider upper clip and a mean over all tokens of the batch, without a KL term.

    DAPO's dynamic sampling is a setting of the buffer: `replay.equal_rewards=redraw`.

    References:
        DAPO, arXiv:2503.14476, eq. 8.
    """
    advantage = normalised(groups.reward)[..., None]
    gain, metrics = clipped(jnp.exp(log_ratio(groups)), advantage, clip_low, clip_high)
    return Terms(-summed(groups, gain), metrics)


@objective(Needs(beta="unused"))
def gspo(
    groups: Groups, beta: Beta, *, clip_low: ClipLow = 3e-4, clip_high: ClipHigh = 4e-4
) -> Terms:
    """-min(s A, clip(s) A), one ratio per response: s_j = (pi(y_j) / mu(y_j))^(1 / |y_j|).

    References:
        GSPO, arXiv:2507.18071, eq. 5 to 7; clips of section 5.1.
    """
    ratio = jnp.exp(summed(groups, log_ratio(groups)) / num_tokens(groups))
    gain, metrics = clipped(ratio, normalised(groups.reward), clip_low, clip_high)
    return Terms(-gain, metrics)


@objective(Needs())
def proximal_rloo(
    groups: Groups, beta: Beta, *, clip_low: ClipLow = 0.2, clip_high: ClipHigh = 0.2
) -> Terms:
    """-min(rho_j A_j, clip(rho_j) A_j), rho_j = pi / mu of a response, A leave-one-out.

    R_j = r_j - beta (log mu - log pi_ref);  A_j = R_j - mean of the other K - 1

    References:
        TBA, arXiv:2503.18929, eq. 6 (a baseline); TRL 0.9 `RLOOTrainer`; arXiv:2410.18252.
    """
    reward = regularised(groups, groups.behavior, beta)
    ratio = jnp.exp(summed(groups, log_ratio(groups)))
    gain, metrics = clipped(ratio, reward - mean_of_others(reward), clip_low, clip_high)
    return Terms(-gain, metrics)


@objective(Needs(beta="unused", total="prompts"))
def cispo(
    groups: Groups,
    beta: Beta,
    *,
    importance_cap: Annotated[
        float, About("largest ratio to the sampler, 1 + epsilon_high of the paper", above=0)
    ] = 5.0,
) -> Terms:
    """-A_j sum_t stop(min(rho, cap)) log pi / (tokens of the prompt's responses).

    A group of equal rewards has A = 0, which matches the paper's filter.

    References:
        MiniMax-M1, arXiv:2506.13585, eq. 4; scale of the cap and mean over prompts:
        arXiv:2510.13786; TRL loss_type="cispo".
    """
    ratio = jnp.exp(jax.lax.stop_gradient(log_ratio(groups)))
    high = ratio > importance_cap
    scores = summed(groups, jnp.minimum(ratio, importance_cap) * groups.logp)
    tokens = jnp.sum(num_tokens(groups), axis=1, keepdims=True)
    loss = -normalised(groups.reward) * scores / tokens
    return Terms(loss, sides(jnp.zeros_like(high), high, ratio))


@objective(Needs(beta="unused", total="tokens"))
def ipo(
    groups: Groups,
    beta: Beta,
    *,
    probability_bound: Annotated[
        float,
        About(
            "largest change of a token's probability since it was sampled; more is masked",
            at_least=0,
        ),
    ] = 0.1,
) -> Terms:
    """-rho A for tokens with |pi - mu| <= bound, plus 0.001 (log rho)^2 for all tokens.

    A = r - mean. Unlike a ratio, a difference of probabilities masks no rare token, and the mask is
    the same for both signs of A.

    References:
        prime-rl's `ipo` loss, default since 2026; trust region by total variation: DPPO,
        arXiv:2602.04879; the squared log-ratio: arXiv:2602.02276.
    """
    gaps = log_ratio(groups)
    change = jnp.exp(groups.logp) - jnp.exp(groups.behavior)
    change = jax.lax.stop_gradient(jnp.where(groups.mask, change, 0))
    low, high = change < -probability_bound, change > probability_bound
    advantage = (groups.reward - group_mean(groups.reward))[..., None]
    # Masked tokens get a log-ratio of 0, so that no overflow of their ratio reaches the gradient.
    gain = jnp.where(low | high, 0, jnp.exp(jnp.where(low | high, 0, gaps)) * advantage)
    loss = summed(groups, _RATIO_WEIGHT * jnp.square(gaps) - gain)
    return Terms(loss, sides(low, high, gaps))


@objective(Needs(sampler="policy", beta="positive", total="prompts"))
def online_dpo(groups: Groups, beta: Beta) -> Terms:
    """-log sigmoid(beta (h_best - h_worst)), h = log pi - log pi_ref, of each prompt.

    Prefers the group's best response by reward to its worst. A group with equal rewards adds 0.
    Beta is the strength of the regularisation towards the reference. The term of a prompt is at its
    best response.

    References:
        Direct alignment from online feedback, arXiv:2402.04792; a baseline in TBA,
        arXiv:2503.18929, table 1.
    """
    h = summed(groups, groups.logp - groups.reference)
    best, worst = jnp.argmax(groups.reward, axis=1), jnp.argmin(groups.reward, axis=1)
    rows = jnp.arange(h.shape[0])
    is_pair = groups.reward[rows, best] > groups.reward[rows, worst]
    margin = beta * (h[rows, best] - h[rows, worst])
    of_prompt = jnp.where(is_pair, -jax.nn.log_sigmoid(margin), 0)
    return Terms(of_prompt[:, None] * jax.nn.one_hot(best, h.shape[1], dtype=h.dtype))
