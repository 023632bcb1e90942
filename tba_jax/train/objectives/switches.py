# SPDX-License-Identifier: Apache-2.0
"""Optional parts of the Trajectory Balance loss, one function per setting of `tb`.

Invariant: with default settings no function here is called, so Trajectory Balance stays exact.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tba_jax.settings import need
from tba_jax.train.objectives.base import GroupData
from tba_jax.train.objectives.pieces import (
    baseline,
    leave_one_out,
    log_ratio,
    num_counted,
    sum_over_tokens,
    summed_behavior,
)


def anchored(
    data: GroupData, anchor: str, ema_decay: float, kl_clamp: float
) -> Float[Array, "p k"]:
    """Return log pi - log anchor of each response; gradients flow as through log pi.

    With ema_surrogate the result is c (log pi - log mu), c = d / (s (1 - d)), for a decay d per
    step and data that is s steps stale. It estimates the log-ratio to an average of the policy's
    weights without a forward pass of the average. `kl_clamp` bounds the value of each token, not
    its gradient.
    """
    flow = data.policy_logprob - jax.lax.stop_gradient(data.policy_logprob)
    if anchor == "reference":
        if not kl_clamp:
            return data.policy_logprob - jax.lax.stop_gradient(data.reference_logprob)
        assert data.reference_token_logprobs is not None
        gap = jnp.where(data.mask, data.policy_token_logprobs - data.reference_token_logprobs, 0)
    else:
        gap = log_ratio(data)
    scale = jnp.ones_like(data.reward)
    if anchor == "ema_surrogate":
        scale = ema_decay / (jnp.maximum(data.staleness, 1) * (1 - ema_decay))
    if kl_clamp:
        gap = jnp.clip(gap, -kl_clamp, kl_clamp)
    return jax.lax.stop_gradient(scale * sum_over_tokens(data, gap)) + scale * flow


def sampled_anchored(data: GroupData, anchor: str) -> Float[Array, "p k"]:
    """Return log mu - log anchor: `anchored` with the sampler in place of the policy."""
    if anchor == "reference":
        return summed_behavior(data) - data.reference_logprob
    return jnp.zeros_like(data.reward)


def estimated_log_z(
    data: GroupData,
    log_z: str,
    gap: Float[Array, "p k"],
    scaled_reward: Float[Array, "p k"],
    sharpness: Float[Array, ""] | float = 1.0,
) -> Float[Array, "p k"]:
    """Return log Z of each response's prompt, gradient stopped.

    Args:
        data: the groups.
        log_z: vargrad: mean of r / beta - gap; leave_one_out: that mean over the other responses;
            mean_reward: mean of r / beta; softmean: (1 / s) log mean exp(s r / beta), which for
            s = 1 is unbiased for Z if the anchor is the sampler, and tends to the mean for s -> 0.
        gap: log pi - log anchor, or the log-ratio that is centred instead.
        scaled_reward: r / beta.
        sharpness: s, beta over the temperature of the soft value.
    """
    gap, scaled_reward = jax.lax.stop_gradient((gap, scaled_reward))
    if log_z == "leave_one_out":
        return leave_one_out(data, scaled_reward - gap)
    if log_z == "softmean":
        top = jnp.max(jnp.where(data.weight > 0, scaled_reward, -jnp.inf), axis=1)
        top = jnp.where(data.num_drawn > 0, top, 0)
        lifted = jnp.where(data.weight > 0, sharpness * (scaled_reward - top[:, None]), 0)
        mean = data.mean_over_group(jnp.exp(lifted))
        found = top + jnp.log(jnp.where(data.num_drawn > 0, mean, 1)) / sharpness
    elif log_z == "mean_reward":
        found = baseline(data, scaled_reward)
    else:
        found = baseline(data, scaled_reward - gap)
    return jnp.broadcast_to(found[:, None], scaled_reward.shape)


class Turns(NamedTuple):
    """Turns of every response: the sequences of consecutive counted tokens.

    Attributes:
        begins: [p k t], the first token of each turn.
        index: [p k t], the turn of each counted token, from 0.
        is_turn: [p k t], entry n of the last axis: whether the response has a turn n.
        is_last: [p k t], entry n of the last axis: whether turn n is the last turn.
    """

    begins: Bool[Array, "p k t"]
    index: Int[Array, "p k t"]
    is_turn: Bool[Array, "p k t"]
    is_last: Bool[Array, "p k t"]

    def sums(self, x: Float[Array, "p k t"]) -> Float[Array, "p k t"]:
        """Return [p k t]: entry n is the sum of x over turn n. x is 0 at uncounted tokens."""
        add = functools.partial(jax.ops.segment_sum, num_segments=x.shape[-1])
        return jax.vmap(jax.vmap(add))(x, self.index)


def turns_of(data: GroupData) -> Turns:
    """Return the turns of every response; the uncounted tokens between turns are observations."""
    before = jnp.pad(data.mask[..., :-1], ((0, 0), (0, 0), (1, 0)))
    begins = data.mask & ~before
    index = jnp.maximum(jnp.cumsum(begins, axis=-1, dtype=jnp.int32) - 1, 0)
    n = jnp.arange(data.mask.shape[-1])[None, None]
    num = jnp.sum(begins, axis=-1, dtype=jnp.int32)[..., None]
    return Turns(begins, index, n < num, n == num - 1)


def shaped(t: Float[Array, "p k"], shape: str) -> Float[Array, "p k"]:
    """Return a convex function of the residual with minimum 0 at 0 and curvature 1 there."""
    if shape == "linex":
        return jnp.exp(t) - t - 1
    if shape == "cosh":
        return jnp.cosh(t) - 1
    return jnp.square(t) / 2


def response_weight(
    data: GroupData, importance: str, cap: float, is_good: Float[Array, "p k"]
) -> Float[Array, "p k"]:
    """Return the factor by which each response's loss is multiplied; gradient stopped."""
    if importance not in ("sequence_clip", "topr"):
        return jnp.ones_like(data.reward)
    log_weight = jax.lax.stop_gradient(jnp.sum(log_ratio(data), axis=-1))
    if importance == "sequence_clip":
        return jnp.exp(jnp.minimum(log_weight, jnp.log(cap)))
    return jnp.where(is_good > 0, 1.0, jnp.exp(jnp.minimum(log_weight, 0)))


def token_flow(data: GroupData, importance: str, floor: float, cap: float) -> Float[Array, "p k"]:
    """Return zeros whose gradient, added to that of log pi, gives each token its weight."""
    if importance not in ("token_clip", "truncated", "masked"):
        return jnp.zeros_like(data.reward)
    ratio = jnp.exp(jax.lax.stop_gradient(log_ratio(data)))
    if importance == "truncated":
        weight = jnp.minimum(ratio, cap)
    else:
        lowest = floor if importance == "masked" else 0.0
        weight = jnp.where((ratio >= lowest) & (ratio <= cap), ratio, 0)
    extra = (weight - 1) * data.policy_token_logprobs
    return sum_over_tokens(data, extra - jax.lax.stop_gradient(extra))


def per_token(data: GroupData) -> Float[Array, "p k"]:
    """Return 1 / |y| of each response."""
    return 1 / num_counted(data)


def check(o: Any, shared: Any) -> None:
    """Refuse combinations of settings that have no meaning or can overflow.

    Args:
        o: the objective.
        shared: settings that every objective has.

    Raises:
        ConfigError: see `settings.need`.
    """
    has_anchor = o.anchor != "none"
    if o.log_z == "cached":
        _check_cached(o, shared)
    if o.balance == "turn":
        _check_turns(o, shared)
    need(
        has_anchor or (o.log_z in ("vargrad", "leave_one_out", "mean_reward")),
        "objective.log_z",
        o.log_z,
        "without an anchor the loss has a baseline and no log Z",
        "Set --config.objective.log_z=vargrad.",
    )
    need(
        not o.value_temperature or o.log_z in ("softmean", "cached"),
        "objective.value_temperature",
        o.value_temperature,
        f"log_z={o.log_z} has no temperature",
        "Set --config.objective.value_temperature=0 or --config.objective.log_z=softmean.",
    )
    need(
        has_anchor or o.shape == "squared",
        "objective.shape",
        o.shape,
        "without an anchor there is no residual to shape",
        "Set --config.objective.shape=squared.",
    )
    need(
        has_anchor or not o.kl_clamp,
        "objective.kl_clamp",
        o.kl_clamp,
        "without an anchor there is no log-ratio to clamp",
        "Set --config.objective.kl_clamp=0.",
    )
    need(
        o.shape == "squared" or o.kl_clamp > 0 or o.length_normalise,
        "objective.shape",
        o.shape,
        "grows exponentially, and a log-ratio of a whole response would overflow",
        "Set --config.objective.length_normalise=True, or --config.objective.kl_clamp=10.",
    )
    need(
        o.kl_center == "live" or (has_anchor and o.log_z in ("vargrad", "leave_one_out")),
        "objective.kl_center",
        o.kl_center,
        "a log-ratio is centred only with an anchor and log_z=vargrad or leave_one_out",
        "Set --config.objective.kl_center=live.",
    )


def _check_cached(o: Any, shared: Any) -> None:
    """Refuse settings for which the cached soft values of prompts are not valid."""
    moves = shared.beta.shape != "constant" and not o.value_temperature
    is_plain = all(
        getattr(shared, f"{name}_temperature").is_always(1.0) for name in ("reference", "reward")
    )
    for ok, name, value, rule, remedy in (
        (o.anchor == "reference", "anchor", o.anchor, "needs the reference as anchor", "reference"),
        (
            o.reward_transform == "raw",
            "reward_transform",
            o.reward_transform,
            "is computed from raw rewards",
            "raw",
        ),
        (not moves, "beta", shared.beta.plain, "needs a constant beta", "0.05"),
        (
            is_plain,
            "reward_temperature",
            shared.reward_temperature.plain,
            "does not support temperatures of the target",
            "1",
        ),
    ):
        need(
            ok,
            f"objective.{name}",
            value,
            f"objective.log_z=cached {rule}",
            f"Set --config.objective.{name}={remedy}.",
        )


def _check_turns(o: Any, shared: Any) -> None:
    """Refuse settings that residuals of turns do not support."""
    need(
        o.log_z == "learned",
        "objective.log_z",
        o.log_z,
        "objective.balance=turn learns the soft value of the state before every turn",
        "Set --config.objective.log_z=learned.",
    )
    need(
        not shared.mask_eos,
        "objective.mask_eos",
        shared.mask_eos,
        "with objective.balance=turn a turn of EOS alone would have no token",
        "Set --config.objective.mask_eos=False.",
    )
    for name, default in (
        ("anchor", "reference"),
        ("shape", "squared"),
        ("baseline_shift", 0.0),
        ("length_normalise", False),
        ("reward_transform", "raw"),
        ("importance", "none"),
        ("kl_clamp", 0.0),
    ):
        need(
            getattr(o, name) == default,
            f"objective.{name}",
            getattr(o, name),
            "objective.balance=turn is implemented for exact Trajectory Balance only",
            f"Set --config.objective.{name}={default}.",
        )
