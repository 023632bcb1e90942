# SPDX-License-Identifier: Apache-2.0
"""The train step: schedules, equivalences and sharding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from fakes import random_params, tiny_config

from tba_jax.train_step import (
    StepSettings,
    init_state,
    learning_rate_schedule,
    make_optimizer,
    make_train_step,
)
from tba_jax.trajectory import Batch

CONFIG = tiny_config()
SETTINGS = StepSettings(
    objective="tb",
    scale="advantage",
    beta=0.1,
    beta_schedule="constant",
    beta_final=0.1,
    beta_steps=0,
    beta_jump_step=0,
    mask_eos=False,
    eos_ids=(2,),
    temperature=1.0,
    reference_reset_period=0,
    compute_dtype="float32",
    logprob_chunk_tokens=64,
    remat=False,
)


def make_batch(p=4, k=4, prompt=4, t=6, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, t + 1, (p, k)).astype(np.int32)
    return Batch(
        tokens=rng.integers(3, CONFIG.vocab_size, (p, k, prompt + t)).astype(np.int32),
        prompt_lengths=np.full((p, k), prompt, np.int32),
        response_lengths=lengths,
        rewards=rng.integers(0, 2, (p, k)).astype(np.float32),
        reference_logprob=rng.normal(-8, 1, (p, k)).astype(np.float32),
        behavior_token_logprobs=np.where(
            np.arange(t)[None, None] < lengths[..., None], -2.0, 0.0
        ).astype(np.float32),
        versions=np.zeros((p, k), np.int32),
    )


@functools.cache
def sgd_step(settings):
    """(optimizer, train step) with SGD: Adam's first update is the gradient's sign, which magnifies
    rounding."""
    schedule = optax.constant_schedule(0.1)
    optimizer = optax.sgd(schedule)
    return optimizer, make_train_step(CONFIG, optimizer, schedule, settings)


def run_step(batch, settings=SETTINGS, *, params=None):
    optimizer, step = sgd_step(settings)
    params = random_params(CONFIG) if params is None else params
    state = init_state(params, optimizer, keep_reference=False)
    return step(state, batch)


def test_gradient_of_two_prompts_is_the_mean_of_each_alone():
    batch = make_batch(p=2)
    params = random_params(CONFIG)
    before = jax.device_get(params)

    def change(rows):
        state, _ = run_step(Batch(*(x[rows] for x in batch)), params=jax.tree.map(jnp.copy, params))
        return jax.tree.map(lambda a, b: a - b, jax.device_get(state.params), before)

    both, first, second = change([0, 1]), change([0]), change([1])
    jax.tree.map(
        lambda a, b, c: np.testing.assert_allclose(a, (b + c) / 2, atol=1e-5), both, first, second
    )


def test_train_step_metrics_against_numpy():
    batch = make_batch()
    _, metrics = run_step(batch)
    np.testing.assert_allclose(metrics["train/reward_mean"], batch.rewards.mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["train/response_tokens"], batch.response_lengths.sum())
    assert np.isfinite(metrics["train/sampler_gap"])  # step 0, versions 0
    stale = batch._replace(versions=np.full((4, 4), -1, np.int32))
    assert np.isnan(run_step(stale)[1]["train/sampler_gap"])


def test_equal_rewards_still_pull_log_ratios_together():
    batch = make_batch()._replace(rewards=np.ones((4, 4), np.float32))
    _, metrics = run_step(batch)
    assert metrics["train/grad_norm"] > 1e-3


def test_mask_eos_changes_only_responses_with_an_eos():
    batch = make_batch()
    with_eos = np.array(batch.tokens)
    for i in range(4):
        for j in range(4):
            with_eos[i, j, 4 + batch.response_lengths[i, j] - 1] = 2
    masked = SETTINGS._replace(mask_eos=True)
    plain = run_step(batch)[1]["train/loss"]
    assert run_step(batch, masked)[1]["train/loss"] == plain
    ended = batch._replace(tokens=with_eos)
    assert run_step(ended, masked)[1]["train/loss"] != run_step(ended)[1]["train/loss"]


def test_reference_at_the_trainer_starts_as_the_policy_and_is_reset():
    optimizer, step = sgd_step(SETTINGS._replace(reference_reset_period=2))
    state = init_state(random_params(CONFIG), optimizer, keep_reference=True)
    start = jax.device_get(state.params)
    state, metrics = step(state, make_batch())
    np.testing.assert_allclose(metrics["train/kl_reference"], 0.0, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.reference_params), start)
    state, metrics = step(state, make_batch())
    assert abs(float(metrics["train/kl_reference"])) > 1e-4
    reference, policy = jax.device_get((state.reference_params, state.params))
    jax.tree.map(np.testing.assert_array_equal, reference, policy)


def test_rloo_step_is_the_tb_step_times_the_leave_one_out_factor():
    # Equal gradients up to K / (K - 1) wherever the data come from (paper, section 3.3).
    _, tb = run_step(make_batch())
    _, rloo = run_step(make_batch(), SETTINGS._replace(objective="rloo"))
    np.testing.assert_allclose(rloo["train/grad_norm"], tb["train/grad_norm"] * 4 / 3, rtol=1e-4)


def test_learning_rate_schedules():
    def at(step, **changes):
        arguments = {
            "schedule": "constant",
            "learning_rate": 1.0,
            "warmup_steps": 0,
            "stable_steps": 0,
            "decay_steps": 0,
            "num_steps": 100,
        }
        return float(learning_rate_schedule(**(arguments | changes))(step))

    assert at(99) == 1.0
    np.testing.assert_allclose([at(s, schedule="linear") for s in (0, 50, 100)], [1, 0.5, 0])
    np.testing.assert_allclose(at(50, schedule="cosine"), 0.5, rtol=1e-6)
    np.testing.assert_allclose(
        [at(s, schedule="linear", warmup_steps=4) for s in (0, 3, 4, 52)], [0.25, 1, 1, 0.5]
    )


def test_gsm8k_schedule_ends_at_half_the_peak():
    # paper.md 3.1, Figure 1: 50 warm-up, 350 stable, cosine over 600, stopped at 700
    schedule = learning_rate_schedule(
        schedule="wsd",
        learning_rate=1e-5,
        warmup_steps=50,
        stable_steps=350,
        decay_steps=600,
        num_steps=700,
    )
    got = [float(schedule(step)) for step in (49, 399, 700)]
    np.testing.assert_allclose(got, [1e-5, 1e-5, 5e-6], rtol=1e-5)


def test_weight_decay_spares_norms_and_clipping_bounds_the_norm():
    params = random_params(CONFIG)
    zero = jax.tree.map(jnp.zeros_like, params)
    optimizer = make_optimizer(
        optax.constant_schedule(1.0), b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.1, clip_norm=0.0
    )
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    assert float(jnp.abs(updates["layers"]["attn_norm"]).max()) == 0.0
    assert float(jnp.abs(updates["final_norm"]).max()) == 0.0
    np.testing.assert_allclose(updates["layers"]["q"], -0.1 * params["layers"]["q"], rtol=1e-6)


def test_clipping_makes_large_gradients_equal_and_leaves_small_ones():
    # Adam forgets a gradient's scale within a step, so compare second steps: the first moment
    # mixes both, and unclipped it would be dominated by the larger gradient.
    params = {"w": jnp.ones((2, 2))}

    def second_update(first, second, clip_norm):
        optimizer = make_optimizer(
            optax.constant_schedule(1.0),
            b1=0.9,
            b2=0.999,
            eps=1e-8,
            weight_decay=0.0,
            clip_norm=clip_norm,
        )
        state = optimizer.init(params)
        for gradient in (first, second):
            updates, state = optimizer.update({"w": gradient}, state, params)
        return updates["w"]

    one = jnp.ones((2, 2))  # norm 2
    np.testing.assert_allclose(
        second_update(one, -1000 * one, 0.5), second_update(one, -one, 0.5), rtol=1e-5
    )
    assert not np.allclose(second_update(one, -1000 * one, 0.0), second_update(one, -one, 0.0))
    np.testing.assert_allclose(
        second_update(0.1 * one, -0.2 * one, 0.5), second_update(0.1 * one, -0.2 * one, 0.0)
    )
