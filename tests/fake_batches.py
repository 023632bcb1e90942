# SPDX-License-Identifier: Apache-2.0
"""Batches of a tiny model in every layout, and train steps on meshes that divide it."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fake_groups import make_trajectory
from fake_models import random_params, tiny_config
from jax.sharding import Mesh

from tba_jax.devices.placement import MESH_AXES
from tba_jax.flow.layout import RowLayout
from tba_jax.flow.padding import Padding
from tba_jax.flow.trajectory import Draw, Prompt
from tba_jax.models.logprobs import Scoring
from tba_jax.settings import Schedule
from tba_jax.train.objectives import make_objective
from tba_jax.train.state import init_state, make_init_state, step_shardings
from tba_jax.train.step import StepSettings, make_train_step

CONFIG = tiny_config()
SCORING = Scoring(eos_ids=(2,))
SETTINGS = StepSettings(make_objective("tb"), SCORING, Schedule(0.1))


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def make_draws(p=4, k=4, prompt=4, t=6, seed=0, repeats=None):
    """Draws of random responses, each with its own number of tokens and reward.

    `repeats` [p k]: number of times that each response was drawn; None: once.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, t + 1, (p, k))
    tokens = rng.integers(3, CONFIG.vocab_size, (p, k, prompt + t)).astype(np.int32)
    rewards = rng.integers(0, 2, (p, k)).astype(np.float32)

    def trajectory(i, j):
        n = lengths[i, j]
        y = make_trajectory(i, tokens[i, j, prompt : prompt + n], reward=float(rewards[i, j]))
        behavior, reference = (rng.normal(-2, 0.5, n).astype(np.float32) for _ in range(2))
        return replace(
            y,
            behavior_token_logprobs=behavior,
            reference_token_logprobs=reference,
            version_max=0,
            sampling_temperature=1.0,
        )

    draws = []
    for i in range(p):
        own = [trajectory(i, j) for j in range(k)]
        drawn = [j for j in range(k) for _ in range(1 if repeats is None else repeats[i][j])]
        asked = Prompt(i, "", tokens[i, 0, :prompt], {})
        draws.append(Draw(asked, tuple(own[j] for j in drawn), True, tuple(drawn)))
    return draws


def changed(draws, change):
    """The draws with `change(response)` in place of each response."""
    return [d._replace(trajectories=tuple(map(change, d.trajectories))) for d in draws]


def lay_out(draws, step=0, **options):
    """A batch of these draws."""
    prompt = max(len(d.prompt.tokens) for d in draws)
    response = max(len(y.response_tokens) for d in draws for y in d.trajectories)
    layout = RowLayout(
        num_prompts=len(draws),
        group_size=max(len(d.trajectories) for d in draws),
        padding=Padding((prompt,), (response,), 0),
        **options,
    )
    return layout.batch(draws, step)


def make_batch(p=4, k=4, prompt=4, t=6, seed=0, **options):
    """A batch of random responses, all distinct; options are those of `RowLayout`."""
    return lay_out(make_draws(p, k, prompt, t, seed), **options)


def keep_gradient():
    """An optimiser that moves nothing and whose state is the gradient."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, state, params: (jax.tree.map(jnp.zeros_like, grads), grads),
    )


def gradient_of(batch, settings=SETTINGS, params=None, head=None):
    """(gradient of the trained parameters, outputs of the step)."""
    state = init_state(
        random_params(CONFIG) if params is None else jax.tree.map(jnp.copy, params),
        keep_gradient(),
        keep_reference=False,
        head_size=0 if head is None else CONFIG.hidden_size,
    )
    state = state._replace(head=jax.tree.map(jnp.copy, head))
    step = make_train_step(CONFIG, keep_gradient(), Schedule(0.0), settings)
    state, outputs = step(state, batch)
    return jax.device_get((state.opt_state.inner_state, outputs))


def broken(batch, reward=np.nan):
    rewards = np.array(batch.rewards)
    rewards[0, 0] = reward
    return batch._replace(rewards=rewards)


# Every axis divides by 8, but for two key/value heads.
DIVISIBLE = tiny_config(
    qkv_bias=True, num_heads=8, head_dim=4, mlp_size=24, vocab_size=64, tie_embeddings=False
)
REMAT = replace(SETTINGS, remat="layers")
SCHEDULE = Schedule(0.1)
# Momentum, so that there is optimiser state; Adam's first update is the gradient's sign, which
# magnifies rounding.
OPTIMIZER = optax.trace(decay=0.9)


def make_mesh(shape):
    return Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), MESH_AXES)


def sharded(shape, settings=REMAT, optimizer=OPTIMIZER, keep_reference=False, num_prompts=0):
    """(shardings, initial state, train step) on a mesh; numpy arrays are divided at once."""
    shardings = step_shardings(
        DIVISIBLE,
        optimizer,
        make_mesh(shape),
        keep_reference=keep_reference,
        has_head=bool(settings.objective.needs.head),
        num_prompts=num_prompts,
    )
    params = jax.device_put(jax.device_get(random_params(DIVISIBLE)), shardings.state.params)
    state = make_init_state(optimizer, shardings)(params)
    return shardings, state, make_train_step(DIVISIBLE, optimizer, SCHEDULE, settings, shardings)


def placed(batch, shardings):
    """The batch on the devices of a mesh."""
    return jax.device_put(batch, shardings.of_batch(batch))


def collectives(text):
    """(operation, shape of a result) of a compiled program, in order; loops are counted once."""
    names = "all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter"
    found = re.findall(rf"= (.*?) ({names})(?:-start)?\(", text)
    shapes = [(op, shape) for x, op in found for shape in re.findall(r"\w\[([\d,]*)\]", x)]
    return [(op, tuple(int(n) for n in x.split(",") if n)) for op, x in shapes]
