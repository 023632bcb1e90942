# SPDX-License-Identifier: Apache-2.0
"""Fused log-probs: equal to float64 in values and gradients, in pieces, divided over devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_batches import collectives
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tba_jax.models.fused_logprobs import fused_logprobs

TEMPERATURE = 0.7
B, T, D, V = 8, 7, 8, 48
KEPT = 4 * B * T * V


def inputs(b=B, t=T, d=D, v=V, dtype=np.float32, scale=1.0):
    """(hidden, table, targets, cotangent of the log-probs)."""
    rng = np.random.default_rng(0)
    return (
        jnp.asarray(rng.normal(size=(b, t, d), scale=scale), dtype),
        jnp.asarray(rng.normal(size=(v, d)), dtype),
        jnp.asarray(rng.integers(0, v, (b, t)), jnp.int32),
        jnp.asarray(rng.normal(size=(b, t)), jnp.float32),
    )


def naive(hidden, table, targets, cap=None):
    """All logits at once, as the definition says."""
    logits = jnp.einsum("btd,vd->btv", hidden, table)
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    logp = jax.nn.log_softmax(logits / TEMPERATURE)
    return jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]


def with_gradients(function):
    """(log-probs, hidden gradient, table gradient) of `function`."""

    def run(hidden, table, targets, cotangent):
        values, pull = jax.vjp(lambda h, w: function(h, w, targets), hidden, table)
        return values, *pull(cotangent)

    return run


def fused(**sizes):
    sizes = {"temperature": TEMPERATURE} | sizes
    return with_gradients(functools.partial(fused_logprobs, **sizes))


def in_float64(hidden, table, targets, cotangent, cap=None):
    """What `naive` gives in float64 for exactly these inputs."""
    with jax.enable_x64(True):
        wide = (jnp.asarray(np.asarray(x, np.float64)) for x in (hidden, table))
        cotangent = jnp.asarray(np.asarray(cotangent, np.float64))
        run = with_gradients(functools.partial(naive, cap=cap))
        out = jax.jit(run)(*wide, targets, cotangent)
        return [np.asarray(x) for x in out]


def check(got, wanted, tolerance):
    """Every entry within `tolerance` of the largest one of its array."""
    for name, x, y in zip(("logprob", "d_hidden", "d_table"), got, wanted, strict=True):
        x = np.asarray(x, np.float64)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.abs(y).max(), err_msg=name)


@pytest.fixture(scope="module")
def wanted():
    return in_float64(*inputs())


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        # 48 = 2 x 20 + 8 rows
        {"vocab_block": 20, "kept_bytes": KEPT},
        # four parts of 12 = 2 x 5 + 2 rows
        {"vocab_block": 5, "vocab_shards": 4},
    ],
    ids=["one block", "blocks kept", "parts"],
)
def test_values_and_gradients_are_those_of_float64(sizes, wanted):
    # float32: 6e-8 per operation, sums of 8 to 56 terms, in logits up to about 15.
    check(jax.jit(fused(**sizes))(*inputs()), wanted, 2e-6)


@pytest.mark.parametrize(("cap", "kept_bytes"), [(None, KEPT), (5.0, 0)])
def test_rows_without_a_token_have_probability_0(cap, kept_bytes):
    """The last rows of the table change no value and get no gradient, as if they were absent."""
    num_tokens = V - 11
    hidden, table, targets, cotangent = inputs()
    targets = targets % num_tokens
    sizes = {"vocab_block": 20, "kept_bytes": kept_bytes, "cap": cap}
    got = jax.jit(fused(num_tokens=num_tokens, **sizes))(hidden, table, targets, cotangent)
    short = in_float64(hidden, table[:num_tokens], targets, cotangent, cap)
    assert not np.asarray(got[2][num_tokens:]).any()
    check((*got[:2], got[2][:num_tokens]), short, 2e-6)


def test_bfloat16_inputs_lose_no_more_than_the_products_of_the_gradient():
    data = inputs(dtype=jnp.bfloat16)
    got = jax.jit(fused(vocab_block=20))(*data)
    assert [x.dtype for x in got] == [jnp.float32, jnp.bfloat16, jnp.bfloat16]
    expected = in_float64(*data)
    # Products of bfloat16 are exact in float32: the values lose nothing.
    check((got[0], *expected[1:]), expected, 2e-6)
    # The gradient of the logits and the results are rounded to 8 bits (4e-3) once each.
    check((expected[0], *got[1:]), expected, 8e-3)


def test_logits_of_any_size_are_finite():
    # Logits up to some 10,000: p is 0 or 1 in float32, but never 0/0 or inf - inf.
    data = inputs(scale=1000.0)
    got, expected = jax.jit(fused(vocab_block=20))(*data), in_float64(*data)
    # Such logits are rounded by up to 1e-3, and log-probs with them.
    np.testing.assert_allclose(got[0], expected[0], rtol=0, atol=4e-3)
    check((expected[0], *got[1:]), expected, 4e-3)


def test_nothing_has_tokens_and_the_whole_vocabulary():
    b, t, d, v = 4, 64, 2, 2048
    data = inputs(b, t, d, v)

    def held(run):
        return jax.jit(run).lower(*data).compile().memory_analysis().temp_size_in_bytes

    # A block of logits and its gradient; the check sees what it looks for.
    assert held(fused(vocab_block=64)) < 4 * b * t * v < held(with_gradients(naive))


@pytest.mark.parametrize(
    ("shape", "rows", "vocabulary", "sizes", "travels"),
    [
        # The table gradient over rows, the hidden gradient over the vocabulary; sums of tokens.
        ((2, 4), "data", "model", {"kept_bytes": KEPT}, V * D // 4 + B // 2 * T * (D + 4)),
        # Only the table gradient.
        ((4, 1), "data", None, {"vocab_block": 20}, V * D),
        # Sums of each token, and its hidden gradient, once.
        ((1, 8), None, "model", {"vocab_block": 4}, B * T * (D + 4)),
    ],
)
def test_rows_and_vocabulary_stay_where_they_are(wanted, shape, rows, vocabulary, sizes, travels):
    """Only sums over devices travel."""
    mesh = Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ("data", "model"))
    by_row, by_token = NamedSharding(mesh, P(rows)), NamedSharding(mesh, P(vocabulary))
    data = jax.device_put(inputs(), (by_row, by_token, by_row, by_row))
    shards = shape[1] if vocabulary else 1
    program = jax.jit(fused(vocab_shards=shards, **sizes), out_shardings=(by_row, by_row, by_token))
    compiled = program.lower(*data).compile()
    check(compiled(*data), wanted, 2e-6)
    found = collectives(compiled.as_text())
    assert {name for name, _ in found} == {"all-reduce"}
    assert sum(np.prod(shape) for _, shape in found) <= travels
