# SPDX-License-Identifier: Apache-2.0
"""Training data of a run on an enumerable problem: sampled, stored and replayed groups.

The policy of D steps ago samples the data of a step, so the lag is exact. Data is stored either as
whole groups, or as responses; of equal responses to a prompt, only the newest is stored.

Invariant: replayed data were drawn before and keep the log-probs of the policy that drew them.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tba_jax.studies.enumerated import LENGTH, STRINGS, VOCABULARY, token_logprobs

SAMPLERS = ("policy", "uniform", "reference")
_NUM_STRINGS = len(STRINGS)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings shared by all runs of a program.

    Attributes:
        num_steps: steps of Adam, with a cosine learning rate that ends at 0.
        prompts, group: P and K of a batch.
        num_evaluations: number of evaluations, the last one at the end.
        target_beta: beta of the target distribution.
        samples: S, strings drawn for a group, of which K are used, distinct strings first; 0: K.
        searchers: searchers; each draws as many groups as a batch has.
        replay: what is stored and replayed; the replayed share is 1 - `Condition.recency`.
        mask_eos: exclude the end from log pi.
        reset_period: steps between resets of the reference to the policy; 0: never.
    """

    num_steps: int = 400
    prompts: int = 8
    group: int = 16
    num_evaluations: int = 20
    target_beta: float = 0.1
    samples: int = 0
    searchers: int = 1
    replay: Literal["off", "groups", "responses"] = "off"
    mask_eos: bool = False
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
        inverse_temperature: c of the replay probability softmax(c reward) of a prompt's
            responses.
        capacity: number of newest strings stored for each prompt.
    """

    beta: float
    beta_final: float
    sampler: int = 0
    lag: int = 0
    sync_period: int = 1
    recency: float = 1.0
    inverse_temperature: float = 0.0
    capacity: int = _NUM_STRINGS


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


class Store(NamedTuple):
    """Stored responses of each prompt: the newest draw of each string.

    Attributes:
        step: [n 256], step of the draw; -1: never drawn.
        behavior: [n 256 t], log-probs of the distribution that drew it.
        version: [n 256], step of the policy that drew it.
    """

    step: Array
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
    """Draw new groups of all searchers; with few prompts, each prompt has several groups."""
    k_prompts, k_strings = jax.random.split(key)
    p, k, n = settings.prompts * settings.searchers, settings.group, reference.shape[0]
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
    size = settings.samples or k
    uniform = jax.random.uniform(k_strings, (p, size, 1)) * below[..., -1:]
    strings = jnp.minimum(jnp.sum(below < uniform, axis=-1), below.shape[-1] - 1)
    if size > k:
        first = jnp.argsort(is_repeat(strings), axis=-1, stable=True)[:, :k]
        strings = jnp.take_along_axis(strings, first, axis=-1)
    return Drawn(
        some[group_of],
        strings,
        behavior[group_of[:, None], strings],
        jnp.broadcast_to(version, (p, k)),
    )


def _chosen(is_new: Bool[Array, " p"], new: Drawn, old: Drawn) -> Drawn:
    """Return, for each position, the new group if `is_new`, else the old group."""
    return jax.tree.map(
        lambda x, y: jnp.where(is_new.reshape(-1, *[1] * (x.ndim - 1)), x, y), new, old
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
    return _chosen(is_new, drawn, jax.tree.map(lambda kept: kept[step, slot], history))


def replayed_responses(
    drawn: Drawn, store: Store, reward: Float[Array, "n 256"], condition: Condition, key: Array
) -> Drawn:
    """Replace some groups by stored responses to the same prompts.

    Responses are drawn without replacement. If fewer than K responses are stored, all are taken
    repeatedly. A prompt without stored responses keeps its new group.
    """
    k_which, k_noise = jax.random.split(key)
    prompts, (p, k) = drawn.prompts, drawn.strings.shape
    at = store.step[prompts]
    # Strings of one step have the same age; this fixed order is independent of their reward.
    order = at * _NUM_STRINGS + (jnp.arange(_NUM_STRINGS) * 97 % _NUM_STRINGS)[None]
    oldest = jnp.take(jnp.sort(order, axis=-1), _NUM_STRINGS - condition.capacity, axis=-1)
    is_kept = (at >= 0) & (order >= oldest[:, None])
    noise = jax.random.gumbel(k_noise, is_kept.shape)
    score = condition.inverse_temperature * reward[prompts] + noise
    _, ranked = jax.lax.top_k(jnp.where(is_kept, score, -jnp.inf), k)
    num_kept = is_kept.sum(-1)
    turn = jnp.arange(k)[None] % jnp.maximum(num_kept, 1)[:, None]
    strings = jnp.take_along_axis(ranked, turn, axis=-1)
    index = prompts[:, None], strings
    old = Drawn(prompts, strings, store.behavior[index], store.version[index])
    is_new = (jax.random.uniform(k_which, (p,)) < condition.recency) | (num_kept == 0)
    return _chosen(is_new, drawn, old)


def stored(store: Store, drawn: Drawn, i: Array) -> Store:
    """Return the store after the groups drawn in step i."""
    index = drawn.prompts[:, None], drawn.strings
    return Store(
        store.step.at[index].set(i),
        store.behavior.at[index].set(drawn.behavior),
        store.version.at[index].set(drawn.version),
    )


def nothing_kept(settings: Settings, num_prompts: int) -> Drawn | Store | None:
    """Return the empty store of the first step."""
    if settings.replay == "off":
        return None
    if settings.replay == "groups":
        shape = (settings.num_steps, settings.prompts)
        numbers = jnp.zeros((*shape, settings.group), jnp.int32)
        behavior = jnp.zeros((*shape, settings.group, LENGTH))
        return Drawn(jnp.zeros(shape, jnp.int32), numbers, behavior, numbers)
    never = jnp.full((num_prompts, _NUM_STRINGS), -1, jnp.int32)
    return Store(never, jnp.zeros((*never.shape, LENGTH)), never)


def batch_of(
    drawn: Drawn,
    kept: Drawn | Store | None,
    reward: Float[Array, "n 256"],
    settings: Settings,
    condition: Condition,
    i: Array,
    key: Array,
) -> tuple[Drawn, Drawn | Store | None]:
    """Return the training data of step i, and the stored data after it."""
    batch = jax.tree.map(lambda x: x[: settings.prompts], drawn)
    if isinstance(kept, Store):
        return replayed_responses(batch, kept, reward, condition, key), stored(kept, drawn, i)
    if kept is None:
        return batch, None
    history = Drawn(*(h.at[i].set(x) for h, x in zip(kept, batch, strict=True)))
    return replayed_groups(batch, history, condition.recency, i, key), history
