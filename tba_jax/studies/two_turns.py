# SPDX-License-Identifier: Apache-2.0
"""Command: distance to the soft optimum after training on fully enumerated games of two turns.

    python -m tba_jax.studies.two_turns [--seeds=10]

An episode is a token, an observation and another token. Every episode has the weight of its
probability under a sampler that is not the policy, so no distance is due to sampling. The policy
is a table, trained in float64 on the loss of `objective.name=tb`. Seeds differ in rewards,
reference, sampler and observations. Results: docs/lab/two_turns.md.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from tba_jax.commands.entry_point import run_command
from tba_jax.train.objectives.base import GroupData, Objective, Totals
from tba_jax.train.objectives.tb import TrajectoryBalance

BETA = 0.2
_TOKENS, _OBSERVATIONS, _SEEDS = 4, 3, 2
_NUM_STEPS, _RATE = 4000, 0.05
OBJECTIVES: Mapping[str, Objective] = {
    "episode": TrajectoryBalance(),
    "turn": TrajectoryBalance(log_z="learned", balance="turn"),
}
# Each observation is a function of the token before it; or random; or random, and adds 0, 1/2 or 1
# to the reward; or a function of the token and a hidden number, which a group shares and the policy
# does not see.
GAMES = ("from context", "random", "random, rewarded", "hidden seed")


class Game(NamedTuple):
    """A game with a tokens, o observations and z equally likely hidden numbers.

    Attributes:
        observed: [z a o], probability of an observation after the first token.
        reward: [z a o a].
        reference: log-probs of the first token [a] and of the second [a o a].
        sampler: log-probs of the sampler, as in `reference`.
    """

    observed: Array
    reward: Array
    reference: tuple[Array, Array]
    sampler: tuple[Array, Array]


def make_game(kind: str, seed: int) -> Game:
    """Return a random game of a kind; arrays are float64."""
    rng = np.random.default_rng(seed)
    shape = _TOKENS, _OBSERVATIONS
    z = _SEEDS if kind == "hidden seed" else 1

    def policy(scale: float) -> tuple[Array, Array]:
        logits = rng.normal(0, scale, _TOKENS), rng.normal(0, scale, (*shape, _TOKENS))
        return jax.nn.log_softmax(jnp.asarray(logits[0])), jax.nn.log_softmax(
            jnp.asarray(logits[1])
        )

    if kind.startswith("random"):
        observed = rng.dirichlet(np.ones(_OBSERVATIONS), (1, _TOKENS))
    else:
        observed = np.eye(_OBSERVATIONS)[rng.integers(_OBSERVATIONS, size=(z, _TOKENS))]
    reward = rng.uniform(size=(z, *shape, _TOKENS))
    if kind == "random, rewarded":
        reward += np.arange(_OBSERVATIONS)[:, None] / 2
    return Game(jnp.asarray(observed), jnp.asarray(reward), policy(0.5), policy(0.5))


def _episodes(game: Game, policy: tuple[Array, Array]) -> Array:
    """Return log-probs of the tokens of every episode, [z e t], 0 at the observation."""
    first = jnp.broadcast_to(policy[0][None, :, None, None], game.reward.shape)
    second = jnp.broadcast_to(policy[1][None], game.reward.shape)
    tokens = jnp.stack([first, jnp.zeros_like(first), second], axis=-1)
    return tokens.reshape(len(game.reward), -1, 3)


def _probability(game: Game, policy: tuple[Array, Array]) -> Array:
    """Return the probability of every episode given the hidden number, [z e]."""
    chance = jnp.broadcast_to(game.observed[..., None], game.reward.shape)
    tokens = jnp.exp(jnp.sum(_episodes(game, policy), axis=-1))
    return tokens * chance.reshape(tokens.shape)


def _policy(params: Any) -> tuple[Array, Array]:
    return jax.nn.log_softmax(params["first"]), jax.nn.log_softmax(params["second"])


def group_data(game: Game, params: Any) -> GroupData:
    """Return all episodes of a game, a group for each hidden number."""
    policy = _episodes(game, _policy(params))
    reference = _episodes(game, game.reference)
    weight = 100 * _probability(game, game.sampler)  # K is 100
    p, k = weight.shape
    begun = jnp.broadcast_to(params["values"][0], game.reward.shape)
    observed = jnp.broadcast_to(params["values"][1][None, ..., None], game.reward.shape)
    values = jnp.stack([begun, jnp.zeros_like(begun), observed], axis=-1)
    total = jnp.sum(weight)
    return GroupData(
        policy_logprob=policy.sum(-1),
        policy_token_logprobs=policy,
        behavior_token_logprobs=_episodes(game, game.sampler),
        reference_logprob=reference.sum(-1),
        reference_token_logprobs=reference,
        mask=jnp.broadcast_to(jnp.array([[[True, False, True]]]), policy.shape),
        reward=game.reward.reshape(p, k),
        weight=weight,
        length=jnp.full((p, k), 3),
        staleness=jnp.zeros((p, k), jnp.int32),
        log_z=None,
        totals=Totals(jnp.asarray(p, total.dtype), total, 2 * total),
        token_values=values.reshape(p, k, 3),
    )


def trained(objective: Objective, game: Game) -> tuple[tuple[Array, Array], Array]:
    """Train a policy on a game; return (policy, root mean square of the residuals)."""
    params = {
        "first": game.reference[0],
        "second": game.reference[1],
        "values": (jnp.zeros(()), jnp.zeros((_TOKENS, _OBSERVATIONS))),
    }
    optimizer = optax.adam(optax.cosine_decay_schedule(_RATE, _NUM_STEPS))

    def step(carry: Any, _: None) -> tuple[Any, None]:
        params, state = carry
        grads = jax.grad(lambda x: objective(group_data(game, x), BETA).loss)(params)
        updates, state = optimizer.update(grads, state)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), None, _NUM_STEPS)
    metrics = objective(group_data(game, params), BETA).metrics
    return _policy(params), metrics["residual_std"]


class Distance(NamedTuple):
    """Distance of a policy from the soft optimum; arrays over seeds.

    Attributes:
        first, second: KL(optimum || policy) of each turn, in nats.
        residual: root of the mean square of the residuals.
        lost: missing share of the optimum's gain in (reward - beta KL) over the reference.
    """

    first: Array
    second: Array
    residual: Array
    lost: Array


def distance(game: Game, policy: tuple[Array, Array], residual: Array) -> Distance:
    """Return the distance of a policy from the soft optimum of the game.

    The policy sees the observation only, so the optimum averages over the posterior of the hidden
    number.
    """
    joint = game.observed / len(game.observed)
    observed = jnp.sum(joint, axis=0)
    posterior = joint / jnp.maximum(observed, 1e-300)[None]
    reward = jnp.sum(posterior[..., None] * game.reward, axis=0)

    def improved(reference: Array, value: Array) -> tuple[Array, Array]:
        """Return (optimal log-probs, soft value) of a choice among tokens with these values."""
        logits = reference + value / BETA
        return jax.nn.log_softmax(logits), BETA * jax.nn.logsumexp(logits, axis=-1)

    second, value = improved(game.reference[1], reward)
    first, best = improved(game.reference[0], jnp.sum(observed * value, axis=-1))

    def soft_reward(policy: tuple[Array, Array]) -> Array:
        kept = jnp.exp(policy[1]) * (reward - BETA * (policy[1] - game.reference[1]))
        after = jnp.sum(observed * jnp.sum(kept, axis=-1), axis=-1)
        return jnp.sum(jnp.exp(policy[0]) * (after - BETA * (policy[0] - game.reference[0])))

    def kl(best: Array, found: Array) -> Array:
        return jnp.sum(jnp.exp(best) * (best - found), axis=-1)

    later = jnp.sum(jnp.exp(first)[:, None] * observed * kl(second, policy[1]))
    start = soft_reward(game.reference)
    lost = (best - soft_reward(policy)) / (best - start)
    return Distance(kl(first, policy[0]), later, residual, lost)


def measure(kind: str, balance: str, seeds: Sequence[int]) -> Distance:
    """Train on a game of every seed and return the distances; arrays [seeds], float64."""
    with jax.enable_x64(True):
        games = [make_game(kind, seed) for seed in seeds]
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *games)
        run = jax.vmap(lambda game: distance(game, *trained(OBJECTIVES[balance], game)))
        return jax.device_get(jax.jit(run)(stacked))


def table(num_seeds: int) -> str:
    """Return the results of all games as a Markdown table; means and extremes are over seeds."""
    lines = [
        "| observations | `balance` | KL, turn 1 | KL, turn 2 | smallest sum | largest sum "
        "| residual | lost |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in GAMES:
        for balance in OBJECTIVES:
            found = measure(kind, balance, range(num_seeds))
            sums = found.first + found.second
            numbers = [found.first.mean(), found.second.mean(), sums.min(), sums.max()]
            # Rounding makes some distances of 0 negative.
            cells = [f"{abs(x):.1e}" for x in (*numbers, found.residual.mean())]
            lost = f"{abs(found.lost.mean()):.1%}"
            lines.append(f"| {kind} | {balance} | {' | '.join(cells)} | {lost} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(prog="python -m tba_jax.studies.two_turns")
    parser.add_argument("--seeds", type=int, default=10, help="number of games of each kind")
    print(table(parser.parse_args(argv).seeds))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
