# SPDX-License-Identifier: Apache-2.0
"""The distribution that is drawn from, found by its random words, and the draws against it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from tba_jax.decoding.sampling import fold_in, random_bits, sample_tokens

LARGE = 152064  # Qwen2.5's padded vocabulary


def settings(b, temperature: Any = 1.0, top_p: Any = 1.0, top_k: Any = 0):
    def row(value, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), (b,)))

    return row(temperature, "f4"), row(top_p, "f4"), row(top_k, "i4")


@jax.jit
def draw(logits, bits, rows):
    return sample_tokens(logits, bits, *rows)


def words(b, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 2**32, (b, 2), dtype=np.uint32))


def softmax64(logits, temperature=1.0):
    x = np.asarray(logits, np.float64) / temperature
    w = np.exp(x - x.max(-1, keepdims=True))
    return w / w.sum(-1, keepdims=True)


def shape(name):
    x = np.random.default_rng(1).normal(size=LARGE)
    if name == "one dominant":
        x[12345] = 26.0
    shapes = {"normal 3": 3 * x, "zipf, sorted": -1.1 * np.log(np.arange(1, LARGE + 1))}
    return shapes.get(name, x).astype(np.float32)


@pytest.mark.parametrize("name", ["normal 3", "zipf, sorted", "one dominant"])
def test_the_words_that_draw_a_token_are_its_share_of_the_softmax(name):
    """Bisects the first words that draw a token's block, then the second words of the token."""
    n, logits, most = 16, shape(name), 2**32 - 1
    p = softmax64(logits)
    rows, rng = jnp.broadcast_to(jnp.asarray(logits), (n, LARGE)), np.random.default_rng(3)
    tokens = rng.choice(LARGE, n, p=p)

    def first(pair, is_reached):
        """The smallest word with which the draw of pair(word) is reached, 2^32 if there is none."""
        low, high = np.zeros(n, np.uint64), np.full(n, 2**32, np.uint64)
        while (is_open := low < high).any():
            word = (low + high) // 2
            bits = np.stack(np.broadcast_arrays(*pair(word)), axis=-1).astype(np.uint32)
            reached = is_reached(np.asarray(draw(rows, jnp.asarray(bits), settings(n))[0]))
            high = np.where(is_open & reached, word, high)
            low = np.where(is_open & ~reached, word + 1, low)
        return low.astype(float)

    # The last token of a block, then the first one of the next block.
    block = first(lambda word: (word, most), lambda drawn: drawn >= tokens)
    blocks = first(lambda word: (word, 0), lambda drawn: drawn > tokens) - block
    within = [
        first(lambda word: (block, word), is_reached)
        for is_reached in (lambda drawn: drawn >= tokens, lambda drawn: drawn > tokens)
    ]
    found = blocks * (within[1] - within[0]) / 2.0**64
    # Float32 exponentials and sums; shares of a level are rounded to 2^-31.
    np.testing.assert_allclose(found, p[tokens], rtol=1e-5)
    bits = jnp.asarray(np.stack([block, within[0]], axis=-1).astype(np.uint32))
    drawn, logprobs = draw(rows, bits, settings(n))
    np.testing.assert_array_equal(drawn, tokens)
    # Float32 at log-probs down to -16 has a grid of 9.5e-7; half of it and the sum's error.
    np.testing.assert_allclose(logprobs, np.log(p[tokens]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("v", [23, 50257])
def test_a_row_does_not_depend_on_the_settings_of_its_neighbours(v):
    """Bit by bit: plain, top-p, top-k and greedy rows beside the same and others."""
    b = 64
    logits = jnp.asarray(np.random.default_rng(3).normal(size=(b, v)) * 3, jnp.float32)
    kinds = [settings(b, 3.0), settings(b, 3.0, top_p=0.9), settings(b, 3.0, top_k=20)]
    kinds, kind = [*kinds, settings(b, 0.0)], np.arange(b) % 4
    mixed = [jnp.asarray(np.choose(kind, parts)) for parts in zip(*kinds, strict=True)]
    found = draw(logits, words(b), mixed)
    for i, alike in enumerate(kinds):
        for x, y in zip(found, draw(logits, words(b), alike), strict=True):
            np.testing.assert_array_equal(x[kind == i], y[kind == i])


def test_draws_from_a_few_tokens_follow_the_tempered_softmax():
    """40,000 draws from 5 tokens, one forbidden: chi-square, false alarm 1e-6, fixed seed."""
    logits, n = jnp.array([1.0, -jnp.inf, 0.0, 2.0, -1.0]), 40000
    keys = jax.random.key_data(jax.random.split(jax.random.key(0), n))
    bits = random_bits(keys, jnp.zeros(n, jnp.int32), 1)[0]
    tokens, logprobs = draw(jnp.broadcast_to(logits, (n, 5)), bits, settings(n, temperature=1.5))
    p = softmax64(logits, 1.5)
    counts = np.bincount(tokens, minlength=5)
    assert counts[1] == 0
    seen = [0, 2, 3, 4]
    expected = n * p[seen]
    assert ((counts[seen] - expected) ** 2 / expected).sum() < stats.chi2.isf(1e-6, 3)
    np.testing.assert_allclose(logprobs, np.log(p[np.asarray(tokens)]), atol=1e-6)


def test_greedy_is_the_first_of_the_largest():
    logits = np.random.default_rng(0).normal(size=(40, 37)).astype(np.float32)
    for row, last in enumerate(range(37)):  # ties, within a block and across blocks
        logits[row, [last, min(last + 3, 36), 36]] = 9.0
    tokens, logprobs = draw(jnp.asarray(logits), words(40), settings(40, 0))
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    np.testing.assert_array_equal(logprobs, np.zeros(40))


def kept_by_sorting(logits, temperature, top_p, top_k):
    """Set kept by top-k, then top-p, by sorting in float64; and its margin to another answer."""
    p = softmax64(logits, temperature)
    if top_k:
        p = np.where(p >= np.sort(p)[-min(top_k, len(p))], p, 0)
        p /= p.sum()
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    if top_p >= 1:
        return p > 0, np.inf
    last = np.flatnonzero(before < top_p)[-1]
    return p >= p[order[last]], np.abs(before - top_p).min()


def test_top_k_and_top_p_against_sorting():
    rng = np.random.default_rng(0)
    b, v = 64, 1000
    logits = (rng.normal(size=(b, v)) * rng.uniform(0.5, 5, (b, 1))).astype(np.float32)
    logits[::2] = np.round(logits[::2], 1)  # ties, which are kept or dropped together
    logits[:, ::9] = -np.inf
    temperature = rng.uniform(0.3, 2, b).astype(np.float32)
    top_p = np.where(rng.random(b) < 0.3, 1, rng.uniform(1e-6, 0.999, b)).astype(np.float32)
    top_k = np.where(rng.random(b) < 0.3, 0, rng.integers(1, 2 * v, b)).astype(np.int32)
    rows = settings(b, temperature, top_p, top_k)
    tokens, logprobs = draw(jnp.asarray(logits), words(b), rows)
    for i in range(b):
        kept, margin = kept_by_sorting(logits[i], temperature[i], top_p[i], top_k[i])
        assert margin > 2e-6  # the float32 mass decides these rows as float64 does
        p = np.where(kept, softmax64(logits[i], temperature[i]), 0)
        assert kept[tokens[i]]
        # A set with one token more or less than the oracle's shows in the log of its mass.
        np.testing.assert_allclose(logprobs[i], np.log(p[tokens[i]] / p.sum()), atol=1e-6)


def test_a_truncated_draw_is_the_plain_draw_of_the_kept_tokens():
    """Also the only check that every kept token can be drawn: same words, same tokens."""
    logits = np.random.default_rng(3).normal(size=(200, 100)).astype(np.float32)
    kept = np.stack([kept_by_sorting(x, 1.0, 0.7, 30)[0] for x in logits])
    rows = settings(200, 1.0, 0.7, 30)
    got = draw(jnp.asarray(logits), words(200), rows)
    want = draw(jnp.asarray(np.where(kept, logits, -np.inf)), words(200), settings(200))
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], atol=1e-6)  # one ulp of log-probs below 8


def test_words_belong_to_row_and_step():
    keys = jax.random.key_data(jax.random.split(jax.random.key(7), 5))
    first = jnp.array([0, 3, 0, 10, 1], jnp.int32)
    bits = np.asarray(random_bits(keys, first, 6))
    assert bits.shape == (6, 5, 2) and bits.dtype == np.uint32
    # A later chunk, fewer rows, another order: the same words.
    later = random_bits(keys[::-1], first[::-1] + 4, 2)
    np.testing.assert_array_equal(later, bits[4:, ::-1])
    assert len(np.unique(bits)) == bits.size
    alone = random_bits(keys[:1], jnp.array([0], jnp.int32), 6)
    np.testing.assert_array_equal(alone[:, 0], bits[:, 0])


@pytest.mark.parametrize("seed", [0, 7, 2**31 + 5, 2**32 - 1])
def test_keys_folded_on_the_host_are_those_of_jax_to_the_last_bit(seed):
    key = jax.random.key(seed)
    numbers = np.array([0, 1, 2, 15, 255, 2**20 + 3, 2**31, 2**32 - 1], np.uint32)
    expected = [jax.random.key_data(jax.random.fold_in(key, n)) for n in numbers]
    for given in (key, np.asarray(jax.random.key_data(key))):
        got = fold_in(given, numbers)
        assert got.dtype == np.uint32
        np.testing.assert_array_equal(got, expected)
