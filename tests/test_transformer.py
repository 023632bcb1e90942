# SPDX-License-Identifier: Apache-2.0
"""The transformer: padding, caches and numerics; parity with transformers is in test_hf_weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import random_params, tiny_config

from tba_jax.models import transformer
from tba_jax.models.transformer import KVCache

CONFIG = tiny_config()
F32 = {"config": CONFIG, "compute_dtype": jnp.float32}


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG)


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(1), (3, 10), 0, CONFIG.vocab_size)


JITTED = jax.jit(transformer.apply, static_argnames=("config", "compute_dtype", "remat"))


def run(params, tokens, mask=None, **kwargs):
    mask = jnp.ones(tokens.shape, bool) if mask is None else mask
    positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
    return JITTED(params, tokens, positions, mask, **(F32 | kwargs))[0]


def test_hidden_states_depend_on_the_past_only(params, tokens):
    changed = run(params, tokens.at[:, 6].add(1))
    hidden = run(params, tokens)
    np.testing.assert_array_equal(changed[:, :6], hidden[:, :6])
    assert np.abs(changed[:, 6:] - hidden[:, 6:]).min(axis=(0, 2)).max() > 0
    assert np.abs(changed[:, 9] - hidden[:, 9]).max() > 1e-3


@pytest.mark.parametrize("left", [0, 3])
def test_padding_changes_nothing(params, tokens, left):
    """Whatever stands in the padding, and however much of it there is."""
    hidden = run(params, tokens)
    for content in (0, 7):
        padded = jnp.pad(tokens, ((0, 0), (left, 2)), constant_values=content)
        mask = jnp.pad(jnp.ones(tokens.shape, bool), ((0, 0), (left, 2)))
        got = run(params, padded, mask)
        np.testing.assert_allclose(got[:, left : left + 10], hidden, atol=2e-6)
        assert np.isfinite(got).all()


def test_rows_do_not_see_each_other(params, tokens):
    np.testing.assert_allclose(run(params, tokens)[1:2], run(params, tokens[1:2]), atol=2e-6)


def test_gradient_is_finite_for_a_fully_padded_row(params, tokens):
    mask = jnp.ones(tokens.shape, bool).at[1].set(False)
    grads = jax.jit(jax.grad(lambda p: run(p, tokens, mask).sum()))(params)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_a_cache_filled_in_pieces_gives_the_same_hidden_states(params, tokens):
    hidden = run(params, tokens)
    cache = transformer.init_cache(CONFIG, 3, 12, jnp.float32)
    pieces = []
    for start, end in ((0, 6), (6, 7), (7, 10)):
        positions = jnp.broadcast_to(jnp.arange(start, end), (3, end - start))
        piece, cache = JITTED(
            params,
            tokens[:, start:end],
            positions,
            jnp.ones((3, 12), bool),
            cache=cache,
            cache_start=start,
            **F32,
        )
        pieces.append(piece)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), hidden, atol=2e-6)


def test_decode_step_gives_the_hidden_states_of_scoring(params):
    """Two prompts of different length, three samples each; their prompt cache is shared."""
    lengths, c, t = [5, 3], 5, 4
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, CONFIG.vocab_size, (2, c))
    responses = rng.integers(0, CONFIG.vocab_size, (2, 3, t))
    mask = np.arange(c) >= c - np.array(lengths)[:, None]
    positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
    _, cache = JITTED(
        params,
        jnp.array(prompts),
        positions,
        jnp.array(mask),
        cache=transformer.init_cache(CONFIG, 2, c, jnp.float32),
        cache_start=0,
        **F32,
    )
    prompt_cache = tuple(KVCache(cache.keys[i], cache.values[i]) for i in range(2))
    own = transformer.init_decode_cache(CONFIG, 2, 3, t, jnp.float32)
    layers = transformer.unstack_layers(params, CONFIG)
    step = jax.jit(transformer.decode_step, static_argnames=("config", "compute_dtype"))
    got = []
    for i in range(t):
        hidden, own = step(
            params,
            layers,
            jnp.array(responses[:, :, i]),
            jnp.broadcast_to(jnp.array(lengths)[:, None] + i, (2, 3)),
            prompt_cache,
            jnp.array(mask),
            own,
            jnp.int32(i),
            **F32,
        )
        got.append(hidden)
    for i in range(2):
        for j in range(3):
            n = lengths[i]
            row = np.zeros((1, c + t), np.int32)  # zeros after the end are not seen
            row[0, : n + t] = np.concatenate([prompts[i, c - n :], responses[i, j]])
            want = run(params, jnp.array(row))[0, n : n + t]
            np.testing.assert_allclose(np.stack(got, 2)[i, j], want, atol=2e-6)


def test_remat_changes_neither_values_nor_gradients(params, tokens):
    def loss(p, remat):
        return (run(p, tokens, remat=remat) ** 2).sum()

    value_and_grad = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    for plain, again in zip(
        jax.tree.leaves(value_and_grad(params, False)),
        jax.tree.leaves(value_and_grad(params, True)),
        strict=True,
    ):
        np.testing.assert_allclose(again, plain, rtol=2e-4, atol=1e-5)


def test_every_parameter_reaches_the_logits():
    config = tiny_config(qkv_bias=True, o_bias=True, tie_embeddings=False)
    params = random_params(config)
    tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, config.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(8), (2, 8))

    def loss(params):
        kwargs = {"config": config, "compute_dtype": jnp.float32}
        hidden, _ = transformer.apply(params, tokens, positions, tokens >= 0, **kwargs)
        logits = transformer.unembed(params, hidden, **kwargs)
        return jax.nn.log_softmax(logits)[..., 0].sum()

    for path, grad in jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(params)):
        assert np.abs(grad).max() > 0, jax.tree_util.keystr(path)


def test_bfloat16_compute_stays_near_float32_and_logits_are_float32(params, tokens):
    hidden = run(params, tokens)
    logits = transformer.unembed(params, hidden, **F32)
    low = {"config": CONFIG, "compute_dtype": jnp.bfloat16}
    low_hidden = run(params, tokens, **low)
    low_logits = transformer.unembed(params, low_hidden, **low)
    assert low_hidden.dtype == jnp.bfloat16 and low_logits.dtype == jnp.float32
    # bfloat16 has 8 bits: a few roundings of values of size about 2.
    np.testing.assert_allclose(low_logits, logits, atol=0.1)
    assert np.abs(low_logits - logits).max() > 1e-4


def test_initial_parameters_are_plain_dicts_and_match_their_description():
    params = transformer.init_params(CONFIG, jax.random.key(0))
    abstract = transformer.abstract_params(CONFIG)
    assert jax.tree.structure(abstract) == jax.tree.structure(params)
    assert type(params) is dict and type(params["layers"]) is dict
    for leaf, spec in zip(jax.tree.leaves(params), jax.tree.leaves(abstract), strict=True):
        assert (leaf.shape, leaf.dtype) == (spec.shape, spec.dtype)
    # 23*16 embedding, 16 final norm, and per layer 2*16 norms, q+o 2*16*24, kv 16*2*12, mlp 3*16*20
    assert transformer.num_params(CONFIG) == 368 + 16 + 2 * (32 + 768 + 384 + 960)
    axes = transformer.param_axes(CONFIG)
    assert axes["layers"]["q"] == ("layers", "embed", "heads", "head_dim")
    jax.tree.map(lambda x, names: None if x.ndim == len(names) else pytest.fail(), params, axes)
    # Layers start different, seeds matter, the residual outputs start smaller (std 1/sqrt(24*4)).
    q, o = params["layers"]["q"], params["layers"]["o"]
    assert np.abs(q[0] - q[1]).max() > 0.1
    other = transformer.init_params(CONFIG, jax.random.key(1))
    assert np.abs(other["embed"] - params["embed"]).max() > 0.1
    # 768 draws each: the standard error of a standard deviation is 2.6 %.
    np.testing.assert_allclose(np.std(q), 16**-0.5, rtol=0.12)
    np.testing.assert_allclose(np.std(o), (24 * 4) ** -0.5, rtol=0.12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads = 4 is not a multiple of num_kv_heads = 3"),
        ({"head_dim": 5}, "head_dim = 5 is odd"),
    ],
)
def test_impossible_architectures_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**changes)


def test_cache_without_its_start_is_refused(params, tokens):
    cache = transformer.init_cache(CONFIG, 3, 10, jnp.float32)
    with pytest.raises(ValueError, match="together"):
        run(params, tokens, cache=cache)
