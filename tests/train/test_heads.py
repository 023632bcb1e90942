# SPDX-License-Identifier: Apache-2.0
"""The learned log Z reads the prompt and nothing else, and is trained with the policy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from fake_batches import make_batch
from fake_models import random_params, tiny_config

from tba_jax.train.heads import Head, init_head, log_z

CONFIG = tiny_config()


def estimate(head, params, batch):
    return log_z(
        head,
        params,
        batch.prompts,
        batch.prompt_sizes,
        config=CONFIG,
        compute_dtype=jnp.float32,
        remat="none",
    )


def random_head():
    return Head(jax.random.normal(jax.random.key(5), CONFIG.hidden_size), jnp.float32(0.3))


def test_neither_responses_nor_padding_change_the_estimate():
    batch, params, head = make_batch(has_prompts=True), random_params(CONFIG), random_head()
    expected = estimate(head, params, batch)
    assert np.ptp(expected) > 0.01  # four prompts, four numbers
    padded = np.concatenate([np.full((4, 3), 7, np.int32), batch.prompts], axis=-1)
    # float32 sums over a longer row
    np.testing.assert_allclose(
        estimate(head, params, batch._replace(prompts=padded)), expected, atol=1e-5
    )


def test_a_deep_head_begins_at_zero_and_is_the_written_network():
    head = init_head(CONFIG.hidden_size, 3)
    batch, params = make_batch(has_prompts=True), random_params(CONFIG)
    np.testing.assert_array_equal(estimate(head, params, batch), 0.0)
    # The mean state of each prompt, entry by entry, through linear heads that pick it.
    rows = np.eye(CONFIG.hidden_size, dtype=np.float32)
    pick = jax.vmap(lambda row: estimate(Head(row, jnp.float32(0)), params, batch))
    x = np.asarray(pick(jnp.asarray(rows)), np.float64).T
    for layer in head.hidden:
        x = x @ np.asarray(layer.weight, np.float64)
        x = x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2
        x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    top = jnp.linspace(-1, 1, CONFIG.hidden_size)
    got = estimate(head._replace(weight=top, bias=jnp.float32(0.5)), params, batch)
    np.testing.assert_allclose(got, x @ np.asarray(top, np.float64) + 0.5, rtol=1e-4, atol=1e-5)
