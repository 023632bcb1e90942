# SPDX-License-Identifier: Apache-2.0
"""Stop strings: where a text ends a response, by itself and in the engine."""

import re

import fake_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_models import ONE_LAYER, TINY_LOGIT, logprob_bound, random_params, tiny_decoder

from tba_jax.config.rules import validate
from tba_jax.config.schema import make_config
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.decoding.stop_strings import StopStrings
from tba_jax.models import model as models
from tba_jax.run.model_parts import START_MODEL, make_decoder
from tba_jax.settings import ConfigError

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


def test_the_config_ends_responses_by_text_and_by_id_in_search_and_evaluation():
    model = models.describe(str(START_MODEL))
    params, tokenizer = model.load_params(param_dtype=jnp.float32), model.load_tokenizer()
    prompt = tokenizer.encode("7+5-3", add_bos=True)

    def texts(**fields):
        small = {"task.max_prompt_tokens": 12, "search.max_new_tokens": 16}
        decoder = make_decoder(make_config({**small, **fields}), model.config, tokenizer)
        out = fake_models.decode(
            decoder,
            params,
            [prompt],
            num_samples=32,
            key=jax.random.key(1),
            settings=SamplingSettings(16),  # as searchers and evaluations: no ids of their own
        )
        rows = [row[:n] for row, n in zip(out.tokens[0], out.lengths[0], strict=True)]
        return [tokenizer.decode(row, skip_special=False) for row in rows], out.has_eos[0]

    free, _ = texts()
    end = tokenizer.decode(tokenizer.eos_ids[:1], skip_special=False)
    # A special token has its text as well.
    by_text, has_eos = texts(**{"search.stop_strings": ("=2", ",1", end)})
    cut = [re.match(f".*?(=2|,1|{re.escape(end)})|.*", text)[0] for text in free]
    assert end and by_text == cut
    assert sum(a != b for a, b in zip(cut, free, strict=True)) >= 5
    assert all(ended for ended, text in zip(has_eos, cut, strict=True) if text[-2:] in ("=2", ",1"))
    (equals,) = tokenizer.encode("=", add_bos=False).tolist()
    by_id, _ = texts(**{"search.stop_ids": (equals,)})
    assert by_id == [text.partition("=")[0] + "=" * ("=" in text) for text in free] != free


def test_what_cannot_stop_is_refused():
    for fields, message in (
        ({"search.stop_strings": ("a", "")}, "an empty text would end every response"),
        (
            {"search.stop_strings": ("a",), "search.min_new_tokens": 2},
            "a stop string may appear before search.min_new_tokens = 2",
        ),
        ({"search.stop_ids": (3, -1)}, "token ids are not negative"),
    ):
        with pytest.raises(ConfigError, match=message):
            validate(make_config(fields))
