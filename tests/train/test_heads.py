# SPDX-License-Identifier: Apache-2.0
"""The learned log Z reads the prompt and nothing else, and is trained with the policy."""

import jax
import jax.numpy as jnp
import numpy as np
from fake_batches import make_batch
from fake_models import random_params, tiny_config

from tba_jax.models.transformer import apply
from tba_jax.train.heads import Head, init_head, log_z

CONFIG = tiny_config()


def estimate(head, params, batch):
    return log_z(
        head,
        params,
        jnp.asarray(batch.prompts),
        jnp.asarray(batch.prompt_sizes),
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


def test_a_head_begins_at_zero_and_is_linear_in_the_mean_state():
    batch, params = make_batch(has_prompts=True), random_params(CONFIG)
    np.testing.assert_array_equal(estimate(init_head(CONFIG.hidden_size), params, batch), 0.0)
    tokens, size = jnp.asarray(batch.prompts), batch.prompts.shape[1]
    index, first = jnp.arange(size)[None], (size - batch.prompt_sizes)[:, None]
    hidden = apply(
        params, tokens, jnp.maximum(index - first, 0), index >= first, config=CONFIG,
        compute_dtype=jnp.float32,
    )  # fmt: skip
    head = random_head()
    wanted = [
        np.asarray(x, np.float64)[size - n :].mean(0) @ np.asarray(head.weight, np.float64) + 0.3
        for x, n in zip(hidden, batch.prompt_sizes, strict=True)
    ]
    np.testing.assert_allclose(estimate(head, params, batch), wanted, rtol=1e-5, atol=1e-5)
