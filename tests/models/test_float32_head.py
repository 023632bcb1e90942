# SPDX-License-Identifier: Apache-2.0
"""Logits of float32 products in the trainer and the decoder (model.float32_head)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_models import random_params, tiny_config

from tba_jax.devices.placement import MeshShape
from tba_jax.devices.sharding import trainer_mesh
from tba_jax.devices.site import ANY_DEVICE, Site
from tba_jax.models import transformer
from tba_jax.models.logprobs import packed_token_logprobs, token_logprobs
from tba_jax.models.scoring import Scoring
from tba_jax.models.shardings import ComputeSharding, param_shardings
from tba_jax.weights.transport import make_publish_program

SCORING = Scoring(compute_dtype="bfloat16")
TOKENS = np.random.default_rng(0).integers(3, 24, (2, 1, 12)).astype(np.int32)
LENGTHS = np.array([[4], [4]], np.int32), np.array([[8], [8]], np.int32)


def model(tie_embeddings):
    config = tiny_config(
        family="qwen2", vocab_size=24, float32_head=True, tie_embeddings=tie_embeddings
    )
    return config, random_params(config)


def exact_logprobs(config, params):
    """Log-probs [2 8] of a float64 product of bfloat16 states and the float32 table."""
    rows = jnp.asarray(TOKENS[:, 0])
    positions = jnp.broadcast_to(jnp.arange(12), rows.shape)
    hidden = transformer.apply(
        params, rows, positions, rows >= 0, config=config, compute_dtype=jnp.bfloat16
    )
    table = np.asarray(params[config.output_table], np.float64)
    logits = np.asarray(hidden[:, 3:-1], np.float64) @ table.T
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.take_along_axis(logprobs, TOKENS[:, 0, 4:, None], axis=-1)[..., 0]


def scored(config, params, site=ANY_DEVICE):
    def run(params):
        return token_logprobs(
            params,
            TOKENS,
            *LENGTHS,
            response_bucket=8,
            config=config,
            scoring=SCORING,
            sharding=ComputeSharding(config, site),
        )

    return np.asarray(jax.jit(run)(params))[:, 0]


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_log_probs_are_those_of_float32_products(tie_embeddings):
    """Rounding of the table to bfloat16 changes them by 1e-2, float32 sums by 1e-6."""
    config, params = model(tie_embeddings)
    wanted = exact_logprobs(config, params)
    np.testing.assert_allclose(scored(config, params), wanted, atol=1e-5)
    segments = np.ones((2, 12), np.int32)
    positions = np.tile(np.arange(12, dtype=np.int32), (2, 1))
    packed = packed_token_logprobs(
        params, TOKENS[:, 0], segments, positions, config=config, scoring=SCORING
    )
    np.testing.assert_allclose(packed[:, 4:], wanted, atol=1e-5)


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_published_weights_and_stored_ones_keep_the_table(tie_embeddings):
    config, params = model(tie_embeddings)
    publish = make_publish_program(jnp.dtype(jnp.bfloat16), float32_leaves=config.float32_leaves)
    published = publish(params)
    np.testing.assert_array_equal(published[config.output_table], params[config.output_table])
    shapes = transformer.abstract_params(config, jnp.bfloat16)
    assert jax.tree.map(lambda x: x.dtype, published) == jax.tree.map(lambda x: x.dtype, shapes)
    assert shapes["layers"]["q"].dtype == shapes["final_norm"].dtype == jnp.bfloat16


def test_logits_of_the_decoder_are_float32_products():
    config, params = model(False)
    hidden = jax.random.normal(jax.random.key(1), (3, config.hidden_size), jnp.bfloat16)
    got = transformer.unembed(params, hidden, config=config, compute_dtype=jnp.bfloat16)
    wanted = np.asarray(hidden, np.float64) @ np.asarray(params["unembed"], np.float64).T
    np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_a_mesh_gathers_the_table_in_float32():
    config, params = model(False)
    mesh = trainer_mesh(np.array(jax.devices()[:4]), MeshShape(1, 2, 2))
    divided = jax.device_put(params, param_shardings(config, mesh))
    sharding = ComputeSharding(config, Site(mesh))
    gathered = jax.jit(lambda params: sharding.ends(params, jnp.bfloat16))(divided)
    np.testing.assert_array_equal(gathered["unembed"], params["unembed"])
    assert gathered["embed"].dtype == jnp.bfloat16


def test_the_decay_of_delta_layers_is_float32_in_searchers():
    """In bfloat16, a decay per token of 0.9 would be off by 1 % of its logarithm."""
    config = tiny_config(family="qwen3_5_text")
    params = random_params(config)
    publish = make_publish_program(jnp.dtype(jnp.bfloat16), float32_leaves=config.float32_leaves)
    published = publish(params)
    shapes = transformer.abstract_params(config, jnp.bfloat16)
    assert jax.tree.map(lambda x: x.dtype, published) == jax.tree.map(lambda x: x.dtype, shapes)
    for name in ("delta_log_decay", "delta_decay_bias"):
        np.testing.assert_array_equal(published["layers"][name], params["layers"][name])
    assert published["layers"]["delta_o"].dtype == jnp.bfloat16
