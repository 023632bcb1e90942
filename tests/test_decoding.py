# SPDX-License-Identifier: Apache-2.0
"""Sampling frequencies, and the engine against plain teacher-forced scoring."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import random_params, tiny_config

from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.sampling import greedy_tokens, row_uniforms, sample_tokens
from tba_jax.models import transformer

CONFIG = tiny_config(num_layers=1, tie_embeddings=False)
PROMPTS = [np.array(p, np.int32) for p in ([3, 4, 5], [6], [7, 8, 9, 10, 11], [3, 4, 5])]
KEY = jax.random.key(7)


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG)


@pytest.fixture(scope="module")
def decoder():
    """Tokens 0 and 1 end a response; 2 pads. Shared, so that programs are compiled once."""
    return make_decoder()


def make_decoder(eos_ids=(0, 1), prompt_buckets=(2, 6)):
    return Decoder(
        CONFIG,
        compute_dtype=jnp.float32,
        eos_ids=eos_ids,
        pad_id=2,
        prompt_buckets=prompt_buckets,
    )


def decode(decoder, params, prompts=PROMPTS, **changes):
    settings = {"num_samples": 3, "max_new_tokens": 8, "temperature": 0.7, "key": KEY}
    return decoder.decode(params, prompts, **(settings | changes))


@jax.jit
def scoring_logits(params, tokens):
    """Logits of one plain forward pass over a row without padding in front."""
    kwargs = {"config": CONFIG, "compute_dtype": jnp.float32}
    positions = jnp.arange(tokens.shape[1])[None]
    hidden, _ = transformer.apply(params, tokens, positions, tokens >= 0, **kwargs)
    return transformer.unembed(params, hidden, **kwargs)[0]


def logits_before(params, prompt, response):
    """Teacher-forced logits [t v] of each response token."""
    row = np.zeros((1, 24), np.int32)  # one length, one program: what follows a token is not seen
    n, end = len(prompt), len(prompt) + len(response)
    row[0, :end] = np.concatenate([prompt, response])
    return np.asarray(scoring_logits(params, row))[n - 1 : end - 1]


def scored(params, prompt, response, temperature):
    """Teacher-forced log-probs [t] of a response."""
    logits = logits_before(params, prompt, response).astype(np.float64) / temperature
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.take_along_axis(logprobs, response[:, None], axis=-1)[:, 0]


def test_sampling_frequencies_follow_the_tempered_softmax():
    """40,000 draws from 5 tokens; chi-square with 3 degrees of freedom (one token has weight 0).

    False alarm: the bound 25 is exceeded with probability 1.5e-5, and the seed is fixed.
    """
    logits = jnp.array([1.0, -jnp.inf, 0.0, 2.0, -1.0])
    n, temperature = 40000, 1.5
    uniforms = row_uniforms(jax.random.key(0), 0, n, 1)[0]
    tokens, logprobs = sample_tokens(jnp.broadcast_to(logits, (n, 5)), uniforms, temperature)
    p = np.asarray(jax.nn.softmax(logits / temperature))
    counts = np.bincount(tokens, minlength=5)
    assert counts[1] == 0
    seen = [0, 2, 3, 4]
    assert ((counts[seen] - n * p[seen]) ** 2 / (n * p[seen])).sum() < 25
    np.testing.assert_allclose(logprobs, np.log(p[np.asarray(tokens)]), atol=1e-6)


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 23, 64, 509, 1000])
def test_each_token_owns_an_interval_of_its_probability(vocab_size):
    """The inverse of the cumulative sum, at blocks that divide the vocabulary and at others."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=vocab_size).astype(np.float32) * 2
    p = np.exp(logits.astype(np.float64))
    edges = np.concatenate([[0], np.cumsum(p / p.sum())])
    middles = ((edges[1:] + edges[:-1]) / 2).astype(np.float32)
    rows = jnp.broadcast_to(jnp.array(logits), (vocab_size, vocab_size))
    tokens, logprobs = sample_tokens(rows, jnp.array(middles), 1.0)
    # An interval narrower than the float32 rounding of the sums may answer with a neighbour.
    wide = p / p.sum() > 1e-5
    np.testing.assert_array_equal(np.asarray(tokens)[wide], np.arange(vocab_size)[wide])
    np.testing.assert_allclose(np.asarray(logprobs)[wide], np.log(p / p.sum())[wide], atol=2e-6)


def test_the_ends_of_the_unit_interval_never_draw_an_impossible_token():
    logits = jnp.full((2, 37), -jnp.inf).at[:, 20:22].set(0.0)
    tokens, logprobs = sample_tokens(logits, jnp.array([0.0, np.nextafter(1, 0, dtype="f4")]), 1.0)
    np.testing.assert_array_equal(tokens, [20, 21])
    np.testing.assert_allclose(logprobs, np.log([0.5, 0.5]), atol=1e-6)


def test_greedy_is_the_argmax_with_certainty():
    tokens, logprobs = greedy_tokens(jnp.array([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]]))
    np.testing.assert_array_equal(tokens, [1, 0])
    np.testing.assert_array_equal(logprobs, [0, 0])


def test_uniforms_belong_to_row_and_step():
    a = row_uniforms(KEY, 0, 6, 5)
    np.testing.assert_array_equal(row_uniforms(KEY, 2, 3, 4), a[:4, 2:5])
    assert len(np.unique(a)) == 30
    assert np.abs(row_uniforms(jax.random.key(8), 0, 6, 5) - a).min() > 0


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_logprobs_are_those_of_teacher_forcing(params, decoder, temperature):
    out = decode(decoder, params, temperature=temperature)
    for i, prompt in enumerate(PROMPTS):
        for j in range(3):
            n = out.lengths[i, j]
            want = scored(params, prompt, out.tokens[i, j, :n], temperature)
            np.testing.assert_allclose(out.token_logprobs[i, j, :n], want, atol=2e-5)
    assert out.token_logprobs.min() < -1


def test_responses_end_at_the_first_eos_or_at_the_limit(params, decoder):
    out = decode(decoder, params, num_samples=16)
    assert out.tokens.shape == out.token_logprobs.shape == (4, 16, 8)
    assert out.tokens.dtype == out.lengths.dtype == np.int32
    assert out.token_logprobs.dtype == np.float32 and out.has_eos.dtype == bool
    for tokens, n, logprobs, has_eos in zip(
        out.tokens.reshape(64, 8),
        out.lengths.ravel(),
        out.token_logprobs.reshape(64, 8),
        out.has_eos.ravel(),
        strict=True,
    ):
        assert (tokens[: n - 1] > 1).all()
        assert has_eos == (tokens[n - 1] <= 1)
        assert n == 8 or has_eos
        assert (tokens[n:] == 2).all()
        assert (logprobs[n:] == 0).all() and (logprobs[:n] < 0).all()
    assert out.has_eos.any() and not out.has_eos.all()
    last = np.take_along_axis(out.tokens, out.lengths[..., None] - 1, axis=-1)[..., 0]
    assert set(last[out.has_eos].tolist()) == {0, 1}


def test_samples_of_a_prompt_differ_and_keys_matter(params, decoder):
    out = decode(decoder, params, num_samples=16)
    assert len(np.unique(out.tokens[0], axis=0)) > 10
    # The same prompt at another position draws other numbers.
    assert (out.tokens[0] != out.tokens[3]).any()
    again = decode(decoder, params, num_samples=16)
    for a, b in zip(again, out, strict=True):
        np.testing.assert_array_equal(a, b)
    other = decode(decoder, params, num_samples=16, key=jax.random.key(8))
    assert (other.tokens != out.tokens).any()


def test_padding_of_the_prompt_changes_nothing(params, decoder):
    """A longer bucket: the same draws, log-probs to float32 rounding."""
    out = decode(decoder, params)
    longer = decode(make_decoder(prompt_buckets=(11,)), params)
    np.testing.assert_array_equal(longer.tokens, out.tokens)
    np.testing.assert_allclose(longer.token_logprobs, out.token_logprobs, atol=1e-5)


def test_a_row_does_not_depend_on_the_other_rows(params, decoder):
    """Bit-equal at a fixed number of rows, though the others differ and end at other times."""
    out = decode(decoder, params)
    others = [PROMPTS[0], *(np.array([k, k + 1], np.int32) for k in (12, 14, 16))]
    changed = decode(decoder, params, prompts=others)
    assert (changed.lengths[1:] != out.lengths[1:]).any()
    for a, b in zip(changed, out, strict=True):
        np.testing.assert_array_equal(a[0], b[0])


def test_calls_split_into_batches_draw_the_same(params, decoder):
    """4 prompts in calls of 3: the last call holds one prompt and two rows of padding."""
    out = decode(decoder, params)
    split = decode(decoder, params, batch_prompts=3)
    np.testing.assert_array_equal(split.tokens, out.tokens)
    np.testing.assert_array_equal(split.lengths, out.lengths)
    np.testing.assert_array_equal(split.has_eos, out.has_eos)
    np.testing.assert_allclose(split.token_logprobs, out.token_logprobs, atol=1e-5)


def test_temperature_zero_is_greedy(params, decoder):
    out = decode(decoder, params, temperature=0.0)
    np.testing.assert_array_equal(out.tokens[:, 0], out.tokens[:, 1])
    np.testing.assert_array_equal(out.token_logprobs, 0)
    for i, prompt in enumerate(PROMPTS):
        response = out.tokens[i, 0, : out.lengths[i, 0]]
        best = logits_before(params, prompt, response).argmax(-1)
        np.testing.assert_array_equal(response, best)


def test_the_loop_stops_when_every_row_has_ended(params):
    """As many model steps as the longest response has tokens beyond the first, not the limit."""
    calls = []

    class Counted(Decoder):
        def _trace(self, *args, **kwargs):
            step = transformer.decode_step

            def counted(*step_args, **step_kwargs):
                jax.debug.callback(lambda: calls.append(1))
                return step(*step_args, **step_kwargs)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(transformer, "decode_step", counted)
                return super()._trace(*args, **kwargs)

    counting = Counted(
        CONFIG,
        compute_dtype=jnp.float32,
        eos_ids=range(0, CONFIG.vocab_size, 2),
        pad_id=2,
        prompt_buckets=(6,),
    )
    # Two of the four prompts in a call of 16: the 14 rows of padding must not hold it up.
    out = decode(counting, params, PROMPTS[:2], num_samples=1, max_new_tokens=20, batch_prompts=16)
    jax.effects_barrier()
    assert out.has_eos.all()
    assert 0 < len(calls) == out.lengths.max() - 1 < 19


def test_nothing_is_compiled_after_warm_up(params, decoder):
    short = [PROMPTS[1], PROMPTS[0][:2]]
    decode(decoder, params)
    decode(decoder, params, temperature=0.0)
    warm = decoder.compile_count
    decode(decoder, params, prompts=short, batch_prompts=2)
    assert decoder.compile_count == warm + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer, "apply", None)  # would be called by a retrace
        decode(decoder, params, temperature=1.1, key=jax.random.key(3))
        decode(decoder, params, prompts=[PROMPTS[2]] * 4)
        decode(decoder, params, prompts=short[::-1] + short, batch_prompts=2)
        decode(decoder, params, prompts=short[:1], batch_prompts=2)
        decode(decoder, jax.tree.map(lambda x: x * 2, params), temperature=0.0)
    assert decoder.compile_count == warm + 1


def test_bfloat16_decodes_and_scores_itself_roughly(params):
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    decoder = Decoder(
        CONFIG, compute_dtype=jnp.bfloat16, eos_ids=(0,), pad_id=2, prompt_buckets=(6,)
    )
    out = decode(decoder, low)
    for i, prompt in enumerate(PROMPTS):
        n = out.lengths[i, 0]
        want = scored(params, prompt, out.tokens[i, 0, :n], 0.7)
        np.testing.assert_allclose(out.token_logprobs[i, 0, :n], want, atol=0.3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": []}, "number of prompts = 0"),
        ({"num_samples": 0}, "num_samples = 0"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"prompts": [PROMPTS[0], PROMPTS[0][:0]]}, r"empty prompt \(row 1\)"),
        ({"max_new_tokens": 60}, "the model has 64 positions"),
        ({"prompts": [np.zeros(7, np.int32)]}, "does not fit the largest length bucket 6"),
    ],
)
def test_impossible_calls_are_refused(params, decoder, changes, message):
    with pytest.raises(ValueError, match=message):
        decode(decoder, params, **changes)
