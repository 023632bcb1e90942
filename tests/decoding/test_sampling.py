# SPDX-License-Identifier: Apache-2.0
"""The distribution that is drawn from, computed exactly, and the draws against it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from tba_jax.decoding import sampling
from tba_jax.decoding.sampling import random_bits, sample_tokens

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


# ---- the distribution, from the integer masses


@jax.jit
def levels(logits):
    """Integer masses of the blocks [n] and of the entries of each block [n e], as drawn from."""
    size = sampling._block_size(logits.shape[0])
    weights = jnp.exp(logits - jnp.max(logits)).reshape(-1, size)
    sums = sampling._of_blocks(weights, jnp.sum)
    return sampling._fixed_point(sums[None])[0], sampling._fixed_point(weights)


def word_share(masses):
    """Share of the 2^32 words that `_invert` gives to each index, by integer arithmetic."""
    total = masses.astype(np.int64).sum(-1, keepdims=True)
    ends = np.cumsum(masses.astype(np.int64), axis=-1)
    # floor(word * total / 2^32) < end  <=>  word < ceil(end * 2^32 / total); end < 2^31, so that
    # the product stays below 2^63.
    words_below = -(-(ends << 32) // np.maximum(total, 1))
    return np.diff(words_below, axis=-1, prepend=0) / 2.0**32


def implied(logits):
    """Probability [v] of each token over all pairs of random words."""
    block, entry = (np.asarray(a) for a in levels(jnp.asarray(logits)))
    return (word_share(block)[:, None] * word_share(entry)).ravel()


def shape(name, v=LARGE):
    x = np.random.default_rng(1).normal(size=v)
    if name == "normal 3":
        x *= 3
    elif name == "zipf, sorted":
        x = -1.1 * np.log(np.arange(1, v + 1))
    else:
        x[12345] = 26.0
    return x.astype(np.float32)


@pytest.mark.parametrize("name", ["normal 3", "zipf, sorted", "one dominant"])
def test_the_drawn_distribution_is_the_softmax(name):
    """Exact over all pairs of words, given the masses; about 7e-8 of total variation is rounding.

    Out of reach although p > 1e-12: none for zipf; 2 and 372 tokens of 152,064 for normal 3 and
    the dominant token, 5e-9 of the mass in all.
    """
    logits = shape(name)
    q, p = implied(logits), softmax64(logits)
    assert q.sum() == pytest.approx(1, abs=1e-12)  # float64 sums
    assert np.abs(p - q).sum() / 2 < 1e-6  # the contract
    lost = (q == 0) & (p > 1e-12)
    # Half a unit of 2^-31, of the whole or of a block; twice that for the float32 shares.
    assert p[lost].max(initial=0) < 5e-10
    assert p[lost].sum() < 1e-8
    assert lost.sum() <= {"normal 3": 10, "one dominant": 500}.get(name, 0)


@pytest.mark.parametrize("v", [23, 50257])
def test_a_row_does_not_depend_on_the_settings_of_its_neighbours(v):
    """Bit by bit: plain, top-p and top-k rows beside rows of the same and of other settings."""
    b = 64
    logits = jnp.asarray(np.random.default_rng(3).normal(size=(b, v)) * 3, jnp.float32)
    kinds = [settings(b, 3.0), settings(b, 3.0, top_p=0.9), settings(b, 3.0, top_k=20)]
    kind = np.arange(b) % 3
    mixed = [jnp.asarray(np.choose(kind, parts)) for parts in zip(*kinds, strict=True)]
    found = draw(logits, words(b), mixed)
    for i, alike in enumerate(kinds):
        for x, y in zip(found, draw(logits, words(b), alike), strict=True):
            np.testing.assert_array_equal(x[kind == i], y[kind == i])


def test_draws_at_full_size_follow_the_softmax_and_report_it():
    """12,800 draws in 40 arbitrary classes of tokens: chi-square, false alarm 1e-6, fixed seed."""
    logits, b, calls = shape("normal 3"), 128, 100
    p = softmax64(logits)
    cls = np.random.default_rng(2).integers(0, 40, LARGE)
    rows = jnp.broadcast_to(jnp.asarray(logits), (b, LARGE))
    counts = np.zeros(40)
    for seed in range(calls):
        tokens, logprobs = draw(rows, words(b, seed), settings(b))
        counts += np.bincount(cls[np.asarray(tokens)], minlength=40)
        # float32 at log-probs down to -16 has a grid of 9.5e-7; half of it and the sum's error.
        np.testing.assert_allclose(logprobs, np.log(p[np.asarray(tokens)]), atol=1e-6)
    expected = np.bincount(cls, p) * b * calls
    assert ((counts - expected) ** 2 / expected).sum() < stats.chi2.isf(1e-6, 39)


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


# ---- integers


def test_inversion_at_the_edges_of_every_interval():
    """First and last word of each index, by big integers; the massless ones are skipped."""
    masses = np.array([0, 5, 0, 1, 2**30, 0, 12345, 2**29 + 7, 0])
    total, ends = int(masses.sum()), np.cumsum(masses)
    edge = [-(-(int(e) << 32) // total) for e in [0, *ends]]
    owners = np.flatnonzero(masses)
    word = [edge[i] for i in owners] + [edge[i + 1] - 1 for i in owners]
    assert word[0] == 0 and word[-1] == 2**32 - 1
    rows = jnp.broadcast_to(jnp.asarray(masses, jnp.int32), (len(word), len(masses)))
    index = sampling._invert(rows, jnp.asarray(np.array(word, np.uint32)))
    np.testing.assert_array_equal(index, [*owners, *owners])


# ---- greedy


def test_greedy_is_the_first_of_the_largest():
    logits = np.random.default_rng(0).normal(size=(40, 37)).astype(np.float32)
    for row, last in enumerate(range(37)):  # ties, within a block and across blocks
        logits[row, [last, min(last + 3, 36), 36]] = 9.0
    tokens, logprobs = draw(jnp.asarray(logits), words(40), settings(40, 0))
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    np.testing.assert_array_equal(logprobs, np.zeros(40))


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.9, 20)])
def test_mixed_rows_are_each_what_they_are_alone(top_p, top_k):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(40, 37)).astype(np.float32))
    temperature = np.where(np.arange(40) % 2, 0.8, 0.0)
    mixed = draw(logits, words(40), settings(40, temperature, top_p, top_k))
    alone = draw(logits, words(40), settings(40, 0.8, top_p, top_k))
    for got, sampled, greedy in zip(mixed, alone, (logits.argmax(-1), np.zeros(40)), strict=True):
        np.testing.assert_array_equal(got, np.where(temperature > 0, sampled, greedy))


# ---- top-k and top-p


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
    logits[:, ::9] = -np.inf
    temperature = rng.uniform(0.3, 2, b).astype(np.float32)
    top_p = np.where(rng.random(b) < 0.3, 1, rng.uniform(0.02, 0.999, b)).astype(np.float32)
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


@pytest.mark.parametrize(
    ("top_p", "top_k", "num_kept"),
    [
        (1.0, 1, 1),
        (1.0, 2, 4),  # three tie for the second place
        (0.0, 0, 1),  # the most probable token always stays
        (0.39, 0, 1),
        (0.41, 0, 4),
        (0.59, 5, 4),  # of the five, renormalised to 0.412 and thrice 0.155, and 0.124
        (0.87, 5, 4),
        (0.88, 5, 5),
        (1.0, 0, 6),
    ],
)
def test_ties_and_limits(top_p, top_k, num_kept):
    p = np.array([0.15, 0.40, 0.15, 0.0, 0.12, 0.15, 0.03])
    with np.errstate(divide="ignore"):
        logits = jnp.asarray(np.log(p)[None], jnp.float32)
    _, logprob = draw(logits, jnp.zeros((1, 2), jnp.uint32), settings(1, 1, top_p, top_k))
    kept = np.sort(p)[::-1][:num_kept]
    first = 1 if num_kept == 1 else 0  # word 0 draws the first token kept
    np.testing.assert_allclose(logprob[0], np.log(p[first] / kept.sum()), atol=1e-6)


# ---- random words


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


# ---- cost


def test_a_plain_draw_stores_nothing_of_the_size_of_the_logits():
    b, v = 8, 32000
    blocks = jnp.zeros((b, v // 128, 128))
    plain = jax.jit(lambda x, bits: sampling._draw(x, jnp.exp, bits))
    memory = plain.lower(blocks, words(b)).compile().memory_analysis()
    assert memory is not None
    # Block sums and the entries of one block; the weights alone would be 4 b v.
    assert memory.temp_size_in_bytes < 4 * b * v / 8
