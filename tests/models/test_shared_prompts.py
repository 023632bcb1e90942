# SPDX-License-Identifier: Apache-2.0
"""A prompt computed once for its responses gives what rows of their own give.

Contract: states and gradients of each kind of layer, log-probs of the scorer, and flash attention,
which repeats the prompt; rows of padding are finite.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_batches import slow
from fake_models import KINDS, random_params, tiny_config

from tba_jax.models import attention, shared_prompts, transformer
from tba_jax.models.logprobs import row_token_logprobs
from tba_jax.models.scoring import Scoring

# Prompts of 5, 2 and 3 tokens, four responses to each, of up to six.
PROMPT_LENGTHS = np.array([5, 2, 3], np.int32)
RESPONSE_LENGTHS = np.array([[6, 1, 3, 0], [2, 6, 6, 5], [4, 4, 0, 0]], np.int32)
B, C, X, T = 3, 4, 5, 6


@functools.cache
def tokens():
    rng = np.random.default_rng(0)
    return rng.integers(3, 23, (B, X)).astype(np.int32), rng.integers(3, 23, (B, C, T))


def shared_states(params, config):
    prompts, responses = tokens()
    start, behind = X - PROMPT_LENGTHS[:, None], X + np.arange(C * T)[None] % T
    index = np.arange(X)[None]
    positions = np.concatenate([np.maximum(index - start, 0), behind - start], 1)
    hidden = transformer.apply(
        params,
        jnp.asarray(np.concatenate([prompts, responses.reshape(B, -1)], 1)),
        jnp.asarray(positions),
        shared_prompts.Rows(jnp.asarray(index >= start), C),
        config=config,
        compute_dtype=jnp.float64,
    )
    return hidden[:, X - 1], hidden[:, X:].reshape(B, C, T, -1)


def states_of_rows(params, config):
    """Each response in a row with its prompt, by the plain forward pass."""
    prompts, responses = tokens()
    rows = np.concatenate([np.repeat(prompts[:, None], C, 1), responses], -1).reshape(B * C, -1)
    first, index = np.repeat(X - PROMPT_LENGTHS, C)[:, None], np.arange(X + T)[None]
    hidden = transformer.apply(
        params,
        jnp.asarray(rows),
        jnp.asarray(np.maximum(index - first, 0)),
        jnp.asarray(index >= first),
        config=config,
        compute_dtype=jnp.float64,
    ).reshape(B, C, X + T, -1)
    return hidden[:, 0, X - 1], hidden[:, :, X:]


def packed_states(params, config, is_shared=True):
    """Two rows: prompts 0 and 1, each before its responses; prompt 2 before its, and padding.

    Without sharing each response has a prompt of its own before it.
    """
    prompts, responses = tokens()
    blocks = []
    for i, n in enumerate(PROMPT_LENGTHS):
        prompt, block = (0, i, prompts[i, X - n :]), []
        for j, y in enumerate(responses[i]):
            block += [prompt] if j == 0 or not is_shared else []
            block.append((j + 1, i, y))
        blocks.append(block)
    # tokens, segments, positions, contexts, is_prompt
    rows = np.zeros((5, 2, 64 if is_shared else 80), np.int32)
    where = {}
    for row, block in ((0, blocks[0] + blocks[1]), (1, blocks[2])):
        end = segment = 0
        for j, i, y in block:
            at = slice(end, end + len(y))
            # A prompt has the segment of the response behind it.
            first = 0 if j == 0 else PROMPT_LENGTHS[i]
            segment += j == 0 or (is_shared and j > 1)
            values = (y, segment, first + np.arange(len(y)), i + 1, j == 0)
            for x, value in zip(rows, values, strict=True):
                x[row, at] = value
            where[i, j], end = (row, at), at.stop
    seen, segments, positions, contexts, is_prompt = map(jnp.asarray, rows)
    hidden = transformer.apply(
        params,
        seen,
        positions,
        attention.packed(segments, *((contexts, is_prompt > 0) if is_shared else ())),
        config=config,
        compute_dtype=jnp.float64,
    )
    ends = jnp.stack([hidden[row, at.stop - 1] for row, at in (where[i, 0] for i in range(B))])
    each = [hidden[where[i, j + 1]] for i in range(B) for j in range(C)]
    return ends, jnp.stack(each).reshape(B, C, T, -1)


@pytest.mark.parametrize(
    ("family", "has_gradients"),
    # By default gradients of attention, and values of delta layers, whose state forks.
    [("qwen2", True), ("qwen3_5_text", False), *(slow(x, True) for x in (*KINDS[1:], "gpt_neox"))],
)
def test_states_and_gradients_are_those_of_rows_of_their_own(family, has_gradients):
    config, rng = tiny_config(family=family), np.random.default_rng(1)
    shapes = (B, config.hidden_size), (B, C, T, config.hidden_size)
    cotangents = [rng.normal(size=shape) for shape in shapes]

    def with_gradients(states):
        def loss(params):
            out = states(params, config)
            return sum(jnp.sum(x * y) for x, y in zip(out, cotangents, strict=True)), out

        run = jax.value_and_grad(loss, has_aux=True) if has_gradients else lambda x: (loss(x), None)
        return jax.jit(run)

    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: x.astype(jnp.float64), random_params(config))
        (_, wanted), wanted_gradient = with_gradients(states_of_rows)(params)
        for states in (shared_states, packed_states):
            (_, got), gradient = with_gradients(states)(params)
            assert got[1].dtype == jnp.float64
            chex.assert_trees_all_close(got, wanted, rtol=0, atol=1e-12)
            # Of leaves of order 10; that of a bias of the keys is 0 where they are not rotated.
            chex.assert_trees_all_close(gradient, wanted_gradient, rtol=1e-12, atol=1e-12)
        # Packed rows in which each response has a prompt of its own.
        got = jax.jit(functools.partial(packed_states, config=config, is_shared=False))(params)
        chex.assert_trees_all_close(got, wanted, rtol=0, atol=1e-12)


def test_logprobs_of_groups_are_those_of_rows():
    config, scoring = tiny_config(qkv_bias=True), Scoring(0.7, eos_ids=(2, 5), min_new_tokens=3)
    prompts, responses = tokens()
    rows = np.concatenate([np.repeat(prompts[:, None], C, 1), responses], -1).astype(np.int32)
    groups = np.concatenate([prompts, responses.reshape(B, -1)], -1).astype(np.int32)
    kwargs = {"response_bucket": T, "config": config, "scoring": scoring, "remat": "layers"}
    cotangent = np.random.default_rng(1).normal(size=(B, C, T)).astype(np.float32)

    @jax.jit
    def with_gradients(*arrays):
        def run(params):
            return row_token_logprobs(params, *arrays, **kwargs).reshape(B, C, T)

        values, pull = jax.vjp(run, params)
        return values, pull(jnp.asarray(cotangent))[0]

    params = random_params(config)
    apart = rows.reshape(B * C, -1), np.repeat(PROMPT_LENGTHS, C), RESPONSE_LENGTHS.reshape(-1, 1)
    wanted = with_gradients(*apart)
    got = with_gradients(groups, PROMPT_LENGTHS, RESPONSE_LENGTHS)
    assert np.abs(wanted[0]).max() > 1
    # Float32 sums in another order, of values and gradients of order 1 to 100.
    chex.assert_trees_all_close(got, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("window", [None, 4])
def test_attention_behind_a_prompt_is_that_of_rows_of_their_own(monkeypatch, window):
    """The rows of flash attention, computed by the einsum, against the two parts."""
    shapes = [(B, X + C * T, *heads) for heads in ((2, 3, 4), (2, 4), (2, 4))]
    mask = jnp.asarray(np.arange(X)[None] >= X - PROMPT_LENGTHS[:, None])
    scores = attention.Scores(window)
    plain = attention.attend_causal

    def by_einsum(*args, implementation, **kwargs):
        assert args[0].shape[:2] == (B * C, X + T) and implementation == "splash"
        return plain(*args, **kwargs)

    def with_gradients(implementation):
        def run(*args):
            rows, how = shared_prompts.Rows(mask, C), {"implementation": implementation}
            out = shared_prompts.attend(*args, rows, scores=scores, **how)
            return jnp.where(is_valid[:, :, None, None, None], out, 0)

        out, pull = jax.vjp(jax.jit(run), *arrays)
        return out, pull(cotangent)

    with jax.enable_x64(True):
        rng = np.random.default_rng(2)
        *arrays, cotangent = (jnp.asarray(rng.normal(size=x)) for x in [*shapes, shapes[0]])
        is_valid = jnp.pad(mask, ((0, 0), (0, C * T)), constant_values=True)
        wanted = with_gradients("xla")
        monkeypatch.setattr(attention, "attend_causal", by_einsum)
        got = with_gradients("splash")
    assert np.abs(wanted[1][1]).max() > 0.1
    chex.assert_trees_all_close(got, wanted, rtol=0, atol=1e-12)


def test_a_row_of_padding_is_finite():
    config = tiny_config(qkv_bias=True)
    empty = np.zeros((B, X + C * T), np.int32), np.zeros(B, np.int32), np.zeros((B, C), np.int32)
    kwargs = {"response_bucket": T, "config": config, "scoring": Scoring()}

    def total(params):
        return row_token_logprobs(params, *empty, **kwargs).sum()

    value, gradient = jax.jit(jax.value_and_grad(total))(random_params(config))
    assert value == 0
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), gradient)
