# SPDX-License-Identifier: Apache-2.0
"""Fused log-probs: equal to float64 in values and gradients, in pieces, divided over devices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tba_jax.models.fused_logprobs import fused_logprobs

TEMPERATURE = 0.7
B, T, D, V = 8, 7, 8, 48


def inputs(b=B, t=T, d=D, v=V, dtype=np.float32, scale=1.0):
    """(hidden, table, targets, cotangent of the log-probs)."""
    rng = np.random.default_rng(0)
    return (
        jnp.asarray(rng.normal(size=(b, t, d), scale=scale), dtype),
        jnp.asarray(rng.normal(size=(v, d)), dtype),
        jnp.asarray(rng.integers(0, v, (b, t)), jnp.int32),
        jnp.asarray(rng.normal(size=(b, t)), jnp.float32),
    )


def naive(hidden, table, targets):
    """All logits at once, as the definition says."""
    logp = jax.nn.log_softmax(jnp.einsum("btd,vd->btv", hidden, table) / TEMPERATURE)
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


def in_float64(hidden, table, targets, cotangent):
    """What `naive` gives in float64 for exactly these inputs."""
    with jax.enable_x64(True):
        wide = (jnp.asarray(np.asarray(x, np.float64)) for x in (hidden, table))
        cotangent = jnp.asarray(np.asarray(cotangent, np.float64))
        out = jax.jit(with_gradients(naive))(*wide, targets, cotangent)
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
        {"vocab_block": 20},
        # four parts of 12 = 2 x 5 + 2 rows
        {"vocab_block": 5, "vocab_shards": 4},
        {"vocab_block": 20, "kept_bytes": 4 * B * T * V},
        {"vocab_block": 5, "vocab_shards": 4, "kept_bytes": 4 * B * T * V},
    ],
    ids=["one block", "blocks", "parts", "kept", "parts kept"],
)
def test_values_and_gradients_are_those_of_float64(sizes, wanted):
    # float32: 6e-8 per operation, sums of 8 to 56 terms, in logits up to about 15.
    check(jax.jit(fused(**sizes))(*inputs()), wanted, 2e-6)


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("kept_bytes", [0, 4 * B * T * V])
def test_rows_without_a_token_have_probability_0(cap, kept_bytes):
    """The last rows of the table change no value and get no gradient, as if they were absent."""
    num_tokens = V - 11
    hidden, table, targets, cotangent = inputs()
    targets = targets % num_tokens
    sizes = {"vocab_block": 20, "kept_bytes": kept_bytes, "cap": cap}
    got = jax.jit(fused(num_tokens=num_tokens, **sizes))(hidden, table, targets, cotangent)
    short = jax.jit(fused(cap=cap))(hidden, table[:num_tokens], targets, cotangent)
    assert not np.asarray(got[2][num_tokens:]).any()
    check((*got[:2], got[2][:num_tokens]), short, 2e-6)


@pytest.mark.parametrize(("spare", "products"), [(0, 3), (-1, 4)])
def test_kept_logits_are_not_made_again(spare, products):
    data = inputs()
    run = fused(vocab_block=V, kept_bytes=4 * B * T * V + spare)
    equations = _equations(jax.make_jaxpr(run)(*data).jaxpr)
    assert sum(eqn.primitive.name == "dot_general" for eqn in equations) == products


@pytest.mark.parametrize("kept_bytes", [0, 4 * B * T * V])
def test_bfloat16_inputs_lose_no_more_than_the_products_of_the_gradient(kept_bytes):
    run = fused(vocab_block=20, kept_bytes=kept_bytes)
    got = jax.jit(run)(*(data := inputs(dtype=jnp.bfloat16)))
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


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)


def test_nothing_has_tokens_and_the_whole_vocabulary():
    b, t, d, v = 4, 64, 2, 512
    data = inputs(b, t, d, v)
    jaxpr = jax.make_jaxpr(fused(vocab_block=64))(*data)
    sizes = [v.aval.size for eqn in _equations(jaxpr.jaxpr) for v in eqn.outvars]
    # A block of logits, 64 x 256, is the largest array; all logits would be 8 of them.
    assert max(sizes) == 64 * b * t
    # The check sees what it looks for.
    jaxpr = jax.make_jaxpr(with_gradients(naive))(*data)
    assert max(v.aval.size for eqn in _equations(jaxpr.jaxpr) for v in eqn.outvars) == b * t * v


_COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def collectives(compiled):
    """[(operation, elements)] of the program, loops counted once."""
    found = []
    for line in compiled.as_text().splitlines():
        if match := _COLLECTIVE.search(line):
            shapes = re.findall(r"\[([\d,]*)\]", re.sub(r"\{.*?\}", "", match[1]))
            size = sum(int(np.prod([int(x) for x in s.split(",") if x])) for s in shapes)
            found.append((match[2], size))
    return found


@pytest.mark.parametrize(
    ("shape", "rows", "vocabulary", "sizes", "travels"),
    [
        # The table gradient over rows, the hidden gradient over the vocabulary; sums of tokens.
        ((2, 4), "data", "model", {"kept_bytes": 4 * B * T * V}, V * D // 4 + B // 2 * T * (D + 4)),
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
    found = collectives(compiled)
    assert {name for name, _ in found} == {"all-reduce"}
    assert sum(size for _, size in found) <= travels
