# SPDX-License-Identifier: Apache-2.0
"""The transformer: padding and numerics; parity with transformers is in test_families."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_batches import slow
from fake_models import random_params, tiny_config

from tba_jax.models import transformer

CONFIG = tiny_config()


@pytest.mark.parametrize("remat", ["layers", slow("dots")])
def test_remat_changes_neither_values_nor_gradients(remat):
    """One row is padding alone."""
    tokens = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (3, 10), np.int32)
    mask = np.ones(tokens.shape, bool) & (np.arange(3)[:, None] != 1)
    rows, how = (tokens, np.maximum(mask.cumsum(1) - 1, 0), mask), {"compute_dtype": jnp.float32}

    def loss(params, remat):
        return (transformer.apply(params, *rows, config=CONFIG, remat=remat, **how) ** 2).sum()

    run, params = jax.jit(jax.value_and_grad(loss), static_argnums=1), random_params(CONFIG)
    plain, found = (jax.device_get(run(params, x)) for x in ("none", remat))
    chex.assert_tree_all_finite(plain)
    chex.assert_trees_all_close(found, plain, rtol=2e-4, atol=1e-5)


def test_each_kind_of_layer_is_traced_once(monkeypatch):
    """The pattern has two windows before each full layer; the fourth layer is a window again."""
    config, calls, real = tiny_config(family="gemma3_text"), [], transformer.run_layer
    monkeypatch.setattr(
        transformer, "run_layer", lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs)
    )
    stacked = transformer.abstract_params(config)
    apart = jax.eval_shape(lambda x: transformer.unstack_layers(x, config), stacked)
    row = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    for params in (stacked, apart):
        calls.clear()
        jax.eval_shape(
            lambda params, x: transformer.apply(
                params, x, x, x >= 0, config=config, compute_dtype=jnp.float32, remat="layers"
            ),
            params,
            row,
        )
        assert len(calls) == 2


def test_initial_parameters_are_plain_dicts_and_match_their_description():
    params = transformer.init_params(CONFIG, jax.random.key(0))
    abstract = transformer.abstract_params(CONFIG)
    assert jax.tree.structure(abstract) == jax.tree.structure(params)
    assert type(params) is dict and type(params["layers"]) is dict
    for leaf, spec in zip(jax.tree.leaves(params), jax.tree.leaves(abstract), strict=True):
        assert (leaf.shape, leaf.dtype) == (spec.shape, spec.dtype)
    # 23*16 embedding, 16 final norm, and per layer 2*16 norms, q+o 2*16*24, kv 16*2*12, mlp 3*16*20
    assert transformer.num_params(CONFIG) == 368 + 16 + 2 * (32 + 768 + 384 + 960)
    # Layers start different, seeds matter, the residual outputs start smaller (std 1/sqrt(24*4)).
    q, o = params["layers"]["q"], params["layers"]["o"]
    assert np.abs(q[0] - q[1]).max() > 0.1
    other = transformer.init_params(CONFIG, jax.random.key(1))
    assert np.abs(other["embed"] - params["embed"]).max() > 0.1
    # 768 draws each: the standard error of a standard deviation is 2.6 %.
    np.testing.assert_allclose(np.std(q), 16**-0.5, rtol=0.12)
    np.testing.assert_allclose(np.std(o), (24 * 4) ** -0.5, rtol=0.12)


def test_positions_beyond_a_learned_table_read_its_last_row():
    """Padding may lie there; an index past the end must not become nan or another row."""
    config = tiny_config(family="gpt2", max_positions=4)
    params = random_params(config)
    x = transformer.embed(
        params, jnp.zeros(7, int), jnp.arange(7), config=config, compute_dtype=jnp.float32
    )
    want = params["embed"][0] + params["position_embed"][3]
    np.testing.assert_array_equal(x[3:], np.broadcast_to(want, (4, 16)))
    assert np.abs(x[2] - x[3]).max() > 0
