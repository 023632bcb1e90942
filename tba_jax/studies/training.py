# SPDX-License-Identifier: Apache-2.0
"""Training on enumerable problems: one program runs all conditions, seeds and learning rates.

Uses the losses of `train`, with groups in the format of the trainer; there is no language model and
no buffer. The policy of D steps ago samples the data of a step, so the lag is exact.

Invariants: a run depends on its condition, seed and rate alone; the number of runs in a program
changes results only by rounding. Replayed groups keep the log-probs of the policy that drew them.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from tba_jax.studies.problems import (
    VOCABULARY,
    Measures,
    Problem,
    init_policy,
    measure,
    token_logprobs,
    token_logprobs_of,
)
from tba_jax.train.groups import Groups
from tba_jax.train.objectives import Objective

SAMPLERS = ("policy", "uniform", "reference")
_NUM_EVALUATIONS = 20  # the last one is at the end
_OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam())


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings shared by all runs of a program.

    Attributes:
        num_steps: steps of Adam, with a cosine learning rate that ends at 0.
        prompts, group: P and K of a batch.
        target_beta: beta of the target distribution.
        replays: whether groups are stored and replayed; their share is 1 - `Condition.recency`.
        reset_period: steps between resets of the reference to the policy; 0: never.
    """

    num_steps: int = 400
    prompts: int = 8
    group: int = 16
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


def train(
    objective: Objective,
    problem: Problem,
    settings: Settings,
    conditions: Sequence[Condition],
    *,
    seeds: Sequence[int],
    rates: Sequence[float],
) -> Measures:
    """Train all runs of one objective in one program.

    Returns:
        Arrays [conditions, rates, seeds, evaluations].
    """
    keys = jax.vmap(jax.random.key)(jnp.asarray(seeds))
    stacked = jax.tree.map(lambda *x: jnp.asarray(x), *conditions)
    queue_size = max(c.lag + c.sync_period for c in conditions)
    numbers = jnp.asarray(problem.reward), stacked, jnp.asarray(rates), keys
    return jax.device_get(_train_all(*numbers, objective, settings, problem.width, queue_size))


@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7))
def _train_all(
    reward: Array,
    conditions: Condition,
    rates: Array,
    keys: Array,
    objective: Objective,
    settings: Settings,
    width: int,
    queue_size: int,
) -> Measures:
    """Train all runs; `width` is that of the policy, and `queue_size` old policies are kept."""
    problem = Problem(reward, width)

    def run(condition: Condition, rate: Array, key: Array) -> Measures:
        return _train_once(objective, problem, settings, condition, key, rate, queue_size)

    over_seeds = jax.vmap(run, (None, None, 0))
    over_rates = jax.vmap(over_seeds, (None, 0, None))
    return jax.vmap(over_rates, (0, None, None))(conditions, rates, keys)


def _train_once(
    objective: Objective,
    problem: Problem,
    settings: Settings,
    condition: Condition,
    key: Array,
    rate: Array,
    queue_size: int,
) -> Measures:
    """Train one run; the first axis of the result has its evaluations."""
    k_start, k_data = jax.random.split(key)
    start = init_policy(k_start, problem)
    at_start = token_logprobs(start, jnp.arange(problem.reward.shape[0]))
    decay = optax.cosine_decay_schedule(1.0, settings.num_steps)

    def batch_of(queue: Any, kept: Drawn | None, i: Array) -> tuple[Drawn, Drawn | None]:
        """Return the training data of step i, and the stored groups after it."""
        version = i // condition.sync_period * condition.sync_period
        version = jnp.maximum(version - condition.lag, 0)
        mu = jax.tree.map(lambda q: q[version % queue_size], queue)
        k_draw, k_replay = jax.random.split(jax.random.fold_in(k_data, i))
        drawn = draw(mu, at_start, settings, condition.sampler, version, k_draw)
        if kept is None:
            return drawn, None
        kept = Drawn(*(h.at[i].set(x) for h, x in zip(kept, drawn, strict=True)))
        return with_replays(drawn, kept, condition.recency, i, k_replay), kept

    def step(carry: _Carry, i: Array) -> tuple[_Carry, None]:
        queue = jax.tree.map(lambda q, x: q.at[i % queue_size].set(x), carry.queue, carry.params)
        drawn, kept = batch_of(queue, carry.kept, i)
        beta = condition.beta + (condition.beta_final - condition.beta) * i / settings.num_steps
        some = drawn.prompts[: min(settings.prompts, len(at_start))]
        reference = at_start[some] if carry.anchor is None else token_logprobs(carry.anchor, some)

        def loss(params: Any) -> Array:
            groups = _groups(params, drawn, reference, problem, i)
            if not objective.needs.head:
                groups = groups._replace(log_z=None)
            total = {"tokens": groups.mask.sum(), "prompts": settings.prompts}
            terms = objective(groups, beta).loss
            return terms.sum() / total.get(objective.needs.total, terms.size)

        scaled, state = _OPTIMIZER.update(jax.grad(loss)(carry.params), carry.state)
        # log Z is one number per prompt, while many parameters of the policy move together.
        updates: Any = {**cast(dict[str, Any], scaled)}
        updates["z"] = 10 * updates["z"]
        updates = jax.tree.map(lambda u: -rate * decay(i) * u, updates)
        params = optax.apply_updates(carry.params, updates)
        anchor = carry.anchor
        if anchor is not None:
            is_due = (i + 1) % settings.reset_period == 0
            anchor = jax.tree.map(lambda new, old: jnp.where(is_due, new, old), params, anchor)
        return _Carry(params, state, queue, kept, anchor), None

    def stretch(carry: _Carry, first: Array) -> tuple[_Carry, Measures]:
        carry, _ = jax.lax.scan(step, carry, first + jnp.arange(between))
        return carry, measure(carry.params, start, problem, settings.target_beta)

    between = settings.num_steps // _NUM_EVALUATIONS
    one = jax.eval_shape(lambda: draw(start, at_start, settings, 0, jnp.int32(0), k_data))
    nothing_kept = jax.tree.map(lambda x: jnp.zeros((settings.num_steps, *x.shape), x.dtype), one)
    first = _Carry(
        start,
        _OPTIMIZER.init(start),
        jax.tree.map(lambda x: jnp.broadcast_to(x, (queue_size, *x.shape)), start),
        nothing_kept if settings.replays else None,
        start if settings.reset_period else None,
    )
    return jax.lax.scan(stretch, first, between * jnp.arange(_NUM_EVALUATIONS))[1]


def draw(
    mu: Any,
    reference: Float[Array, "n 256 t"],
    settings: Settings,
    sampler: Array | int,
    version: Array,
    key: Array,
) -> Drawn:
    """Draw new groups; with few prompts, each prompt has several groups."""
    k_prompts, k_strings = jax.random.split(key)
    p, k, n = settings.prompts, settings.group, reference.shape[0]
    some = jax.random.choice(k_prompts, n, (p,), replace=False) if n >= p else jnp.arange(n)
    group_of = jnp.arange(p) % len(some)
    uniform = jnp.full((len(some), *reference.shape[1:]), -jnp.log(VOCABULARY))
    behavior = jnp.stack([token_logprobs(mu, some), uniform, reference[some]])[sampler]
    # Sampling by the inverse distribution function: one random number for each of the 256 strings
    # would take most of the time of a step.
    below = jnp.cumsum(jnp.exp(behavior.sum(-1)), axis=-1)[group_of][:, None]
    at = jax.random.uniform(k_strings, (p, k, 1)) * below[..., -1:]
    strings = jnp.minimum(jnp.sum(below < at, axis=-1), below.shape[-1] - 1)
    return Drawn(
        some[group_of],
        strings,
        behavior[group_of[:, None], strings],
        jnp.broadcast_to(version, (p, k)),
    )


def with_replays(
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


def _groups(params: Any, drawn: Drawn, reference: Array, problem: Problem, step: Array) -> Groups:
    """Return drawn groups as the losses read them, a function of the trained parameters.

    Args:
        params: parameters of the policy.
        drawn: groups of the batch.
        reference: [n 256 t], log-probs of the reference for the distinct prompts of the batch.
        problem: the rewards.
        step: step of the policy.
    """
    n = len(reference)  # with fewer prompts than groups, each prompt is scored once
    group_of = jnp.arange(len(drawn.prompts)) % n
    policy = token_logprobs_of(params, drawn.prompts[:n], group_of, drawn.strings)
    value = params["z"][drawn.prompts]
    rewards = jnp.asarray(problem.reward, jnp.float32)
    return Groups(
        logp=policy,
        behavior=drawn.behavior,
        reference=reference[group_of[:, None], drawn.strings],
        mask=jnp.ones(policy.shape, bool),
        reward=rewards[drawn.prompts[:, None], drawn.strings],
        staleness=step - drawn.version,
        log_z=value,
        # One value per prompt, the same for every token of a response.
        values=jnp.broadcast_to(value[:, None, None], policy.shape),
    )
