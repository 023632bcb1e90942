# SPDX-License-Identifier: Apache-2.0
"""Batches of a tiny model, padded and packed, and train steps on meshes that divide it."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from fake_models import random_params, tiny_config
from jax.sharding import Mesh

from tba_jax.devices.sharding import MESH_AXES
from tba_jax.flow.batch import Batch
from tba_jax.flow.packing import pack_rows
from tba_jax.models.scoring import Scoring
from tba_jax.train.objectives.registry import make_objective
from tba_jax.train.objectives.tb import TrajectoryBalance
from tba_jax.train.schedules import Schedule
from tba_jax.train.state import make_init_state, step_shardings
from tba_jax.train.step import StepSettings, make_train_step
from tba_jax.train.target import Target

CONFIG = tiny_config()
SCORING = Scoring(eos_ids=(2,), chunk_tokens=64)
SETTINGS = StepSettings(TrajectoryBalance(), Target(Schedule(0.1)), SCORING)


def named(name):
    return make_objective(SimpleNamespace(name=name))


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


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


def packed(batch, row_length=18, num_rows=12):
    """The same responses as `PackedBatch`, by the function that the trainer uses."""
    prompt = batch.tokens.shape[-1] - batch.behavior_token_logprobs.shape[-1]

    def trajectory(i, j):
        n = batch.response_lengths[i, j]
        return SimpleNamespace(
            response_tokens=batch.tokens[i, j, prompt : prompt + n],
            behavior_token_logprobs=batch.behavior_token_logprobs[i, j, :n],
            reward=batch.rewards[i, j],
            reference_logprob=batch.reference_logprob[i, j],
            version_min=batch.versions[i, j],
            is_action=None if batch.is_action is None else batch.is_action[i, j, :n],
        )

    p, k = batch.rewards.shape
    draws = [
        SimpleNamespace(
            prompt=SimpleNamespace(tokens=batch.tokens[i, 0, :prompt]),
            trajectories=[trajectory(i, j) for j in range(k)],
        )
        for i in range(p)
    ]
    return pack_rows(draws, row_length=row_length, row_buckets=(num_rows,), pad_id=0)


def one_prompt_each(batch):
    """Prompts are the same for all responses to them, as in what the trainer draws."""
    tokens = np.array(batch.tokens)
    tokens[:, :, :4] = tokens[:, :1, :4]
    return batch._replace(tokens=tokens)


def broken(batch):
    rewards = np.array(batch.rewards)
    rewards[0, 0] = np.nan
    return batch._replace(rewards=rewards)


# Every axis divides by 8, but for two key/value heads.
DIVISIBLE = tiny_config(
    qkv_bias=True, num_heads=8, head_dim=4, mlp_size=24, vocab_size=64, tie_embeddings=False
)
REMAT = replace(SETTINGS, remat="layers")
SCHEDULE = optax.constant_schedule(0.1)
# Momentum, so that there is optimiser state; Adam's first update is the gradient's sign, which
# magnifies rounding.
OPTIMIZER = optax.sgd(SCHEDULE, momentum=0.9)


def make_mesh(shape):
    return Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), MESH_AXES)


def sharded(shape, settings=REMAT, optimizer=OPTIMIZER, keep_reference=False):
    """(shardings, initial state, train step) on a mesh."""
    shardings = step_shardings(
        DIVISIBLE, optimizer, make_mesh(shape), keep_reference=keep_reference
    )
    params = jax.device_put(random_params(DIVISIBLE), shardings.state.params)
    state = make_init_state(optimizer, shardings)(params)
    return shardings, state, make_train_step(DIVISIBLE, optimizer, SCHEDULE, settings, shardings)
