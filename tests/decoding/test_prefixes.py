# SPDX-License-Identifier: Apache-2.0
"""Conversations that continue over kept caches: the same tokens and log-probs as without."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_models import random_params, tiny_config

from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.keys import row_keys
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.decoding.stop_strings import StopStrings

PROMPTS = [np.array(p, np.int32) for p in ([3, 4, 5], [6, 2], [7, 8, 9, 10, 11])]
TURNS, TOKENS = 3, 6
ADDED = [(), (3, 3, 7), tuple(range(3, 13))]  # observations after each turn; 0 to 10 tokens


def make_decoder(config, **changes):
    arguments = {"prompt_tokens": 6, "max_length": 56, "chunk_steps": 4, **changes}
    return Decoder(config, compute_dtype=jnp.float32, eos_ids=(0,), pad_id=2, **arguments)


def talked(decoder, params, keeps, *, change=lambda session, turn: None, settings=None):
    """Responses of three conversations, turn by turn, and the session."""
    session = decoder.session(params, num_slots=3, keeps_caches=keeps)
    settings = settings or SamplingSettings(TOKENS, stop_ids=())
    conversations, found = PROMPTS, []
    for turn in range(TURNS):
        change(session, turn)
        for i, tokens in enumerate(conversations):
            # Turns end at different steps of a chunk.
            own = dataclasses.replace(settings, max_new_tokens=settings.max_new_tokens + i)
            session.submit(tokens, row_keys(jax.random.key(10 * turn + i), 1), own)
        responses = sorted(session.run(), key=lambda y: y.request)
        conversations = [
            np.concatenate([tokens, y.tokens, ADDED[(turn + i) % 3]]).astype(np.int32)
            for i, (tokens, y) in enumerate(zip(conversations, responses, strict=True))
        ]
        found += responses
    return found, session


def assert_alike(found, wanted, atol=2e-5):
    """Rounding of float32 with another order of sums, as in test_decoding."""
    for y, z in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(y.tokens, z.tokens)
        np.testing.assert_allclose(y.token_logprobs, z.token_logprobs, atol=atol)


@pytest.mark.parametrize("family", ["qwen2", "gpt_oss", "gemma2", "qwen3_5_text"])
def test_tokens_and_log_probs_are_those_without_kept_caches(family):
    config = tiny_config(family=family)
    params, decoder = random_params(config), make_decoder(config)
    plain, without = talked(decoder, params, False)
    found, session = talked(decoder, params, True)
    assert_alike(found, plain)
    counts = session.statistics
    assert without.statistics.kept_tokens == 0
    assert counts.prompt_tokens == without.statistics.prompt_tokens
    # Of a later turn, only the observation is read.
    first = sum(len(tokens) - 1 for tokens in PROMPTS)
    observed = sum(len(ADDED[(turn + i) % 3]) for turn in range(TURNS - 1) for i in range(3))
    assert counts.prompt_tokens - counts.kept_tokens == first + observed


def test_a_cache_of_other_weights_is_not_used():
    config = tiny_config()
    params, decoder = random_params(config), make_decoder(config)
    other = jax.tree.map(lambda x: x * 1.1, params)

    def swap(session, turn):
        if turn == 1:
            session.swap(other, 7)

    plain, _ = talked(decoder, params, False, change=swap)
    found, session = talked(decoder, params, True, change=swap)
    assert_alike(found, plain)
    assert session.statistics.kept_tokens > 0  # of the last turn
    assert [y.version_min for y in found] == [0] * 3 + [7] * 6


def test_a_state_after_the_end_of_a_stop_string_is_not_kept():
    """The device decodes to the end of the chunk; keys can be cut, a state cannot."""
    stop = StopStrings(("x",), lambda ids: "".join("x" if i % 5 == 4 else "-" for i in ids))
    settings = SamplingSettings(TOKENS, stop_ids=(), stop_strings=stop)
    for family in ("qwen3_5_text", "llama"):
        config = tiny_config(family=family)
        params, decoder = random_params(config), make_decoder(config)
        plain, _ = talked(decoder, params, False, settings=settings)
        found, session = talked(decoder, params, True, settings=settings)
        assert any(y.has_eos and len(y.tokens) % 4 for y in found[:6])
        assert_alike(found, plain)
        assert session.statistics.kept_tokens > 0 or family == "qwen3_5_text"


def test_the_longest_prefix_is_used_and_the_oldest_evicted():
    config = tiny_config()
    session = make_decoder(config).session(random_params(config), num_slots=2, keeps_caches=True)

    def kept_of(prompt):
        """Tokens that were found in kept caches; and the conversation after the response."""
        before = session.statistics.kept_tokens
        session.submit(prompt, row_keys(jax.random.key(0), 1), SamplingSettings(2, stop_ids=()))
        (response,) = session.run()
        text = np.concatenate([prompt, response.tokens, [3]]).astype(np.int32)
        return session.statistics.kept_tokens - before, text

    _, first = kept_of(PROMPTS[0])
    none, other = kept_of(PROMPTS[1])
    found, longer = kept_of(first)
    assert none == 0 and found == len(first) - 2  # all but the observation and the newest token
    found, longest = kept_of(longer)
    assert found == len(longer) - 2
    kept_of(PROMPTS[2])  # needs the row that was written first, that of `other`
    assert kept_of(other)[0] == 0
    session.forget(longest[:-1])
    assert kept_of(longest)[0] == 0
