# SPDX-License-Identifier: Apache-2.0
"""Conversations that continue over kept caches have the log-probs of scoring."""

import dataclasses

import jax
import numpy as np
import pytest
from fake_models import KINDS, logprobs_of, random_params, tiny_config, tiny_decoder

from tba_jax.decoding.requests import SamplingSettings, StopStrings
from tba_jax.decoding.sampling import fold_in
from tba_jax.devices.site import any_device

PROMPTS = [np.array(p, np.int32) for p in ([3, 4, 5], [6, 2], [7, 8, 9, 10, 11])]
TURNS, TOKENS = 3, 6
ADDED = [(), (3, 3, 7), tuple(range(3, 13))]  # observations after each turn; 0 to 10 tokens
SETTINGS = SamplingSettings(TOKENS, stop_ids=())


def make(family, **changes):
    # The sizes of golden models: test_families decodes with the same programs.
    config = tiny_config(family=family, vocab_size=48, max_positions=128)
    options = {"eos_ids": (), "prompt_tokens": 12, "max_length": 76, **changes}
    return config, random_params(config), tiny_decoder(config, **options)


def talked(session, change=lambda turn: None, settings=SETTINGS):
    """(prompt, response) of three conversations, turn by turn."""
    conversations, found = PROMPTS, []
    for turn in range(TURNS):
        change(turn)
        for i, tokens in enumerate(conversations):
            # Turns end at different steps of a chunk.
            own = dataclasses.replace(settings, max_new_tokens=settings.max_new_tokens + i)
            session.submit(tokens, fold_in(jax.random.key(10 * turn + i), np.arange(1)), own)
        responses = sorted(session.run(), key=lambda y: y.request)
        found += zip(conversations, responses, strict=True)
        conversations = [
            np.concatenate([tokens, y.tokens, ADDED[(turn + i) % 3]]).astype(np.int32)
            for i, (tokens, y) in enumerate(zip(conversations, responses, strict=True))
        ]
    return found


def assert_scored(config, found, params_of):
    """Log-probs are those of one pass over the whole conversation."""
    for prompt, y in found:
        want = logprobs_of(config, params_of(y), prompt, y.tokens, length=76, num_rows=6)
        # Rounding of float32 with another order of sums.
        np.testing.assert_allclose(y.token_logprobs, want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", KINDS)
def test_log_probs_over_kept_caches_are_those_of_scoring(family):
    config, params, decoder = make(family)
    session = decoder.session(params, num_slots=3, keeps_caches=True)
    found = talked(session)
    assert_scored(config, found, lambda y: params)
    counts = session.statistics
    assert counts.prompt_tokens == sum(len(prompt) - 1 for prompt, _ in found)
    # Of a later turn, only the observation is read.
    first = sum(len(tokens) - 1 for tokens in PROMPTS)
    observed = sum(len(ADDED[(turn + i) % 3]) for turn in range(TURNS - 1) for i in range(3))
    assert counts.prompt_tokens - counts.kept_tokens == first + observed


def test_a_cache_of_other_weights_is_not_used():
    config, params, decoder = make("qwen2")
    other = jax.tree.map(lambda x: x * 1.1, params)
    session = decoder.session(params, num_slots=3, keeps_caches=True)
    found = talked(session, lambda turn: session.swap(other, 7) if turn == 1 else None)
    assert_scored(config, found, lambda y: other if y.version_min else params)
    assert session.statistics.kept_tokens > 0  # of the last turn
    assert [y.version_min for _, y in found] == [0] * 3 + [7] * 6


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "qwen3_5_text"])
def test_a_state_after_the_end_of_a_stop_string_is_not_kept(family):
    """The device decodes to the end of the chunk; keys can be cut, a state cannot."""
    stop = StopStrings(("x",), lambda ids: "".join("x" if i % 5 == 4 else "-" for i in ids))
    # The next chunk was launched, and window layers have the fewest columns.
    config, params, decoder = make(family, site=any_device("tpu"), prompt_tokens=2)
    session = decoder.session(params, num_slots=3, keeps_caches=True)
    found = talked(session, settings=dataclasses.replace(SETTINGS, stop_strings=stop))
    assert any(y.has_eos and len(y.tokens) % 4 for _, y in found[:6])
    assert_scored(config, found, lambda y: params)
    assert session.statistics.kept_tokens > 0 or family == "qwen3_5_text"


def test_the_longest_prefix_is_used_and_the_oldest_evicted():
    _, params, decoder = make("qwen2")
    session = decoder.session(params, num_slots=3, keeps_caches=True)

    def kept_of(prompt):
        """Tokens that were found in kept caches; and the conversation after the response."""
        before = session.statistics.kept_tokens
        keys = fold_in(jax.random.key(0), np.arange(1))
        session.submit(prompt, keys, SamplingSettings(2, stop_ids=()))
        (response,) = session.run()
        text = np.concatenate([prompt, response.tokens, [3]]).astype(np.int32)
        return session.statistics.kept_tokens - before, text

    _, first = kept_of(PROMPTS[0])
    none, other = kept_of(PROMPTS[1])
    found, longer = kept_of(first)
    assert none == 0 and found == len(first) - 2  # all but the observation and the newest token
    found, longest = kept_of(longer)
    assert found == len(longer) - 2
    for prompt in (PROMPTS[2], PROMPTS[2][:4]):
        kept_of(prompt)  # the second one needs the row that was written first, that of `other`
    assert kept_of(other)[0] == 0
    session.forget(longest[:-1])
    assert kept_of(longest)[0] == 0


def test_layers_with_windows_have_columns_for_a_window_and_a_piece_of_a_prompt():
    """Two chunks of 4 tokens are more than a prompt of 6."""
    for prompt_tokens, num_more in ((6, 8), (40, 40)):
        config, _, decoder = make("gemma3_text", prompt_tokens=prompt_tokens, max_length=56)
        sizes = {"window": config.window + num_more, "full": 64}
        found = [cache[0].shape[2] for cache in decoder.abstract_cache(3)]
        assert found == [sizes[kind] for kind in config.layer_kinds]
