# SPDX-License-Identifier: Apache-2.0
"""An objective of tokens has the same gradient however its batch is cut and laid out."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fake_batches import (
    CONFIG,
    SCORING,
    SETTINGS,
    broken,
    keep_gradient,
    lay_out,
    make_batch,
    make_draws,
    repeated,
    slow,
)
from fake_models import random_params

from tba_jax.models.logprobs import response_mask, token_logprobs
from tba_jax.models.transformer import apply
from tba_jax.settings import Schedule
from tba_jax.train.heads import LogZHead
from tba_jax.train.objectives.base import Loss, Objective
from tba_jax.train.objectives.ppo import Ppo
from tba_jax.train.state import init_state
from tba_jax.train.step import make_train_step

CLIP, BETA = 0.2, 0.1
# K = 6.
WEIGHTS = ((1, 2, 1, 2), (3, 1, 1, 1), (2, 2, 1, 1), (1, 1, 1, 3))


@dataclasses.dataclass(frozen=True)
class Grpo(Objective):
    """Clipped ratios of tokens, advantages over the group's deviation, a KL of tokens."""

    needs_behavior = True
    needs_token_reference = True

    def __call__(self, data, beta):
        centred = data.reward - data.mean_over_group(data.reward)[:, None]
        std = jnp.sqrt(data.mean_over_group(jnp.square(centred)))[:, None]
        advantage = centred / (std + 1e-4)
        gain = clipped(data.policy_token_logprobs - data.behavior_token_logprobs, advantage)
        gap = data.reference_token_logprobs - data.policy_token_logprobs
        kl = jnp.exp(gap) - gap - 1
        return Loss(-data.mean_over_tokens(gain - beta * kl), {"kl_tokens": jnp.float32(0)})


def clipped(log_ratio, advantage):
    ratio, advantage = jnp.exp(log_ratio), advantage[..., None]
    return jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)


def score(params, batch):
    lengths = batch.prompt_lengths, batch.response_lengths
    tokens = batch.tokens.reshape(*batch.rewards.shape, -1)
    return token_logprobs(
        params, tokens, *lengths, response_bucket=6, config=CONFIG, scoring=SCORING
    )


@functools.cache
def problem():
    """(parameters, those of the reference, draws by something near the policy)."""
    params, reference = random_params(CONFIG, 0), random_params(CONFIG, 1)
    draws, batch = make_draws(), make_batch()
    rng = np.random.default_rng(5)
    drawn = np.asarray(score(params, batch))
    behavior = (drawn + rng.normal(0, 0.3, drawn.shape)).astype(np.float32)
    assert len(np.unique(batch.response_lengths)) > 3

    def drawn_so(i, j, y):
        logprobs = behavior[i, j, : len(y.response_tokens)]
        return dataclasses.replace(y, behavior_token_logprobs=logprobs)

    draws = [
        d._replace(
            trajectories=tuple(drawn_so(i, j, y) for j, y in enumerate(d.trajectories)),
            weights=WEIGHTS[i],
        )
        for i, d in enumerate(draws)
    ]
    return params, reference, draws


@functools.cache
def expected():
    """Gradient of the loss as written down for a whole padded batch of repeated rows."""
    params, reference, draws = problem()
    batch = lay_out(repeated(draws))
    tokens = batch.tokens.reshape(4, 6, -1)
    mask = response_mask(tokens[..., -6:], batch.response_lengths, SCORING)
    behavior = batch.behavior_token_logprobs.reshape(4, 6, -1)
    reward = batch.rewards
    advantage = (reward - reward.mean(1, keepdims=True)) / (reward.std(1, keepdims=True) + 1e-4)
    theirs = score(reference, batch)

    def loss(params):
        ours = score(params, batch)
        gain = clipped(ours - behavior, advantage)
        kl = jnp.exp(theirs - ours) - (theirs - ours) - 1
        return -jnp.sum((gain - BETA * kl) * mask) / mask.sum()

    return jax.jit(jax.value_and_grad(loss))(params)


# Micro-batches of whole groups; groups spread over several; the same of packed rows.
@pytest.mark.parametrize(
    ("row_length", "micro_batch_rows"),
    [slow(0, 6), (0, 2), (18, 2)],
)
def test_every_cut_has_the_gradient_of_the_whole_batch(row_length, micro_batch_rows):
    params, reference, draws = problem()
    optimizer = keep_gradient()
    cut = {"micro_batch_rows": micro_batch_rows, "is_whole": micro_batch_rows == 6}
    settings = dataclasses.replace(SETTINGS, objective=Grpo(), **cut)
    step = make_train_step(CONFIG, optimizer, optax.constant_schedule(0.0), settings)
    state = init_state(jax.tree.map(jnp.copy, params), optimizer, keep_reference=True)
    state = state._replace(reference_params=jax.tree.map(jnp.copy, reference))
    state, metrics = step(state, lay_out(draws, row_length=row_length, **cut))
    loss, gradient = expected()
    np.testing.assert_allclose(metrics["train/loss"], loss, rtol=1e-5)
    assert {"train/kl_tokens", "train/kl_reference"} <= metrics.keys()
    assert "train/tb_loss" not in metrics  # it is not this objective's
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradient))
    assert largest > 1e-2
    jax.tree.map(
        # float32 sums in another order, of numbers up to the largest
        lambda got, want: np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * largest),
        state.opt_state,
        gradient,
    )


HEAD = LogZHead(jnp.linspace(-1, 1, CONFIG.hidden_size, dtype=jnp.float32), jnp.float32(0.3))
TRACE = 0.8


@functools.cache
def loss_of_rows():
    """(loss of some rows and its gradient, values of all) of PPO, written down for padded rows.

    Advantages and what values are fitted to are computed by a loop over tokens, in numpy.
    """
    _, _, draws = problem()
    batch = lay_out(draws)
    is_there = batch.slots[:, 0] > 0
    at, tokens = batch.slots[is_there, 0] - 1, batch.tokens[is_there]
    (n, size), t = tokens.shape, 6
    lengths = batch.response_lengths.reshape(-1)[at][:, None]
    prompt_lengths = batch.prompt_lengths.reshape(-1)[at]
    first = size - t - prompt_lengths[:, None]
    index = np.arange(size)[None]
    is_token = (index >= first) & (index < size - t + lengths)
    mask = np.arange(t) < lengths
    weight = batch.weights.reshape(-1)[at][:, None] * mask
    reward = batch.rewards.reshape(-1)[at]
    behavior = batch.behavior_token_logprobs[is_there, 0]

    given = jax.tree.map(
        jnp.asarray, (tokens, first, lengths, is_token, mask, weight, behavior, prompt_lengths)
    )

    def scored(params, head, rows):
        tokens, first, lengths, is_token, _, _, _, prompt_lengths = (x[rows] for x in given)
        hidden = apply(
            params, tokens, jnp.maximum(index - first, 0),
            is_token, config=CONFIG, compute_dtype=jnp.float32, remat="none",
        )  # fmt: skip
        states = hidden[:, size - t - 1 : size - 1]
        logprobs = token_logprobs(
            params, tokens[:, None], prompt_lengths[:, None],
            lengths, response_bucket=t, config=CONFIG, scoring=SCORING,
        )  # fmt: skip
        return logprobs.reshape(-1, t), states @ head.weight + head.bias

    def values(params, head):
        return np.asarray(scored(params, head, np.arange(n))[1])

    def loss(trained, rows, advantage, target):
        ours, values = scored(*trained, rows)
        _, _, _, _, mask, weight, behavior, _ = (x[rows] for x in given)
        ratio = jnp.exp(jnp.where(mask, ours - behavior, 0))
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
        parts = 0.1 * (values - target) ** 2 / 2 - gain
        return jnp.sum(jnp.where(mask, parts, 0) * weight) / weight.sum()

    def fixed(values):
        advantage = np.zeros((n, t))
        for i, j in zip(*np.nonzero(mask), strict=True):
            after = [*values[i, j + 1 : lengths[i, 0]], reward[i]]
            surprises = np.array(after) - values[i, j : lengths[i, 0]]
            advantage[i, j] = sum(TRACE**k * x for k, x in enumerate(surprises))
        return advantage, np.where(mask, advantage + values, 0)

    return jax.jit(jax.value_and_grad(loss)), values, fixed, n


@pytest.mark.parametrize(("row_length", "micro_batch_rows"), [slow(0, 6), (18, 2)])
def test_values_of_states_and_their_gradients_are_those_of_the_whole_batch(
    row_length, micro_batch_rows
):
    params, _, draws = problem()
    optimizer = keep_gradient()
    cut = {"micro_batch_rows": micro_batch_rows, "is_whole": micro_batch_rows == 6}
    settings = dataclasses.replace(SETTINGS, objective=Ppo(gae_lambda=TRACE), **cut)
    # No KL in the reward: the written one has none.
    target = dataclasses.replace(settings.target, beta=Schedule(0.0))
    settings = dataclasses.replace(settings, target=target)
    step = make_train_step(CONFIG, optimizer, optax.constant_schedule(0.0), settings)
    state = init_state(
        jax.tree.map(jnp.copy, params), optimizer, keep_reference=False,
        log_z_size=CONFIG.hidden_size,
    )  # fmt: skip
    state = state._replace(log_z_head=jax.tree.map(jnp.copy, HEAD))
    state, metrics = step(state, lay_out(draws, row_length=row_length, **cut))
    step_of, values_of, fixed, n = loss_of_rows()
    advantage, values = (x.astype(np.float32) for x in fixed(values_of(params, HEAD)))
    loss, gradient = step_of((params, HEAD), np.arange(n), advantage, values)
    np.testing.assert_allclose(metrics["train/loss"], loss, rtol=1e-5)
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradient))
    assert float(jnp.abs(gradient[1].weight).max()) > 1e-3
    jax.tree.map(
        # float32 sums in another order, of numbers up to the largest
        lambda got, want: np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * largest),
        state.opt_state,
        gradient,
    )


# Whole; in micro-batches that padding fills up, of which every part has its share.
@pytest.mark.parametrize("micro_batch_rows", [0, slow(8)])
def test_several_updates_are_a_loop_over_the_same_parts(micro_batch_rows):
    params, _, draws = problem()
    rate, passes, parts = 0.5, 3, 2
    step_of, values_of, fixed, n = loss_of_rows()
    cut = {"micro_batch_rows": micro_batch_rows, "row_multiple": parts}
    settings = dataclasses.replace(
        SETTINGS, objective=Ppo(gae_lambda=TRACE), epochs=passes, minibatches=parts, **cut,
        target=dataclasses.replace(SETTINGS.target, beta=Schedule(0.0)),
    )  # fmt: skip
    # A rate of its own for each step, and a count of updates, as a run's optimiser has.
    optimizer = optax.sgd(lambda count: rate / (1 + count // (passes * parts)))
    step = make_train_step(CONFIG, optimizer, lambda step: rate / (1 + step), settings)
    state = init_state(
        jax.tree.map(jnp.copy, params), optimizer, keep_reference=False,
        log_z_size=CONFIG.hidden_size,
    )  # fmt: skip
    state = state._replace(log_z_head=jax.tree.map(jnp.copy, HEAD))
    trained: tuple = (params, HEAD)
    batch = lay_out(draws, **cut)
    num = max(1, len(batch.tokens) // micro_batch_rows) if micro_batch_rows else 1
    # Row q of micro-batch b is row q * num + b; every micro-batch has as much of each part.
    part = np.arange(len(batch.tokens)) // num % parts
    place = {int(slot): i for i, slot in enumerate(lay_out(draws).slots[:, 0])}
    rows_of = [
        np.array([place[int(s)] for s in batch.slots[part == j, 0] if s > 0]) for j in range(parts)
    ]
    assert sorted(np.concatenate(rows_of)) == list(range(n))

    def by_hand(trained, rate):
        """(after the updates of a step, their losses)."""
        advantage, target = (x.astype(np.float32) for x in fixed(values_of(*trained)))
        losses = []
        for rows in rows_of * passes:
            loss, gradient = step_of(trained, rows, advantage[rows], target[rows])
            trained = jax.tree.map(lambda x, g: x - rate * g, trained, gradient)
            losses.append(float(loss))
        return trained, losses

    def assert_near(got, want, atol):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), got, want)

    for at in range(2):
        before = jax.tree.leaves(jax.device_get(trained))
        trained, losses = by_hand(trained, rate / (1 + at))
        state, metrics = step(state, batch)
        np.testing.assert_allclose(metrics["train/loss"], np.mean(losses), rtol=1e-4)
        np.testing.assert_allclose(metrics["train/lr"], rate / (1 + at))
        assert metrics["train/updates"] == passes * parts
        moved = max(
            np.abs(a - b).max() for a, b in zip(jax.tree.leaves(trained), before, strict=True)
        )
        assert moved > 0.01
        # float32 sums in another order, carried through six updates
        assert_near((state.params, state.log_z_head), trained, 1e-4 * moved)
    assert (int(state.step), int(state.skipped_steps)) == (2, 0)


def test_all_updates_of_the_step_after_a_partly_non_finite_one_have_its_learning_rate():
    params, _, draws = problem()
    rate, updates = 0.5, 6
    settings = dataclasses.replace(
        SETTINGS, objective=Ppo(gae_lambda=TRACE), epochs=3, minibatches=2, row_multiple=2,
        target=dataclasses.replace(SETTINGS.target, beta=Schedule(0.0)),
    )  # fmt: skip

    def step_at(of_update):
        optimizer = optax.sgd(of_update)
        step = make_train_step(CONFIG, optimizer, lambda step: rate / (1 + step), settings)
        state = init_state(
            jax.tree.map(jnp.copy, params), optimizer, keep_reference=False,
            log_z_size=CONFIG.hidden_size,
        )  # fmt: skip
        return step, state

    step, state = step_at(lambda count: rate / (1 + count // updates))
    state, metrics = step(state, broken(lay_out(draws)))
    assert (metrics["train/updates"], int(state.skipped_steps)) == (3, 0)
    second, state_2 = step_at(lambda count: rate / 2)
    copies = jax.tree.map(jnp.copy, (state.params, state.log_z_head))
    state_2 = state_2._replace(step=jnp.int32(1), params=copies[0], log_z_head=copies[1])
    state, metrics = step(state, lay_out(draws))
    expected, _ = second(state_2, lay_out(draws))
    np.testing.assert_allclose(metrics["train/lr"], rate / 2)
    got, want = ((s.params, s.log_z_head) for s in (state, expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), got, want)
