# SPDX-License-Identifier: Apache-2.0
"""Training on enumerable problems: one program runs all conditions, seeds and learning rates.

Uses the losses of `train`, with groups in the format of the trainer, and data from
`enumerated_data`; there is no language model and no buffer.

Invariant: a run depends on its condition, seed and rate alone; the number of runs in a program
changes results only by rounding.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from tba_jax.studies.enumerated import (
    Measures,
    Problem,
    init_policy,
    measure,
    token_logprobs,
    token_logprobs_of,
)
from tba_jax.studies.enumerated_data import (
    Condition,
    Drawn,
    Settings,
    batch_of,
    draw,
    is_repeat,
    nothing_kept,
)
from tba_jax.train.groups import Groups
from tba_jax.train.objectives import Objective


class Batches(NamedTuple):
    """Statistics of the training data between two evaluations, arrays over runs (and evaluations).

    Attributes:
        unique: mean share of distinct strings in a group.
        rewarded: mean reward.
    """

    unique: Array | np.ndarray
    rewarded: Array | np.ndarray


def _group_data(
    drawn: Drawn, reference: Array, problem: Problem, settings: Settings, step: Array
) -> Callable[[Any], Groups]:
    """Return a batch as a function of the trained parameters.

    Args:
        drawn: groups of the batch.
        reference: [p 256 t], or [1 256 t] of a problem with one prompt.
        problem: the rewards.
        settings: settings of the study.
        step: step of the trained policy.
    """
    p = settings.prompts
    # With fewer prompts than groups, each prompt is scored once.
    n = min(p, problem.reward.shape[0])
    some, group_of = drawn.prompts[:n], jnp.arange(p) % n

    reward = jnp.asarray(problem.reward, jnp.float32)[drawn.prompts[:, None], drawn.strings]
    of_reference = reference[group_of[:, None], drawn.strings]
    mask = jnp.ones(of_reference.shape, bool)

    def data(trained: Any) -> Groups:
        policy = token_logprobs_of(trained, some, group_of, drawn.strings)
        return Groups(
            logp=policy,
            behavior=drawn.behavior,
            reference=of_reference,
            mask=mask,
            reward=reward,
            staleness=step - drawn.version,
            log_z=trained["z"][drawn.prompts],
            # One value per prompt, the same for every token of a response.
            values=jnp.broadcast_to(trained["z"][drawn.prompts][:, None, None], policy.shape),
        )

    return data


class _Carry(NamedTuple):
    """State of a run between two steps.

    Attributes:
        params: parameters of the policy.
        state: optimizer state of Adam.
        queue: entry i has the policy of the last step that equals i modulo the queue's length.
        kept: stored groups for replay; None without replay.
        anchor: parameters of a reference that changes; None for a fixed reference.
    """

    params: Any
    state: Any
    queue: Any
    kept: Drawn | None
    anchor: Any


_OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam())


def _first(start: Any, settings: Settings, queue_size: int) -> _Carry:
    """Return the state before the first step."""
    return _Carry(
        start,
        _OPTIMIZER.init(start),
        jax.tree.map(lambda x: jnp.broadcast_to(x, (queue_size, *x.shape)), start),
        nothing_kept(settings),
        start if settings.reset_period else None,
    )


def train_once(
    objective: Objective,
    problem: Problem,
    settings: Settings,
    condition: Condition,
    key: Array,
    rate: Array,
    queue_size: int,
) -> tuple[Measures, Batches]:
    """Train one run; the first axis of the result has its evaluations."""
    k_start, k_data = jax.random.split(key)
    start = init_policy(k_start, problem)
    at_start = token_logprobs(start, jnp.arange(problem.reward.shape[0]))
    decay = optax.cosine_decay_schedule(1.0, settings.num_steps)
    rewards = jnp.asarray(problem.reward, jnp.float32)

    def drawn_at(carry: _Carry, i: Array) -> tuple[Drawn, Drawn | None]:
        version = i // condition.sync_period * condition.sync_period
        version = jnp.maximum(version - condition.lag, 0)
        mu = jax.tree.map(lambda q: q[version % queue_size], carry.queue)
        k_draw, k_replay = jax.random.split(jax.random.fold_in(k_data, i))
        drawn = draw(mu, at_start, settings, condition, version, k_draw)
        return batch_of(drawn, carry.kept, condition, i, k_replay)

    def step(carry: _Carry, i: Array) -> tuple[_Carry, tuple[Array, Array]]:
        params = carry.params
        queue = jax.tree.map(lambda q, x: q.at[i % queue_size].set(x), carry.queue, params)
        drawn, kept = drawn_at(carry._replace(queue=queue), i)
        some = drawn.prompts[: min(settings.prompts, len(at_start))]
        reference = at_start[some] if carry.anchor is None else token_logprobs(carry.anchor, some)
        batch = _group_data(drawn, reference, problem, settings, i)
        beta = condition.beta + (condition.beta_final - condition.beta) * i / settings.num_steps

        def loss(params: Any) -> Array:
            groups = batch(params)
            if not objective.needs.head:
                groups = groups._replace(log_z=None)
            total = {"tokens": groups.mask.sum(), "prompts": settings.prompts}
            loss = objective(groups, beta).loss
            return loss.sum() / total.get(objective.needs.total, loss.size)

        gradient: dict[str, Any] = jax.grad(loss)(params)
        scaled, state = _OPTIMIZER.update(gradient, carry.state)
        # log Z is one number per prompt, while many parameters of the policy move together.
        updates: Any = {**cast(dict[str, Any], scaled)}
        updates["z"] = 10 * updates["z"]
        updates = jax.tree.map(lambda u: -rate * decay(i) * u, updates)
        params = optax.apply_updates(params, updates)
        anchor = carry.anchor
        if anchor is not None:
            is_due = (i + 1) % settings.reset_period == 0
            anchor = jax.tree.map(lambda new, old: jnp.where(is_due, new, old), params, anchor)
        unique = 1 - jnp.mean(is_repeat(drawn.strings))
        rewarded = jnp.mean(rewards[drawn.prompts[:, None], drawn.strings])
        return _Carry(params, state, queue, kept, anchor), (unique, rewarded)

    def stretch(carry: _Carry, first: Array) -> tuple[_Carry, tuple[Measures, Batches]]:
        carry, (unique, rewarded) = jax.lax.scan(step, carry, first + jnp.arange(between))
        measured = measure(carry.params, start, problem, settings.target_beta)
        return carry, (measured, Batches(jnp.mean(unique), jnp.mean(rewarded)))

    between = settings.num_steps // settings.num_evaluations
    evaluated_at = between * jnp.arange(settings.num_evaluations)
    first = _first(start, settings, queue_size)
    return jax.lax.scan(stretch, first, evaluated_at)[1]


@functools.cache
def _program(
    objective: Objective, settings: Settings, form: tuple[Any, ...], queue_size: int
) -> Callable[..., tuple[Measures, Batches]]:
    """Return the compiled program for problems that differ only in rewards.

    Args:
        objective, settings: as in `train_once`.
        form: fields of the problem except its rewards.
        queue_size: number of old policies to keep.
    """

    def run(
        reward: Array, condition: Condition, key: Array, rate: Array
    ) -> tuple[Measures, Batches]:
        problem = Problem(reward, *form)
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
) -> tuple[Measures, Batches]:
    """Train all runs of one objective in one program.

    Returns:
        Arrays [conditions, rates, seeds, evaluations].
    """
    keys = jax.vmap(jax.random.key)(jnp.asarray(seeds))
    queue_size = max(c.lag + c.sync_period for c in conditions)
    program = _program(objective, settings, problem[1:], queue_size)
    stacked = jax.tree.map(lambda *x: jnp.asarray(x), *conditions)
    return jax.device_get(program(jnp.asarray(problem.reward), stacked, keys, jnp.asarray(rates)))
