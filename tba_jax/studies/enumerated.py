# SPDX-License-Identifier: Apache-2.0
"""Problems whose every response can be written down, and policies on them, exactly.

A response is four tokens out of four; a policy gives every one of the 256 its log-prob, token by
token, so that the target, the distance to it and the success rate are exact. How it is trained is
not known here.

Invariant: a look at a policy samples nothing.
"""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

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


class Problem(NamedTuple):
    """What is asked.

    Attributes:
        reward: [n 256], of every string of every prompt.
        width: of the policy's network; 0: a table of its own for each prompt.
    """

    reward: np.ndarray | Array
    width: int = 0


class Look(NamedTuple):
    """A policy, exactly: means over prompts, an array over runs (and looks).

    Attributes:
        target_kl: KL(target || policy), nats.
        success: expected reward.
        entropy: of responses, nats.
        best: probability of the most likely response.
        modes: as how many equally likely strings what is rewarded counts (a perplexity).
    """

    target_kl: Array | np.ndarray
    success: Array | np.ndarray
    entropy: Array | np.ndarray
    best: Array | np.ndarray
    modes: Array | np.ndarray


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


def _next_logprobs(params: Any, prompts: Int[Array, " p"]) -> Float[Array, "p 85 4"]:
    """Of every token after every prefix."""
    if "table" in params:
        logits = params["table"][prompts]
    else:
        x = jax.nn.relu(params["prompt"][prompts][:, None] + params["prefix"][None])
        logits = jax.nn.relu(x @ params["hidden"]) @ params["out"]
    return jax.nn.log_softmax(logits)


def token_logprobs(params: Any, prompts: Int[Array, " p"]) -> Float[Array, "p 256 t"]:
    """Of every token of every string."""
    return _next_logprobs(params, prompts)[:, _PREFIX, STRINGS]


def token_logprobs_of(
    params: Any, prompts: Int[Array, " n"], group_of: Int[Array, " p"], strings: Int[Array, "p k"]
) -> Float[Array, "p k t"]:
    """Of every token of some strings, given the prompt `prompts[group_of]` of each group."""
    index = group_of[:, None, None], jnp.asarray(_PREFIX)[strings], jnp.asarray(STRINGS)[strings]
    return _next_logprobs(params, prompts)[index]


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
    earned = p * reward
    earned = earned / jnp.maximum(earned.sum(-1, keepdims=True), 1e-30)
    return Look(
        jnp.mean(jnp.sum(jnp.exp(goal) * (goal - logprob), -1)),
        jnp.mean(jnp.sum(p * reward, -1)),
        -jnp.mean(jnp.sum(p * logprob, -1)),
        jnp.mean(jnp.max(p, -1)),
        jnp.mean(jnp.exp(jnp.sum(jax.scipy.special.entr(earned), -1))),
    )


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
