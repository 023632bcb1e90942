# SPDX-License-Identifier: Apache-2.0
"""Token log-probs: one definition, chunked, equal to the naive form and to the decoder's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_models import TINY_LOGIT, logprob_bound, random_params, tiny_config

from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.devices.site import any_device
from tba_jax.flow.padding import left_pad
from tba_jax.models import transformer
from tba_jax.models.logprobs import packed_token_logprobs, response_mask, token_logprobs
from tba_jax.models.scoring import Scoring
from tba_jax.models.shardings import ComputeSharding

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
        prompt_buckets=(8,),
        max_length=14,
    )
    settings = SamplingSettings(6, temperature=0.7)
    out = decoder.decode(
        params, prompts, num_samples=3, key=jax.random.key(1), settings=settings, num_slots=4
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


@pytest.mark.parametrize(("platform", "rows"), [("cuda", 8192), ("cpu", 2048)])
def test_a_block_of_the_table_is_as_large_as_its_platform_wants(decoded, platform, rows):
    tokens, prompt_lengths, out = decoded
    # Two blocks of 8,192 and a rest.
    config = tiny_config(vocab_size=16_384 + 100, attention="xla")
    run = functools.partial(
        score, config=config, sharding=ComputeSharding(config, any_device(platform))
    )
    params = random_params(config)
    args = params, tokens, prompt_lengths, out.lengths
    found = jax.jit(lambda *x: run(*x)).lower(*args).as_text()
    assert {n for n in (8192, 2048) if f"tensor<1x{n}x" in found} == {rows}
    wanted = score(params, tokens, prompt_lengths, out.lengths, config=config)
    # Sums over the vocabulary in another order.
    np.testing.assert_allclose(run(*args), wanted, atol=2e-5)


def test_an_untied_table_is_the_one_that_is_used(decoded):
    tokens, prompt_lengths, out = decoded
    config = tiny_config(tie_embeddings=False)
    params = random_params(config)

    def total(params):
        logprobs = score(params, tokens, prompt_lengths, out.lengths, config=config)
        return jnp.sum(logprobs), logprobs

    (_, logprobs), grad = jax.value_and_grad(total, has_aux=True)(params)
    n = out.lengths[1, 2]
    expected = naive(params, tokens[1, 2, 6:8], out.tokens[1, 2, :n], 0.7, config)
    np.testing.assert_allclose(logprobs[1, 2, :n], expected, rtol=0, atol=BOUND)
    # Each column of the table's gradient sums to hidden * (1 - sum of p) = 0; values are of order
    # 1 to 10, sums of 23 of them.
    assert np.abs(grad["unembed"]).max() > 1
    np.testing.assert_allclose(grad["unembed"].sum(0), 0, atol=2e-4)


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


def packed(tokens, prompt_lengths, response_lengths, row_length=20):
    """(tokens, segments, positions) of the responses, as many in a row as fit, in order."""
    rows = [[]]
    sequences = {}
    for i in range(2):
        for j in range(3):
            n, m = prompt_lengths[i, j], response_lengths[i, j]
            sequence = tokens[i, j, 8 - n : 8 + m]
            if sum(map(len, rows[-1])) + n + m > row_length:
                rows.append([])
            sequences[i, j] = len(rows) - 1, sum(map(len, rows[-1])), n, m
            rows[-1].append(sequence)
    out = np.zeros((3, len(rows), row_length), np.int32)
    number = 0
    for row, members in enumerate(rows):
        start = 0
        for sequence in members:
            number, end = number + 1, start + len(sequence)
            out[:, row, start:end] = sequence, [number] * len(sequence), range(len(sequence))
            start = end
    return out, sequences


# Rotated positions; a learned table.
@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_packed_rows_have_the_log_probs_and_gradients_of_padded_ones(decoded, family):
    tokens, prompt_lengths, out = decoded
    config = tiny_config(family=family)
    params = random_params(config)
    rows, places = packed(tokens, prompt_lengths, out.lengths)
    assert rows.shape[1] < 6  # something is packed

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def total_packed(params):
        logprobs = packed_token_logprobs(
            params,
            *rows,
            config=config,
            scoring=Scoring(temperature=0.7, chunk_tokens=16, kept_bytes=0),
        )
        picked = jnp.stack(
            [
                jnp.pad(logprobs[row, start + n : start + n + m], (0, 6 - m))
                for row, start, n, m in places.values()
            ]
        ).reshape(2, 3, 6)
        return jnp.sum(picked**2), picked

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def total(params):
        logprobs = score(params, tokens, prompt_lengths, out.lengths, config=config)
        return jnp.sum(logprobs**2), logprobs

    (_, expected), expected_grad = total(params)
    (_, got), grad = total_packed(params)
    np.testing.assert_allclose(got, expected, rtol=0, atol=BOUND)
    jax.tree.map(
        # gradients of a sum over 36 tokens, of order 1 to 100
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        grad,
        expected_grad,
    )


def test_mask_eos_leaves_only_the_stop_decision_out():
    tokens = jnp.array([[[5, EOS, 0], [5, 6, 7]]])
    lengths = jnp.array([[2, 3]])
    keep = response_mask(tokens, lengths, Scoring(eos_ids=(EOS,)))
    drop = response_mask(tokens, lengths, Scoring(eos_ids=(EOS,), mask_eos=True))
    assert keep.tolist() == [[[True, True, False], [True, True, True]]]
    assert drop.tolist() == [[[True, False, False], [True, True, True]]]


def test_a_least_length_renormalises_as_the_decoder_does(params):
    """EOS has half of the probability, so that a mismatch could not hide."""
    biased = {**params, "embed": params["embed"].at[EOS].mul(4.0)}
    decoder = Decoder(
        CONFIG,
        compute_dtype=jnp.float32,
        eos_ids=(EOS, 5),
        pad_id=0,
        prompt_buckets=(8,),
        max_length=14,
    )
    prompt = np.array([1, 6, 7, 9], np.int32)
    out = decoder.decode(
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
