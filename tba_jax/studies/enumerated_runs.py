# SPDX-License-Identifier: Apache-2.0
"""Training on enumerable problems: conditions, seeds and rates of an objective in one program.

The objectives are those of `train.objectives`, shown groups as the trainer shows them; there is no
model, buffer or driver. A policy that is D steps old draws the data of a step: the lag is exact.

Invariant: a run is a function of its condition, seed and rate alone; how many of them share a
program changes no figure beyond rounding.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from tba_jax.studies.enumerated import (
    LENGTH,
    VOCABULARY,
    Look,
    Problem,
    init_policy,
    look,
    token_logprobs,
    token_logprobs_of,
)
from tba_jax.train.objectives.base import GroupData, Objective, Totals

SAMPLERS = ("policy", "uniform", "reference")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all runs of a program share.

    Attributes:
        num_steps: of Adam, whose rate falls to 0 on a cosine.
        prompts, group: p and K of a batch.
        num_looks: how often it is looked at, the last time at the end.
        target_beta: of the target that distances are to.
        is_replayed: drawn groups are kept, and drawn again as `Condition.recency` says.
        reset_period: steps between reference := policy; 0: never.
        ema_decay: per step, of a reference that follows the policy; 0: none does.
    """

    num_steps: int = 400
    prompts: int = 8
    group: int = 16
    num_looks: int = 20
    target_beta: float = 0.1
    is_replayed: bool = False
    reset_period: int = 0
    ema_decay: float = 0.0


class Condition(NamedTuple):
    """What the runs of a program may differ in beside seed and rate: numbers, traced.

    Attributes:
        beta: KL coefficient at the first step.
        beta_final: at the last, on a line.
        sampler: what draws: an index of `SAMPLERS`.
        lag: steps between the policy that draws and the one that is trained.
        sync_period: steps between two policies that draw.
        recency: share of groups that are drawn anew; others are replayed, any as likely.
    """

    beta: float
    beta_final: float
    sampler: int = 0
    lag: int = 0
    sync_period: int = 1
    recency: float = 1.0


class Drawn(NamedTuple):
    """Groups: as they were drawn, [p ...], or all of a run, [steps p ...].

    Attributes:
        prompts: [p].
        strings: [p k], which of the 256.
        behavior: [p k t], log-probs of what drew them.
        version: [p], the step of the policy that drew them.
    """

    prompts: Array
    strings: Array
    behavior: Array
    version: Array


def _draw(
    mu: Any,
    reference: Float[Array, "n 256 t"],
    settings: Settings,
    condition: Condition,
    version: Array,
    key: Array,
) -> Drawn:
    """New groups; with fewer prompts than groups each prompt has several."""
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
    # By the inverse of the distribution function: a number for each string would take most of the
    # time of a step.
    below = jnp.cumsum(jnp.exp(behavior.sum(-1)), axis=-1)[group_of][:, None]
    uniform = jax.random.uniform(k_strings, (p, k, 1)) * below[..., -1:]
    strings = jnp.minimum(jnp.sum(below < uniform, axis=-1), below.shape[-1] - 1)
    return Drawn(
        some[group_of],
        strings,
        behavior[group_of[:, None], strings],
        jnp.broadcast_to(version, (p,)),
    )


def _replayed(drawn: Drawn, history: Drawn, recency: Array | float, i: Array, key: Array) -> Drawn:
    """Some of the groups exchanged for any of those drawn in the `i` steps before."""
    k_which, k_step, k_slot = jax.random.split(key, 3)
    p = drawn.prompts.shape[0]
    is_new = (jax.random.uniform(k_which, (p,)) < recency) | (i == 0)
    step = jax.random.randint(k_step, (p,), 0, jnp.maximum(i, 1))
    slot = jax.random.randint(k_slot, (p,), 0, p)

    def choose(new: Array, kept: Array) -> Array:
        chosen = is_new.reshape(-1, *[1] * (new.ndim - 1))
        return jnp.where(chosen, new, kept[step, slot])

    return jax.tree.map(choose, drawn, history)


def _group_data(
    drawn: Drawn, reference: Array, problem: Problem, settings: Settings, step: Array
) -> Callable[[Any], GroupData]:
    """A batch, as a function of what is trained.

    Args:
        drawn: its groups.
        reference: [p 256 t], or [1 256 t] of a problem with one prompt.
        problem: the rewards.
        settings: of the study.
        step: of the trained policy.
    """
    p, k = settings.prompts, settings.group
    # Of fewer prompts than groups each is scored once.
    n = min(p, problem.reward.shape[0])
    some, group_of = drawn.prompts[:n], jnp.arange(p) % n

    reward = jnp.asarray(problem.reward, jnp.float32)[drawn.prompts[:, None], drawn.strings]
    ones = jnp.ones((p, k))
    of_reference = reference[group_of[:, None], drawn.strings]

    def data(trained: Any) -> GroupData:
        policy = token_logprobs_of(trained, some, group_of, drawn.strings)
        return GroupData(
            policy_logprob=policy.sum(-1),
            policy_token_logprobs=policy,
            behavior_token_logprobs=drawn.behavior,
            reference_logprob=of_reference.sum(-1),
            reference_token_logprobs=of_reference,
            mask=jnp.ones(policy.shape, bool),
            reward=reward,
            weight=ones,
            length=jnp.full((p, k), LENGTH),
            staleness=jnp.broadcast_to((step - drawn.version)[:, None], (p, k)),
            log_z=trained["z"][drawn.prompts],
            totals=Totals(jnp.float32(p), jnp.float32(p * k), jnp.float32(p * k * LENGTH)),
            # One number a prompt, whatever was written of the response.
            token_values=jnp.broadcast_to(trained["z"][drawn.prompts][:, None, None], policy.shape),
        )

    return data


class _Carry(NamedTuple):
    """Of a run between two steps.

    Attributes:
        params: the policy's.
        state: Adam's.
        queue: slot i holds the policy of the last step that is i modulo its length.
        history: all groups that were drawn; None where none is replayed.
        anchor: parameters of a reference that moves; None of one that does not.
    """

    params: Any
    state: Any
    queue: Any
    history: Drawn | None
    anchor: Any


_OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam())


def _first(start: Any, settings: Settings, queue_size: int) -> _Carry:
    """Before the first step."""
    shape = (settings.num_steps, settings.prompts)
    history = Drawn(
        jnp.zeros(shape, jnp.int32),
        jnp.zeros((*shape, settings.group), jnp.int32),
        jnp.zeros((*shape, settings.group, LENGTH)),
        jnp.zeros(shape, jnp.int32),
    )
    return _Carry(
        start,
        _OPTIMIZER.init(start),
        jax.tree.map(lambda x: jnp.broadcast_to(x, (queue_size, *x.shape)), start),
        history if settings.is_replayed else None,
        start if settings.reset_period or settings.ema_decay else None,
    )


def _moved_anchor(anchor: Any, params: Any, settings: Settings, i: Array) -> Any:
    """The reference after step i."""
    if settings.ema_decay:
        return optax.incremental_update(params, anchor, 1 - settings.ema_decay)
    is_due = (i + 1) % settings.reset_period == 0
    return jax.lax.cond(is_due, lambda: params, lambda: anchor)


def train_once(
    objective: Objective,
    problem: Problem,
    settings: Settings,
    condition: Condition,
    key: Array,
    rate: Array,
    queue_size: int,
) -> Look:
    """One run; its looks lie along the first axis."""
    k_start, k_data = jax.random.split(key)
    start = init_policy(k_start, problem)
    at_start = token_logprobs(start, jnp.arange(problem.reward.shape[0]))
    decay = optax.cosine_decay_schedule(1.0, settings.num_steps)

    def drawn_at(carry: _Carry, i: Array) -> tuple[Drawn, Drawn | None]:
        version = i // condition.sync_period * condition.sync_period
        version = jnp.maximum(version - condition.lag, 0)
        mu = jax.tree.map(lambda q: q[version % queue_size], carry.queue)
        k_draw, k_replay = jax.random.split(jax.random.fold_in(k_data, i))
        drawn = _draw(mu, at_start, settings, condition, version, k_draw)
        if carry.history is None:
            return drawn, None
        history = jax.tree.map(lambda h, x: h.at[i].set(x), carry.history, drawn)
        return _replayed(drawn, history, condition.recency, i, k_replay), history

    def step(carry: _Carry, i: Array) -> tuple[_Carry, None]:
        params = carry.params
        queue = jax.tree.map(lambda q, x: q.at[i % queue_size].set(x), carry.queue, params)
        drawn, history = drawn_at(carry._replace(queue=queue), i)
        some = drawn.prompts[: min(settings.prompts, len(at_start))]
        reference = at_start[some] if carry.anchor is None else token_logprobs(carry.anchor, some)
        batch = _group_data(drawn, reference, problem, settings, i)
        beta = condition.beta + (condition.beta_final - condition.beta) * i / settings.num_steps

        def loss(params: Any) -> Array:
            data = batch(params)
            data = data if objective.heads else data._replace(log_z=None)
            return objective(data, beta).loss

        gradient: dict[str, Any] = jax.grad(loss)(params)
        scaled, state = _OPTIMIZER.update(gradient, carry.state)
        # log Z is a single number a prompt; the policy is many that move together.
        updates: Any = {**cast(dict[str, Any], scaled)}
        updates["z"] = 10 * updates["z"]
        updates = jax.tree.map(lambda u: -rate * decay(i) * u, updates)
        params = optax.apply_updates(params, updates)
        anchor = carry.anchor
        if anchor is not None:
            anchor = _moved_anchor(anchor, params, settings, i)
        return _Carry(params, state, queue, history, anchor), None

    def stretch(carry: _Carry, first: Array) -> tuple[_Carry, Look]:
        carry, _ = jax.lax.scan(step, carry, first + jnp.arange(between))
        return carry, look(carry.params, start, problem, settings.target_beta)

    between = settings.num_steps // settings.num_looks
    looks_at = between * jnp.arange(settings.num_looks)
    return jax.lax.scan(stretch, _first(start, settings, queue_size), looks_at)[1]


@functools.cache
def _program(
    objective: Objective, settings: Settings, width: int, queue_size: int
) -> Callable[..., Look]:
    def run(reward: Array, condition: Condition, key: Array, rate: Array) -> Look:
        problem = Problem(reward, width)
        return train_once(objective, problem, settings, condition, key, rate, queue_size)

    over_seeds = jax.vmap(run, (None, None, 0, None))
    over_rates = jax.vmap(over_seeds, (None, None, None, 0))
    return jax.jit(jax.vmap(over_rates, (None, 0, None, None)))


def train(
    objective: Objective,
    problem: Problem,
    settings: Settings,
    conditions: Sequence[Condition],
    *,
    seeds: Sequence[int],
    rates: Sequence[float],
) -> Look:
    """All runs of one objective in one program: arrays [conditions, rates, seeds, looks]."""
    keys = jax.vmap(jax.random.key)(jnp.asarray(seeds))
    queue_size = max(c.lag + c.sync_period for c in conditions)
    program = _program(objective, settings, problem.width, queue_size)
    stacked = jax.tree.map(lambda *x: jnp.asarray(x), *conditions)
    return jax.device_get(program(jnp.asarray(problem.reward), stacked, keys, jnp.asarray(rates)))
