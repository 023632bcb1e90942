# SPDX-License-Identifier: Apache-2.0
"""Batches of a tiny model, padded and packed, and train steps on meshes that divide it."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fake_models import random_params, tiny_config
from jax.sharding import Mesh

from tba_jax.devices.sharding import MESH_AXES
from tba_jax.flow.packing import Packing
from tba_jax.flow.padding import Padding
from tba_jax.flow.trajectory import Draw, Prompt, Trajectory
from tba_jax.models.scoring import Scoring
from tba_jax.settings import Schedule
from tba_jax.train.objectives.registry import make_objective
from tba_jax.train.objectives.tb import TrajectoryBalance
from tba_jax.train.state import make_init_state, step_shardings
from tba_jax.train.step import make_train_step
from tba_jax.train.step_settings import StepSettings, Target

CONFIG = tiny_config()
SCORING = Scoring(eos_ids=(2,), chunk_tokens=64)
SETTINGS = StepSettings(TrajectoryBalance(), Target(Schedule(0.1)), SCORING)


def named(name):
    return make_objective(name)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def make_draws(p=4, k=4, prompt=4, t=6, seed=0, weights=None):
    """Draws of random responses; each of a draw has a number of tokens and a reward of its own.

    `weights` [p k]: how often each was drawn, 0 for one that was not; None: all of them once.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, t + 1, (p, k))
    tokens = rng.integers(3, CONFIG.vocab_size, (p, k, prompt + t)).astype(np.int32)
    rewards = rng.integers(0, 2, (p, k)).astype(np.float32)
    reference = rng.normal(-8, 1, (p, k)).astype(np.float32)
    weights = np.ones((p, k), int) if weights is None else np.asarray(weights)

    def trajectory(i, j):
        n = lengths[i, j]
        return Trajectory(
            prompt_id=i,
            response_tokens=tokens[i, j, prompt : prompt + n],
            reward=rewards[i, j],
            reward_parts={},
            behavior_token_logprobs=np.full(n, -2.0, np.float32),
            reference_logprob=reference[i, j],
            version_min=0,
            version_max=0,
            searcher=0,
            round=0,
            sampling_temperature=1.0,
            finish_reason="eos",
        )

    return [
        Draw(
            prompt=Prompt(i, "", tokens[i, 0, :prompt], {}),
            trajectories=tuple(trajectory(i, j) for j in range(k) if weights[i, j]),
            weights=tuple(int(w) for w in weights[i] if w),
            is_fresh=True,
            ids=tuple(j for j in range(k) if weights[i, j]),
            num_repeats=0,
        )
        for i in range(p)
    ]


def repeated(draws):
    """The same draws with every response as often as it was drawn."""

    def repeat(values, weights):
        return tuple(x for x, n in zip(values, weights, strict=True) for _ in range(n))

    return [
        d._replace(
            trajectories=repeat(d.trajectories, d.weights),
            ids=repeat(d.ids, d.weights),
            weights=(1,) * sum(d.weights),
        )
        for d in draws
    ]


def lay_out(draws, **options):
    """A batch of these draws, by what the trainer packs with."""
    prompt = max(len(d.prompt.tokens) for d in draws)
    response = max(len(y.response_tokens) for d in draws for y in d.trajectories)
    packing = Packing(
        num_prompts=len(draws),
        group_size=sum(draws[0].weights),
        padding=Padding((prompt,), (response,), 0),
        policy_temperature=1.0,
        **options,
    )
    return packing.batch(draws)


def make_batch(p=4, k=4, prompt=4, t=6, seed=0, **options):
    """A batch of random responses, all distinct; options are those of `Packing`."""
    return lay_out(make_draws(p, k, prompt, t, seed), **options)


def keep_gradient():
    """An optimiser that moves nothing and whose state is the gradient."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, state, params: (jax.tree.map(jnp.zeros_like, grads), grads),
    )


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


def sharded(shape, settings=REMAT, optimizer=OPTIMIZER, keep_reference=False, num_prompts=0):
    """(shardings, initial state, train step) on a mesh."""
    heads = "log_z" in settings.objective.heads
    shardings = step_shardings(
        DIVISIBLE,
        optimizer,
        make_mesh(shape),
        keep_reference=keep_reference,
        log_z_layers=int(heads),
        num_prompts=num_prompts,
    )
    params = jax.device_put(random_params(DIVISIBLE), shardings.state.params)
    state = make_init_state(optimizer, shardings)(params)
    return shardings, state, make_train_step(DIVISIBLE, optimizer, SCHEDULE, settings, shardings)


def collectives(text):
    """(operation, shape of its result) of a compiled program, in order."""
    found = re.findall(r"= (\w+\[[\d,]*\])\S* (all-gather|all-to-all|all-reduce)\(", text)
    return [(op, tuple(int(n) for n in re.findall(r"\d+", x.split("[")[1]))) for x, op in found]
