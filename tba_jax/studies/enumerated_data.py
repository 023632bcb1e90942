# SPDX-License-Identifier: Apache-2.0
"""Training data of a run on an enumerable problem: sampled and replayed groups.

The policy of D steps ago samples the data of a step, so the lag is exact.

Invariant: replayed data were drawn before and keep the log-probs of the policy that drew them.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tba_jax.studies.enumerated import LENGTH, VOCABULARY, token_logprobs

SAMPLERS = ("policy", "uniform", "reference")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings shared by all runs of a program.

    Attributes:
        num_steps: steps of Adam, with a cosine learning rate that ends at 0.
        prompts, group: P and K of a batch.
        num_evaluations: number of evaluations, the last one at the end.
        target_beta: beta of the target distribution.
        replays: whether groups are stored and replayed; their share is 1 - `Condition.recency`.
        reset_period: steps between resets of the reference to the policy; 0: never.
    """

    num_steps: int = 400
    prompts: int = 8
    group: int = 16
    num_evaluations: int = 20
    target_beta: float = 0.1
    replays: bool = False
    reset_period: int = 0


class Condition(NamedTuple):
    """Traced numbers in which runs of one program may differ, besides seed and learning rate.

    Attributes:
        beta: KL coefficient at the first step.
        beta_final: KL coefficient at the last step; linear in between.
        sampler: index in `SAMPLERS` of the sampling distribution.
        lag: steps between the sampling policy and the trained policy.
        sync_period: steps between two versions of the sampling policy.
        recency: share of newly drawn groups; the others are replayed.
    """

    beta: float
    beta_final: float
    sampler: int = 0
    lag: int = 0
    sync_period: int = 1
    recency: float = 1.0


class Drawn(NamedTuple):
    """Drawn groups of one step, [p ...], or of all steps of a run, [steps p ...].

    Attributes:
        prompts: [p].
        strings: [p k], indices of the 256 strings.
        behavior: [p k t], log-probs of the distribution that drew them.
        version: [p k], step of the policy that drew them.
    """

    prompts: Array
    strings: Array
    behavior: Array
    version: Array


def is_repeat(strings: Int[Array, "*p k"]) -> Bool[Array, "*p k"]:
    """Return whether a string occurs earlier in its group."""
    same = strings[..., :, None] == strings[..., None, :]
    return jnp.any(jnp.tril(same, -1), axis=-1)


def draw(
    mu: Any,
    reference: Float[Array, "n 256 t"],
    settings: Settings,
    condition: Condition,
    version: Array,
    key: Array,
) -> Drawn:
    """Draw new groups; with few prompts, each prompt has several groups."""
    k_prompts, k_strings = jax.random.split(key)
    p, k, n = settings.prompts, settings.group, reference.shape[0]
    some = jax.random.choice(k_prompts, n, (p,), replace=False) if n >= p else jnp.arange(n)
    group_of = jnp.arange(p) % len(some)
    of_sampler = jnp.stack(
        [
            token_logprobs(mu, some),
            jnp.full((len(some), *reference.shape[1:]), -jnp.log(VOCABULARY)),
            reference[some],
        ]
    )
    behavior = of_sampler[condition.sampler]
    # Sampling by the inverse distribution function: one random number for each of the 256 strings
    # would take most of the time of a step.
    below = jnp.cumsum(jnp.exp(behavior.sum(-1)), axis=-1)[group_of][:, None]
    uniform = jax.random.uniform(k_strings, (p, k, 1)) * below[..., -1:]
    strings = jnp.minimum(jnp.sum(below < uniform, axis=-1), below.shape[-1] - 1)
    return Drawn(
        some[group_of],
        strings,
        behavior[group_of[:, None], strings],
        jnp.broadcast_to(version, (p, k)),
    )


def replayed_groups(
    drawn: Drawn, history: Drawn, recency: Array | float, i: Array, key: Array
) -> Drawn:
    """Replace some groups by groups drawn in the last `i` steps."""
    k_which, k_step, k_slot = jax.random.split(key, 3)
    p = drawn.prompts.shape[0]
    is_new = (jax.random.uniform(k_which, (p,)) < recency) | (i == 0)
    step = jax.random.randint(k_step, (p,), 0, jnp.maximum(i, 1))
    slot = jax.random.randint(k_slot, (p,), 0, p)
    return jax.tree.map(
        lambda new, old: jnp.where(is_new.reshape(-1, *[1] * (new.ndim - 1)), new, old[step, slot]),
        drawn,
        history,
    )


def nothing_kept(settings: Settings) -> Drawn | None:
    """Return the empty store of the first step."""
    if not settings.replays:
        return None
    shape = (settings.num_steps, settings.prompts)
    numbers = jnp.zeros((*shape, settings.group), jnp.int32)
    behavior = jnp.zeros((*shape, settings.group, LENGTH))
    return Drawn(jnp.zeros(shape, jnp.int32), numbers, behavior, numbers)


def batch_of(
    drawn: Drawn, kept: Drawn | None, condition: Condition, i: Array, key: Array
) -> tuple[Drawn, Drawn | None]:
    """Return the training data of step i, and the stored data after it."""
    if kept is None:
        return drawn, None
    history = Drawn(*(h.at[i].set(x) for h, x in zip(kept, drawn, strict=True)))
    return replayed_groups(drawn, history, condition.recency, i, key), history
