# SPDX-License-Identifier: Apache-2.0
"""Token log-probs: one definition, chunked, equal to the naive form and to the decoder's."""

import fake_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_models import TINY_LOGIT, logprob_bound, random_params, tiny_config, token_logprobs

from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.flow.padding import left_pad
from tba_jax.models import transformer
from tba_jax.models.scoring import Scoring

CONFIG = tiny_config()
EOS = 2
# At the temperature of these tests.
BOUND = logprob_bound(CONFIG, 14, TINY_LOGIT / 0.7)


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG)


@pytest.fixture(scope="module")
def decoded(params):
    """Two prompts of different lengths, three responses each, from the real decoder."""
    prompts = [np.array([1, 5, 6, 7], np.int32), np.array([1, 9], np.int32)]
    decoder = Decoder(
        CONFIG,
        compute_dtype=jnp.float32,
        eos_ids=(EOS,),
        pad_id=0,
        prompt_tokens=8,
        max_length=14,
    )
    settings = SamplingSettings(6, temperature=0.7)
    out = fake_models.decode(
        decoder,
        params,
        prompts,
        num_samples=3,
        key=jax.random.key(1),
        settings=settings,
        num_slots=4,
    )
    tokens = np.concatenate(
        [np.repeat(left_pad(prompts, 8, 0)[:, None], 3, axis=1), out.tokens], axis=-1
    )
    prompt_lengths = np.array([[4] * 3, [2] * 3], np.int32)
    return tokens, prompt_lengths, out


def score(
    params,
    tokens,
    prompt_lengths,
    response_lengths,
    *,
    t=6,
    config=CONFIG,
    remat="none",
    sharding=None,
    **scoring,
):
    return token_logprobs(
        params,
        jnp.asarray(tokens),
        jnp.asarray(prompt_lengths),
        jnp.asarray(response_lengths),
        response_bucket=t,
        config=config,
        scoring=Scoring(**{"temperature": 0.7, "kept_bytes": 0, **scoring}),
        remat=remat,
        sharding=sharding,
    )


def naive(params, prompt, response, temperature, config=CONFIG):
    """No padding, no chunks: softmax of the whole sequence's logits, in float64."""
    row = jnp.asarray(np.concatenate([prompt, response]))[None]
    positions = jnp.arange(row.shape[1])[None]
    hidden = transformer.apply(
        params, row, positions, jnp.ones_like(row, bool), config=config, compute_dtype=jnp.float32
    )
    logits = np.asarray(
        transformer.unembed(params, hidden, config=config, compute_dtype=jnp.float32), np.float64
    )[0]
    logits = logits / temperature
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return logprobs[len(prompt) - 1 + np.arange(len(response)), response]


def test_decoder_scoring_and_naive_log_probs_agree_per_token(params, decoded):
    tokens, prompt_lengths, out = decoded
    scored = score(params, tokens, prompt_lengths, out.lengths)
    np.testing.assert_allclose(scored, out.token_logprobs, rtol=0, atol=BOUND)
    for i in range(2):
        for j in range(3):
            n = out.lengths[i, j]
            prompt = tokens[i, j, 8 - prompt_lengths[i, j] : 8]
            expected = naive(params, prompt, out.tokens[i, j, :n], 0.7)
            np.testing.assert_allclose(scored[i, j, :n], expected, rtol=0, atol=BOUND)
            assert np.all(np.asarray(scored)[i, j, n:] == 0.0)


def test_rows_of_the_vocabulary_beyond_the_tokenizer_are_neither_sampled_nor_scored(params):
    """At temperature 3 a fifth of the draws would fall on rows that are no tokens."""
    config = tiny_config(num_tokens=CONFIG.vocab_size - CONFIG.vocab_size // 5)
    decoder = Decoder(
        config,
        compute_dtype=jnp.float32,
        eos_ids=(EOS,),
        pad_id=0,
        prompt_tokens=8,
        max_length=14,
    )
    prompt = np.array([1, 5, 6, 7], np.int32)
    out = fake_models.decode(
        decoder,
        params,
        [prompt],
        num_samples=64,
        key=jax.random.key(1),
        settings=SamplingSettings(6, temperature=3.0),
        num_slots=64,
    )
    assert out.tokens.max() == config.num_tokens - 1
    tokens = np.concatenate(
        [np.broadcast_to(left_pad([prompt], 8, 0)[:, None], (1, 64, 8)), out.tokens], axis=-1
    )
    lengths = np.full((1, 64), len(prompt), np.int32)
    scored = score(params, tokens, lengths, out.lengths, config=config, temperature=3.0)
    np.testing.assert_allclose(scored, out.token_logprobs, rtol=0, atol=BOUND)
    whole = score(params, tokens, lengths, out.lengths, temperature=3.0)
    assert np.all(np.asarray(scored - whole)[np.asarray(scored) != 0] > 0.1)


def test_padding_content_and_bucket_change_nothing(params, decoded):
    tokens, prompt_lengths, out = decoded
    plain = np.asarray(score(params, tokens, prompt_lengths, out.lengths))
    dirty = np.array(tokens)
    index = np.arange(tokens.shape[-1])
    padding = (index < 8 - prompt_lengths[..., None]) | (index >= 8 + out.lengths[..., None])
    dirty[padding] = 11
    np.testing.assert_array_equal(score(params, dirty, prompt_lengths, out.lengths), plain)
    wider = np.pad(tokens, ((0, 0), (0, 0), (4, 3)))
    np.testing.assert_allclose(
        np.asarray(score(params, wider, prompt_lengths, out.lengths, t=9))[..., :6],
        plain,
        rtol=0,
        atol=BOUND,
    )


def test_a_least_length_renormalises_as_the_decoder_does(params):
    """EOS has half of the probability, so that a mismatch could not hide."""
    biased = {**params, "embed": params["embed"].at[EOS].mul(4.0)}
    decoder = Decoder(
        CONFIG,
        compute_dtype=jnp.float32,
        eos_ids=(EOS, 5),
        pad_id=0,
        prompt_tokens=8,
        max_length=14,
    )
    prompt = np.array([1, 6, 7, 9], np.int32)
    out = fake_models.decode(
        decoder,
        biased,
        [prompt],
        num_samples=32,
        key=jax.random.key(3),
        settings=SamplingSettings(6, min_new_tokens=3),
    )
    assert out.lengths.min() == 4 and out.lengths.max() <= 6
    tokens = np.concatenate([np.repeat(left_pad([prompt], 8, 0), 32, axis=0), out.tokens[0]], -1)
    lengths = np.full((1, 32), 4, np.int32)
    arguments = (biased, tokens[None], lengths, out.lengths)
    got = score(*arguments, temperature=1.0, min_new_tokens=3, eos_ids=(EOS, 5))
    # The largest logit is that of EOS.
    bound = logprob_bound(CONFIG, 14, 4 * TINY_LOGIT)
    np.testing.assert_allclose(got, out.token_logprobs, rtol=0, atol=bound)
    plain = score(*arguments, temperature=1.0)
    assert np.abs(np.asarray(plain)[:, :, :3] - out.token_logprobs[:, :, :3]).max() > 0.05
    np.testing.assert_array_equal(np.asarray(got)[:, :, 3:], np.asarray(plain)[:, :, 3:])
