# SPDX-License-Identifier: Apache-2.0
"""Token log-probs: one definition, equal to the naive form in float64 and to the decoder's."""

import fake_models
import jax
import jax.numpy as jnp
import numpy as np
from fake_models import (
    ONE_LAYER,
    TINY_LOGIT,
    logprob_bound,
    logprobs_of,
    random_params,
    tiny_config,
    tiny_decoder,
)

from tba_jax.decoding.requests import SamplingSettings
from tba_jax.flow.padding import left_pad
from tba_jax.models.logprobs import Scoring

CONFIG = tiny_config()
EOS = 0
# At the temperature of these tests.
BOUND = logprob_bound(CONFIG, 14, TINY_LOGIT / 0.7)
PROMPTS = [np.array([1, 5, 6, 7], np.int32), np.array([1, 9], np.int32)]


def score(params, tokens, prompt_lengths, lengths, *, t=6, config=CONFIG, **scoring):
    scoring = Scoring(**{"temperature": 0.7, "kept_bytes": 0, **scoring})
    arrays = map(jnp.asarray, (tokens, prompt_lengths, lengths))
    kwargs = {"response_bucket": t, "config": config, "scoring": scoring}
    return np.asarray(fake_models.score(params, *arrays, **kwargs))


def test_scores_are_the_log_softmax_whatever_the_padding_and_the_bucket():
    """Two prompts, three responses each, of 0 to 6 tokens."""
    params, rng = random_params(CONFIG), np.random.default_rng(0)
    responses = rng.integers(0, CONFIG.vocab_size, (2, 3, 6)).astype(np.int32)
    lengths = np.array([[6, 3, 1], [5, 0, 6]], np.int32)
    prompts = np.repeat(left_pad(PROMPTS, 8, 0)[:, None], 3, axis=1)
    tokens = np.concatenate([prompts, responses], axis=-1)
    prompt_lengths = np.array([[4] * 3, [2] * 3], np.int32)
    plain = score(params, tokens, prompt_lengths, lengths)
    for i, j in np.ndindex(lengths.shape):
        n = lengths[i, j]
        want = logprobs_of(CONFIG, params, PROMPTS[i], responses[i, j, :n], 0.7)
        np.testing.assert_allclose(plain[i, j, :n], want, rtol=0, atol=BOUND)
        assert (plain[i, j, n:] == 0).all()
    dirty, index = tokens.copy(), np.arange(tokens.shape[-1])
    dirty[(index < 8 - prompt_lengths[..., None]) | (index >= 8 + lengths[..., None])] = 11
    np.testing.assert_array_equal(score(params, dirty, prompt_lengths, lengths), plain)
    wider = np.pad(tokens, ((0, 0), (0, 0), (4, 3)))
    got = score(params, wider, prompt_lengths, lengths, t=9)[..., :6]
    np.testing.assert_allclose(got, plain, rtol=0, atol=BOUND)


def drawn(config, params, settings):
    """64 responses to one prompt: (arguments of `score` but for parameters, the decoder's)."""
    out = fake_models.decode(
        tiny_decoder(config),
        params,
        PROMPTS[:1],
        num_samples=64,
        key=jax.random.key(1),
        settings=settings,
        num_slots=5,
    )
    prompts = np.broadcast_to(left_pad(PROMPTS[:1], 8, 0)[:, None], (1, 64, 8))
    tokens = np.concatenate([prompts, out.tokens], axis=-1)
    return (tokens, np.full((1, 64), len(PROMPTS[0])), out.lengths), out


def test_rows_of_the_vocabulary_beyond_the_tokenizer_are_neither_sampled_nor_scored():
    """At temperature 3 a fifth of the draws would fall on rows that are no tokens."""
    size = ONE_LAYER.vocab_size
    config = tiny_config(num_layers=1, tie_embeddings=False, num_tokens=size - size // 5)
    params = random_params(config)
    given, out = drawn(config, params, SamplingSettings(6, temperature=3.0))
    assert out.tokens.max() == config.num_tokens - 1
    scored = score(params, *given, config=config, temperature=3.0)
    np.testing.assert_allclose(scored, out.token_logprobs, rtol=0, atol=BOUND)
    whole = score(params, *given, config=ONE_LAYER, temperature=3.0)
    assert np.all((scored - whole)[scored != 0] > 0.1)


def test_a_least_length_renormalises_as_the_decoder_does():
    """EOS has half of the probability, so that a mismatch could not hide."""
    params = random_params(ONE_LAYER)
    params = {**params, "unembed": params["unembed"].at[EOS].mul(4.0)}
    given, out = drawn(ONE_LAYER, params, SamplingSettings(6, min_new_tokens=3))
    assert out.lengths.min() == 4 and out.lengths.max() <= 6
    kwargs = {"config": ONE_LAYER, "temperature": 1.0}
    got = score(params, *given, min_new_tokens=3, eos_ids=(EOS, 1), **kwargs)
    # The largest logit is that of EOS.
    bound = logprob_bound(ONE_LAYER, 14, 4 * TINY_LOGIT)
    np.testing.assert_allclose(got, out.token_logprobs, rtol=0, atol=bound)
    plain = score(params, *given, **kwargs)
    assert np.abs(plain[:, :, :3] - out.token_logprobs[:, :, :3]).max() > 0.05
    np.testing.assert_array_equal(got[:, :, 3:], plain[:, :, 3:])
