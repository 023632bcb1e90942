# SPDX-License-Identifier: Apache-2.0
"""A game of two turns, counted out: what leads Trajectory Balance to the soft optimum?"""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from fake_batches import SCORING, SETTINGS
from fake_models import random_params, scored_tokens, tiny_config

from tba_jax.flow.packing import Packing
from tba_jax.flow.padding import Padding
from tba_jax.flow.trajectory import Draw, Prompt, Trajectory
from tba_jax.settings import Schedule
from tba_jax.train.state import init_state
from tba_jax.train.step import make_train_step
from tba_jax.train.step_settings import Target

SIZE = 6
BETA = 0.25
CONFIG = tiny_config(vocab_size=SIZE)
SCORE = replace(SCORING, eos_ids=())
PROMPT = np.array([3, 5, 1, 4], np.int32)
FIRST, SECOND = (x.ravel() for x in np.meshgrid(np.arange(SIZE), np.arange(SIZE), indexing="ij"))


def game(said):
    """(tokens, rewards) of every episode: a token, what the game says to it, another token."""
    tokens = np.stack([FIRST, said, SECOND], axis=1)
    reward = np.random.default_rng(0).uniform(size=len(tokens))
    return tokens.astype(np.int32), reward.astype(np.float32)


FROM_CONTEXT = game((2 * FIRST + 1) % 4)


def logprobs(params, tokens, is_sampled):
    """Of the marked tokens of every episode."""
    rows = [scored_tokens(CONFIG, params, PROMPT, y, SCORE, multiple=3) for y in tokens]
    return (np.stack(rows) * np.array(is_sampled)).sum(1)


def trained(tokens, reward, is_sampled, num_steps):
    """Parameters after training on every episode, and at the start."""
    params = random_params(CONFIG)
    reference = logprobs(params, tokens, is_sampled)
    n = len(tokens)
    episodes = tuple(
        Trajectory(
            prompt_id=0,
            response_tokens=tokens[i],
            reward=float(reward[i]),
            reward_parts={},
            behavior_token_logprobs=np.where(is_sampled, -1.8, 0).astype(np.float32),
            reference_logprob=float(reference[i]),
            version_min=0,
            version_max=0,
            searcher=0,
            round=0,
            sampling_temperature=1.0,
            finish_reason="done",
            is_sampled=is_sampled,
        )
        for i in range(n)
    )
    draw = Draw(Prompt(0, "", PROMPT, {}), episodes, (1,) * n, True, tuple(range(n)), 0)
    packing = Packing(
        num_prompts=1, group_size=n, padding=Padding((4,), (3,), 0), policy_temperature=1.0
    )
    batch = packing.batch([draw])
    schedule = optax.cosine_decay_schedule(3e-3, num_steps)
    optimizer = optax.adam(schedule)
    settings = replace(SETTINGS, target=Target(Schedule(BETA)), scoring=SCORE)
    step = make_train_step(CONFIG, optimizer, schedule, settings)
    state = init_state(params, optimizer, keep_reference=False)
    for _ in range(num_steps):
        state, _ = step(state, batch)
    return jax.device_get(state.params), random_params(CONFIG)


def kl_to_optimum(episodes, is_sampled, num_steps):
    """KL(soft optimum || policy) of both turns together, in nats."""
    tokens, reward = episodes
    found = trained(tokens, reward, np.array(is_sampled), num_steps)
    # [answers, first token, second token]
    shape = (-1, SIZE, SIZE)
    first, first_at_start = (logprobs(x, tokens, [1, 0, 0]).reshape(shape)[0, :, 0] for x in found)
    got, start = (logprobs(x, tokens, [0, 0, 1]).reshape(shape) for x in found)
    np.testing.assert_allclose(np.exp(got).sum(-1), 1.0, atol=1e-5)
    second = start + reward.reshape(shape) / BETA
    value = np.log(np.exp(second).sum(-1))
    second = second - value[..., None]
    best = first_at_start + value.mean(0)
    best = best - np.log(np.exp(best).sum())
    later = (np.exp(second) * (second - got)).sum(-1).mean(0)
    return float((np.exp(best) * (best - first + later)).sum())


@pytest.mark.slow
def test_where_observations_follow_from_the_context_the_optimum_is_reached():
    assert kl_to_optimum(FROM_CONTEXT, [True, False, True], 1500) < 1e-3


@pytest.mark.slow
def test_an_observation_that_counts_as_sampled_leads_elsewhere():
    assert kl_to_optimum(FROM_CONTEXT, [True, True, True], 1500) > 1e-2
