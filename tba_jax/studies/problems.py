# SPDX-License-Identifier: Apache-2.0
"""Problems with 256 possible responses, and policies over these responses, for exact measures.

A response has four tokens out of a vocabulary of four. A policy gives the log-probs of all 256
strings, so the target, the distance to the target and success are exact.

Invariant: evaluating a policy samples nothing.
"""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

VOCABULARY, LENGTH = 4, 4
STRINGS = np.array(list(itertools.product(range(VOCABULARY), repeat=LENGTH)), np.int32)
# Every prefix, shorter ones first, and the index of the prefix before each token of each string.
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
    """Rewards and policy of a problem.

    Attributes:
        reward: [n 256], reward of every string of every prompt.
        width: width of the policy's network; 0: a separate table for each prompt.
    """

    reward: np.ndarray | Array
    width: int = 0


class Measures(NamedTuple):
    """Exact measures of a policy: means over prompts, one array over runs (and evaluations).

    Attributes:
        target_kl: KL(target || policy) in nats; the target is pi_ref exp(r / beta) / Z.
        success: expected reward.
        entropy: entropy of responses in nats.
        modes: perplexity of the distribution over rewarded strings.
    """

    target_kl: Array | np.ndarray
    success: Array | np.ndarray
    entropy: Array | np.ndarray
    modes: Array | np.ndarray


def init_policy(key: Array, problem: Problem) -> Any:
    """Return initial parameters, with the log Z of each prompt for objectives that learn it."""
    n, d = problem.reward.shape[0], problem.width
    if not d:
        table = 0.5 * jax.random.normal(key, (n, _NUM_PREFIXES, VOCABULARY))
        return {"table": table, "z": jnp.zeros(n)}
    keys = jax.random.split(key, 4)
    return {
        "prompt": jax.random.normal(keys[0], (n, d)),
        "prefix": jax.random.normal(keys[1], (_NUM_PREFIXES, d)),
        "hidden": jax.random.normal(keys[2], (d, d)) * (2 / d) ** 0.5,
        "out": jax.random.normal(keys[3], (d, VOCABULARY)) * 0.3 / d**0.5,
        "z": jnp.zeros(n),
    }


def token_logprobs(params: Any, prompts: Int[Array, " p"]) -> Float[Array, "p 256 t"]:
    """Return the log-probs of every token of every string."""
    return _next_logprobs(params, prompts)[:, _PREFIX, STRINGS]


def token_logprobs_of(
    params: Any, prompts: Int[Array, " n"], group_of: Int[Array, " p"], strings: Int[Array, "p k"]
) -> Float[Array, "p k t"]:
    """Return the log-probs of every token of some strings.

    Group i has the prompt `prompts[group_of[i]]`.
    """
    index = group_of[:, None, None], jnp.asarray(_PREFIX)[strings], jnp.asarray(STRINGS)[strings]
    return _next_logprobs(params, prompts)[index]


def _next_logprobs(params: Any, prompts: Int[Array, " p"]) -> Float[Array, "p 85 4"]:
    """Return the log-probs of every token after every prefix."""
    if "table" in params:
        logits = params["table"][prompts]
    else:
        x = jax.nn.relu(params["prompt"][prompts][:, None] + params["prefix"][None])
        logits = jax.nn.relu(x @ params["hidden"]) @ params["out"]
    return jax.nn.log_softmax(logits)


def measure(params: Any, start: Any, problem: Problem, beta: float) -> Measures:
    """Evaluate a policy at every prompt; the reference is the policy `start`."""
    every = jnp.arange(problem.reward.shape[0])
    logprob, reference = (token_logprobs(x, every).sum(-1) for x in (params, start))
    reward = jnp.asarray(problem.reward, jnp.float32)
    target = jax.nn.log_softmax(reference + reward / beta, axis=-1)
    p = jnp.exp(logprob)
    earned = p * reward
    earned = earned / jnp.maximum(earned.sum(-1, keepdims=True), 1e-30)
    return Measures(
        jnp.mean(jnp.sum(jnp.exp(target) * (target - logprob), -1)),
        jnp.mean(jnp.sum(p * reward, -1)),
        -jnp.mean(jnp.sum(p * logprob, -1)),
        jnp.mean(jnp.exp(jnp.sum(jax.scipy.special.entr(earned), -1))),
    )


def few_modes() -> Problem:
    """Return a problem of one prompt with rewards of every size between 0 and 1."""
    return Problem(np.random.default_rng(0).uniform(size=(1, 256)).astype(np.float32) ** 3)


def sums() -> Problem:
    """Return the problem of writing four digits whose weighted sum equals the prompt's number.

    Each of 32 prompts has 8 correct strings of 256; a new policy writes a correct one with
    probability 3 %. One network serves all prompts.
    """
    value = STRINGS @ np.array([1, 5, 11, 7]) % 32
    # Every prompt has the same number of correct strings.
    correct = np.argsort(value, kind="stable").reshape(32, 8)
    reward = np.zeros((32, 256), np.float32)
    np.put_along_axis(reward, correct, 1.0, axis=1)
    return Problem(reward, width=32)
