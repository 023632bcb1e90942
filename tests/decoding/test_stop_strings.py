# SPDX-License-Identifier: Apache-2.0
"""Stop strings: where a text ends a response, by itself and in the engine."""

import fake_models
import jax
import numpy as np
import pytest
from fake_models import ONE_LAYER, TINY_LOGIT, logprob_bound, random_params, tiny_decoder

from tba_jax.config.schema import make_config
from tba_jax.decoding.requests import SamplingSettings, StopStrings
from tba_jax.models import model as models
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.run.model_parts import START_MODEL, make_decoder

PROMPTS = [np.array(p, np.int32) for p in ([3, 4, 5], [6], [7, 8, 9])]


def text_of_bytes(ids):
    """Byte tokens, as those of a byte-level tokenizer: unfinished characters are U+FFFD."""
    return bytes(int(i) for i in ids).decode("utf-8", errors="replace")


def first_end(tokens, strings, text_of):
    """The definition: the first token after which the whole text holds one of the strings."""
    ends = range(1, len(tokens) + 1)
    return next((n for n in ends if any(s in text_of(tokens[:n]) for s in strings)), 0)


@pytest.mark.parametrize("strings", [("ab",), ("\n\n", "a-b-c"), ("é", "€b"), ("€€€€€", "c")])
def test_the_end_is_that_of_reading_the_text_after_every_token(strings):
    rng, found = np.random.default_rng(0), 0
    pieces = [*"ab-\n", "\n\n", "ab", "a-b", "é", "€", "€€"]
    for chunk in [1, 7, 40] * 40:
        text = "x" * int(rng.integers(0, 120)) + "".join(rng.choice(pieces, 30))
        tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        stops, got, read = StopStrings(strings, text_of_bytes), 0, 0
        while not got and read < len(tokens):
            got = stops.end(tokens[: read + chunk], read)
            read += chunk
        assert got == first_end(tokens, strings, text_of_bytes)
        found += got > 0
    assert found >= 10  # and not all of them at once
    assert stops.end(np.frombuffer(b"no stop", np.uint8), 0) == 0


def words(ids):
    return "".join(f"<{i}>" for i in ids)


def test_a_response_ends_with_the_token_that_completes_a_stop_string():
    """The responses of a session without stop strings, cut; and what comes next is not touched."""
    params, decoder = random_params(ONE_LAYER), tiny_decoder()

    def decode(strings):
        stop = StopStrings(strings, words) if strings else None
        return fake_models.decode(
            decoder,
            params,
            PROMPTS,
            num_samples=8,
            key=jax.random.key(7),
            settings=SamplingSettings(20, temperature=2.0, stop_strings=stop),
            num_slots=5,
        )

    strings = ("<7>", "><12><", "9><1")
    free, stopped = decode(()), decode(strings)
    num_cut, bound = 0, logprob_bound(ONE_LAYER, 26, TINY_LOGIT / 2.0)
    for i, j in np.ndindex(free.lengths.shape):
        n, got = free.lengths[i, j], stopped.lengths[i, j]
        end = first_end(free.tokens[i, j, :n], strings, words)
        assert got == (end or n)
        assert stopped.has_eos[i, j] == (end > 0 or free.has_eos[i, j])
        np.testing.assert_array_equal(stopped.tokens[i, j, :got], free.tokens[i, j, :got])
        wanted = free.token_logprobs[i, j, :got]
        np.testing.assert_allclose(stopped.token_logprobs[i, j, :got], wanted, rtol=0, atol=bound)
        num_cut += got < n
    assert num_cut >= 5


def test_the_config_ends_responses_by_text_and_by_id():
    model, tokenizer = models.describe(str(START_MODEL)), Tokenizer.load(str(START_MODEL))
    fields = {"search.stop_strings": ("=2", ",1"), "search.stop_ids": (5,)}
    decoder = make_decoder(make_config(fields), model.config, tokenizer)
    texts = [tokenizer.encode(text, add_bos=False) for text in ("7=2,1", "7=1")]
    assert [decoder.stop_strings.end(ids, 0) for ids in texts] == [3, 0]
    assert set(decoder.eos_ids) == {5, *tokenizer.eos_ids}
