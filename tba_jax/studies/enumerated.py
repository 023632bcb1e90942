# SPDX-License-Identifier: Apache-2.0
"""Problems whose every response can be written down; seeds and rates of a run in one program.

A response is four tokens out of four; a policy gives every one of the 256 its log-prob, token by
token, so that the target, the distance to it and the success rate are exact. The objectives are
those of `train.objectives`, shown groups as the trainer shows them; there is no model, buffer or
driver. A policy that is D steps old draws the data of a step: the lag is exact.

Invariant: a run is a function of its seed and rate alone; how many of them share a program changes
no figure beyond rounding.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from tba_jax.train.objectives.base import GroupData, Objective, Totals

VOCABULARY, LENGTH = 4, 4
STRINGS = np.array(list(itertools.product(range(VOCABULARY), repeat=LENGTH)), np.int32)
# Every prefix, shorter ones first, and which one stands before each token of each string.
_NUM_PREFIXES = sum(VOCABULARY**n for n in range(LENGTH))
_PREFIX = np.stack(
    [
        sum(VOCABULARY**m for m in range(n))
        + STRINGS[:, :n] @ (VOCABULARY ** np.arange(n, dtype=np.int32)[::-1]).astype(np.int32)
        for n in range(LENGTH)
    ],
    axis=1,
).astype(np.int32)

Behavior = Literal["policy", "uniform", "reference"]


class Problem(NamedTuple):
    """What is asked.

    Attributes:
        reward: [n 256], of every string of every prompt.
        width: of the policy's network; 0: a table of its own for each prompt.
    """

    reward: np.ndarray | Array
    width: int = 0


@dataclasses.dataclass(frozen=True)
class Settings:
    """How it is trained.

    Attributes:
        beta: KL coefficient of the objective.
        lag: steps between the policy that draws and the one that is trained.
        behavior: what draws: the policy of `lag` steps ago, or always the same.
        num_steps: of Adam, whose rate falls to 0 on a cosine.
        prompts, group: p and K of a batch.
        num_looks: how often it is looked at, the last time at the end.
        target_beta: of the target that distances are to; 0: the objective's own.
    """

    beta: float
    lag: int = 0
    behavior: Behavior = "policy"
    num_steps: int = 400
    prompts: int = 8
    group: int = 16
    num_looks: int = 20
    target_beta: float = 0.0


class Look(NamedTuple):
    """A policy, exactly: means over prompts, an array over runs (and looks).

    Attributes:
        target_kl: KL(target || policy), nats.
        success: expected reward.
        entropy: of responses, nats.
        best: probability of the most likely response.
    """

    target_kl: Array
    success: Array
    entropy: Array
    best: Array


def init_policy(key: Array, problem: Problem) -> Any:
    """Parameters, and with them log Z of each prompt where it is learned."""
    n, d = problem.reward.shape[0], problem.width
    log_z = jnp.zeros(n)
    if not d:
        return {"table": 0.5 * jax.random.normal(key, (n, _NUM_PREFIXES, VOCABULARY)), "z": log_z}
    keys = jax.random.split(key, 4)
    return {
        "prompt": jax.random.normal(keys[0], (n, d)),
        "prefix": jax.random.normal(keys[1], (_NUM_PREFIXES, d)),
        "hidden": jax.random.normal(keys[2], (d, d)) * (2 / d) ** 0.5,
        "out": jax.random.normal(keys[3], (d, VOCABULARY)) * 0.3 / d**0.5,
        "z": log_z,
    }


def token_logprobs(params: Any, prompts: Int[Array, " p"]) -> Float[Array, "p 256 t"]:
    """Of every token of every string."""
    if "table" in params:
        logits = params["table"][prompts]
    else:
        x = jax.nn.gelu(params["prompt"][prompts][:, None] + params["prefix"][None])
        logits = jax.nn.gelu(x @ params["hidden"]) @ params["out"]
    logprobs = jax.nn.log_softmax(logits)
    return logprobs[:, _PREFIX, STRINGS]


def target(reference: Float[Array, "p 256"], reward: Float[Array, "p 256"], beta: float) -> Array:
    """log of pi_ref exp(r / beta) / Z."""
    return jax.nn.log_softmax(reference + reward / beta, axis=-1)


def look(params: Any, start: Any, problem: Problem, beta: float) -> Look:
    """At every prompt of the problem."""
    every = jnp.arange(problem.reward.shape[0])
    logprob, reference = (token_logprobs(x, every).sum(-1) for x in (params, start))
    reward = jnp.asarray(problem.reward, jnp.float32)
    goal = target(reference, reward, beta)
    p = jnp.exp(logprob)
    return Look(
        jnp.mean(jnp.sum(jnp.exp(goal) * (goal - logprob), -1)),
        jnp.mean(jnp.sum(p * reward, -1)),
        -jnp.mean(jnp.sum(p * logprob, -1)),
        jnp.mean(jnp.max(p, -1)),
    )


def _group_data(
    params: Any, mu: Any, start: Any, problem: Problem, settings: Settings, key: Array, age: Array
) -> Callable[[Any], GroupData]:
    """A batch, as a function of what is trained."""
    k_prompts, k_strings = jax.random.split(key)
    p, k, n = settings.prompts, settings.group, problem.reward.shape[0]
    # Of fewer prompts than groups each is scored once.
    some = jax.random.choice(k_prompts, n, (p,), replace=False) if n >= p else jnp.arange(n)
    group_of = jnp.arange(p) % len(some)
    prompts = some[group_of]
    reference = token_logprobs(start, some)
    if settings.behavior == "uniform":
        behavior = jnp.full_like(reference, -jnp.log(VOCABULARY))
    elif settings.behavior == "reference":
        behavior = reference
    else:
        behavior = token_logprobs(mu, some)
    logits = behavior.sum(-1)[group_of][:, None]
    strings = jax.random.categorical(k_strings, logits, axis=-1, shape=(p, k))

    def chosen(x: Float[Array, "n 256 t"]) -> Float[Array, "p k t"]:
        return x[group_of[:, None], strings]

    reward = jnp.asarray(problem.reward, jnp.float32)[prompts[:, None], strings]
    ones = jnp.ones((p, k))
    behavior, reference = chosen(behavior), chosen(reference)

    def data(trained: Any) -> GroupData:
        policy = chosen(token_logprobs(trained, some))
        return GroupData(
            policy_logprob=policy.sum(-1),
            policy_token_logprobs=policy,
            behavior_token_logprobs=behavior,
            reference_logprob=reference.sum(-1),
            reference_token_logprobs=reference,
            mask=jnp.ones(policy.shape, bool),
            reward=reward,
            weight=ones,
            length=jnp.full((p, k), LENGTH),
            staleness=jnp.broadcast_to(age, (p, k)),
            log_z=trained["z"][prompts],
            totals=Totals(jnp.float32(p), jnp.float32(p * k), jnp.float32(p * k * LENGTH)),
        )

    return data


def train_once(
    objective: Objective, problem: Problem, settings: Settings, key: Array, rate: Array
) -> Look:
    """One run; its looks lie along the first axis."""
    k_start, k_data = jax.random.split(key)
    start = init_policy(k_start, problem)
    decay = optax.cosine_decay_schedule(1.0, settings.num_steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam())
    has_head = bool(objective.heads)
    # Slot i of the queue holds the policy of the last step that is i modulo its length.
    size = settings.lag + 1
    queue = jax.tree.map(lambda x: jnp.broadcast_to(x, (size, *x.shape)), start)

    def step(carry: Any, i: Array) -> tuple[Any, None]:
        params, state, queue = carry
        queue = jax.tree.map(lambda q, x: q.at[i % size].set(x), queue, params)
        mu = jax.tree.map(lambda q: q[jnp.maximum(i - settings.lag, 0) % size], queue)
        age = jnp.minimum(i, settings.lag)
        batch = _group_data(
            params, mu, start, problem, settings, jax.random.fold_in(k_data, i), age
        )

        def loss(params: Any) -> Array:
            data = batch(params)
            data = data if has_head else data._replace(log_z=None)
            return objective(data, settings.beta).loss

        gradient: dict[str, Any] = jax.grad(loss)(params)
        scaled, state = optimizer.update(gradient, state)
        # log Z is a single number a prompt; the policy is many that move together.
        updates: Any = {**cast(dict[str, Any], scaled)}
        updates["z"] = 10 * updates["z"]
        updates = jax.tree.map(lambda u: -rate * decay(i) * u, updates)
        return (optax.apply_updates(params, updates), state, queue), None

    def stretch(carry: Any, first: Array) -> tuple[Any, Look]:
        carry, _ = jax.lax.scan(step, carry, first + jnp.arange(between))
        return carry, look(carry[0], start, problem, settings.target_beta or settings.beta)

    between = settings.num_steps // settings.num_looks
    carry = (start, optimizer.init(start), queue)
    _, looks = jax.lax.scan(stretch, carry, between * jnp.arange(settings.num_looks))
    return looks


@functools.cache
def _program(objective: Objective, settings: Settings, width: int) -> Callable[..., Look]:
    def run(reward: Array, key: Array, rate: Array) -> Look:
        return train_once(objective, Problem(reward, width), settings, key, rate)

    over_seeds = jax.vmap(run, (None, 0, None))
    return jax.jit(jax.vmap(over_seeds, (None, None, 0)))


def train(
    objective: Objective,
    problem: Problem,
    settings: Settings,
    *,
    seeds: Sequence[int],
    rates: Sequence[float],
) -> Look:
    """All runs of one objective in one program: arrays [rates, seeds, looks]."""
    keys = jax.vmap(jax.random.key)(jnp.asarray(seeds))
    program = _program(objective, settings, problem.width)
    return jax.device_get(program(jnp.asarray(problem.reward), keys, jnp.asarray(rates)))


def few_modes() -> Problem:
    """One prompt with rewards of every size between 0 and 1, by a table."""
    return Problem(np.random.default_rng(0).uniform(size=(1, 256)).astype(np.float32) ** 3)


def sums(num_prompts: int = 32, width: int = 32) -> Problem:
    """Write four digits whose weighted sum is the prompt's: 8 of 256 strings, by one network.

    The answers to a prompt lie all over: 3 % of what a new policy writes, in eight modes.
    """
    value = STRINGS @ np.array([1, 5, 11, 7]) % num_prompts
    # As many strings for each prompt, whatever the sums do.
    order = np.argsort(value, kind="stable")
    reward = np.zeros((num_prompts, 256), np.float32)
    size = 256 // num_prompts
    for prompt in range(num_prompts):
        reward[prompt, order[prompt * size : (prompt + 1) * size]] = 1.0
    return Problem(reward, width)
