# SPDX-License-Identifier: Apache-2.0
"""An objective of tokens has the same gradient however its batch is cut and laid out."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fake_batches import CONFIG, SCORING, SETTINGS, make_batch, one_prompt_each, packed
from fake_models import random_params

from tba_jax.models.logprobs import response_mask, token_logprobs
from tba_jax.train.objectives.base import Loss, Objective
from tba_jax.train.state import init_state
from tba_jax.train.step import make_train_step

CLIP, BETA = 0.2, 0.1


@dataclasses.dataclass(frozen=True)
class Grpo(Objective):
    """Clipped ratios of tokens, advantages over the group's deviation, a KL of tokens."""

    needs_behavior = True
    needs_token_reference = True

    def __call__(self, data, beta):
        reward = data.reward
        advantage = (reward - reward.mean(1, keepdims=True)) / (reward.std(1, keepdims=True) + 1e-4)
        gain = clipped(data.policy_token_logprobs - data.behavior_token_logprobs, advantage)
        gap = data.reference_token_logprobs - data.policy_token_logprobs
        kl = jnp.exp(gap) - gap - 1
        return Loss(-data.mean_over_tokens(gain - beta * kl), {"kl_tokens": jnp.float32(0)})


def clipped(log_ratio, advantage):
    ratio, advantage = jnp.exp(log_ratio), advantage[..., None]
    return jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)


def keep_gradient():
    """An optimiser that moves nothing and whose state is the gradient."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, state, params: (jax.tree.map(jnp.zeros_like, grads), grads),
    )


def score(params, batch):
    lengths = batch.prompt_lengths, batch.response_lengths
    return token_logprobs(
        params, batch.tokens, *lengths, response_bucket=6, config=CONFIG, scoring=SCORING
    )


@functools.cache
def problem():
    """(parameters, those of the reference, a batch drawn by something near the policy)."""
    params, reference = random_params(CONFIG, 0), random_params(CONFIG, 1)
    batch = one_prompt_each(make_batch())
    # Short prompts too, so that packed rows are of unequal lengths.
    rng = np.random.default_rng(5)
    noise = rng.normal(0, 0.3, batch.behavior_token_logprobs.shape)
    drawn = np.asarray(score(params, batch))
    behavior = np.where(drawn != 0, drawn + noise, 0).astype(np.float32)
    assert len(np.unique(batch.response_lengths)) > 3
    return params, reference, batch._replace(behavior_token_logprobs=behavior)


@functools.cache
def expected():
    """Gradient of the loss as written down for a whole padded batch."""
    params, reference, batch = problem()
    mask = response_mask(batch.tokens[..., -6:], batch.response_lengths, SCORING)
    reward = batch.rewards
    advantage = (reward - reward.mean(1, keepdims=True)) / (reward.std(1, keepdims=True) + 1e-4)
    theirs = score(reference, batch)

    def loss(params):
        ours = score(params, batch)
        gain = clipped(ours - batch.behavior_token_logprobs, advantage)
        kl = jnp.exp(theirs - ours) - (theirs - ours) - 1
        return -jnp.sum((gain - BETA * kl) * mask) / mask.sum()

    return jax.jit(jax.value_and_grad(loss))(params)


# Whole; micro-batches of whole groups; groups spread over several; packed, whole and in parts.
@pytest.mark.parametrize(
    ("is_packed", "micro_batch_rows"),
    [(False, 0), (False, 8), (False, 2), (True, 0), (True, 4)],
)
def test_every_cut_has_the_gradient_of_the_whole_batch(is_packed, micro_batch_rows):
    params, reference, batch = problem()
    optimizer = keep_gradient()
    settings = dataclasses.replace(SETTINGS, objective=Grpo(), micro_batch_rows=micro_batch_rows)
    step = make_train_step(CONFIG, optimizer, optax.constant_schedule(0.0), settings)
    state = init_state(jax.tree.map(jnp.copy, params), optimizer, keep_reference=True)
    state = state._replace(reference_params=jax.tree.map(jnp.copy, reference))
    state, metrics = step(state, packed(batch) if is_packed else batch)
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
