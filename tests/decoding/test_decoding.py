# SPDX-License-Identifier: Apache-2.0
"""The engine against plain teacher-forced scoring, and its promises about slots and programs."""

import fake_models
import jax
import numpy as np
import pytest
from fake_models import (
    ONE_LAYER,
    TINY_LOGIT,
    logprob_bound,
    logprobs_of,
    random_params,
    teacher_forced,
    tiny_decoder,
)

from tba_jax.decoding.requests import SamplingSettings
from tba_jax.decoding.sampling import fold_in
from tba_jax.devices.site import any_device
from tba_jax.models import transformer

CONFIG = ONE_LAYER
PROMPTS = [np.array(p, np.int32) for p in ([3, 4, 5], [6], [7, 8, 9, 10, 11], [3, 4, 5])]
KEY = jax.random.key(7)
SETTINGS = SamplingSettings(8, temperature=0.7)


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG)


@pytest.fixture
def decoder():
    return tiny_decoder()


def decode(decoder, params, prompts=PROMPTS, **changes):
    """12 responses in 5 slots: most of them are admitted to a slot that another one left."""
    arguments = {"num_samples": 3, "settings": SETTINGS, "key": KEY, "num_slots": 5}
    return fake_models.decode(decoder, params, prompts, **(arguments | changes))


def bound(temperature):
    return logprob_bound(CONFIG, 26, TINY_LOGIT / temperature)


@pytest.mark.parametrize(
    ("of_decoder", "num_slots"),
    [({"chunk_steps": 1}, 5), ({"prompt_tokens": 2}, 5), ({}, 1)],
)
def test_chunks_padding_and_slots_change_no_draw(params, decoder, of_decoder, num_slots):
    """The same draws, log-probs to float32 rounding; no draw lies that near to its edge."""
    out = decode(decoder, params)
    other = decode(tiny_decoder(**of_decoder), params, num_slots=num_slots)
    np.testing.assert_array_equal(other.tokens, out.tokens)
    np.testing.assert_allclose(other.token_logprobs, out.token_logprobs, rtol=0, atol=bound(0.7))


def test_responses_end_at_the_first_eos_or_at_the_limit(params, decoder):
    out = decode(decoder, params, num_samples=16)
    assert out.tokens.shape == out.token_logprobs.shape == (4, 16, 8)
    for at in np.ndindex(out.lengths.shape):
        n, has_eos = out.lengths[at], out.has_eos[at]
        tokens, logprobs = out.tokens[at], out.token_logprobs[at]
        assert (tokens[: n - 1] > 1).all() and has_eos == (tokens[n - 1] <= 1)
        assert n == 8 or has_eos
        assert (tokens[n:] == 2).all()
        assert (logprobs[n:] == 0).all() and (logprobs[:n] < 0).all()
    assert out.has_eos.any() and not out.has_eos.all()
    last = np.take_along_axis(out.tokens, out.lengths[..., None] - 1, axis=-1)[..., 0]
    assert set(last[out.has_eos].tolist()) == {0, 1}
    # Samples of a prompt differ, and the same prompt at another position draws other numbers.
    assert len(np.unique(out.tokens[0], axis=0)) > 10
    assert (out.tokens[0] != out.tokens[3]).any()


def test_every_row_has_its_own_settings(params, decoder):
    """One session: greedy, top_k = 1 and a tiny top_p (greedy too), short, longer than its stop
    token allows, and with a stop token of its own."""
    rows = [
        SamplingSettings(8, temperature=0.0),
        SamplingSettings(8, temperature=0.7, top_k=1),
        SamplingSettings(2, temperature=0.7),
        SamplingSettings(8, temperature=0.7, min_new_tokens=7),
        SamplingSettings(8, temperature=0.0, stop_ids=()),
        SamplingSettings(8, temperature=2.0, top_p=1e-6),
    ]
    session = decoder.session(params, num_slots=5)
    keys = fold_in(KEY, np.arange(8 * len(rows))).reshape(len(rows), 8, 2)
    for settings, own in zip(rows, keys, strict=True):
        session.submit(PROMPTS[0], own, settings)
    out = [[] for _ in rows]
    for response in session.run():
        out[response.request].append(response)
    greedy, top_1, short, least, unstopped, top_p = out
    for response in [*greedy, *top_1, *top_p]:
        np.testing.assert_array_equal(response.tokens, greedy[0].tokens)
        np.testing.assert_array_equal(response.token_logprobs, 0)
    best = teacher_forced(CONFIG, params, PROMPTS[0], greedy[0].tokens).argmax(-1)
    np.testing.assert_array_equal(greedy[0].tokens, best)
    assert {len(r.tokens) for r in short} <= {1, 2}
    assert {len(r.tokens) for r in least} <= {7, 8} and all((r.tokens[:6] > 1).all() for r in least)
    assert all(len(r.tokens) == 8 and not r.has_eos for r in unstopped)


def test_a_long_response_delays_no_other_response(params, decoder):
    """One response of 20 tokens and 5 of 4, in two slots: they pass through the other slot."""
    session = decoder.session(params, num_slots=2)
    keys = fold_in(KEY, np.arange(6))
    session.submit(PROMPTS[0], keys[:1], SamplingSettings(20, stop_ids=()))
    session.submit(PROMPTS[1], keys[1:], SamplingSettings(4, stop_ids=()))
    order = [(r.request, len(r.tokens)) for r in session.run()]
    # Results stream out as they finish; both slots are used until the end: 20 steps for 40 tokens.
    assert order[:4] == [(1, 4)] * 4 and set(order[4:]) == {(0, 20), (1, 4)}
    assert session.statistics.tokens == 40 and session.statistics.steps == 20
    assert session.statistics.slot_steps == 40 and session.is_idle


def test_nothing_is_compiled_after_warm_up(params):
    decoder = tiny_decoder()
    greedy = SamplingSettings(8, temperature=0.0)
    decode(decoder, params)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer, "run_layer", None)  # would be called by a retrace
        decode(decoder, params, settings=SamplingSettings(5, temperature=1.1, min_new_tokens=2))
        decode(decoder, params, settings=SamplingSettings(5, top_p=0.5, stop_ids=(3, 4, 5)))
        decode(decoder, params, prompts=PROMPTS[::-1] * 10, key=jax.random.key(3))
        doubled = jax.tree.map(lambda x: x * 2, params)
        decode(decoder, doubled, settings=greedy)


def test_weights_are_swapped_between_chunks(params, decoder):
    """The response goes on with the new weights over its old cache; both versions are on record."""
    other = jax.tree.map(lambda x: x * 1.5, params)
    settings = SamplingSettings(16, stop_ids=())
    kwargs = {"num_samples": 1, "key": KEY, "settings": settings, "num_slots": 2}
    plain = fake_models.decode(decoder, params, PROMPTS, **kwargs)
    swapped = fake_models.decode(decoder, other, PROMPTS, **kwargs)
    session = decoder.session(params, num_slots=2, version=3)
    for prompt, keys in zip(PROMPTS, fold_in(KEY, np.arange(len(PROMPTS)))[:, None], strict=True):
        session.submit(prompt, keys, settings)
    responses = [*session.step(), *session.step()]
    session.swap(other, 7)
    responses = sorted([*responses, *session.run()], key=lambda r: r.request)
    # Chunks of 4: two with version 3, then version 7; the other prompts begin after the swap.
    assert [r.version_min for r in responses] == [3, 3, 7, 7]
    assert [r.version_max for r in responses] == [7, 7, 7, 7]
    changed, new = [3] * 8 + [7] * 8, [7] * 16
    assert [r.token_versions.tolist() for r in responses] == [changed, changed, new, new]
    tokens = np.array([r.tokens for r in responses])[:, None]
    np.testing.assert_array_equal(tokens[:2, :, :8], plain.tokens[:2, :, :8])
    assert (tokens[:2, :, 8:] != plain.tokens[:2, :, 8:]).any()
    np.testing.assert_array_equal(tokens[2:], swapped.tokens[2:])


class Noted:
    """Result of a chunk that notes when it is read."""

    def __init__(self, value, events):
        self.value, self.events = value, events

    def copy_to_host_async(self):
        pass

    def __array__(self, dtype=None, copy=None):
        self.events.append("read")
        return np.asarray(self.value)


@pytest.mark.parametrize(
    ("platform", "num_prompts", "order"),
    [("tpu", 1, "LLRLR"), ("tpu", 2, "LRLRLLRLR"), ("cpu", 1, "LRLR"), ("any", 2, "LRLRLRLR")],
)
def test_an_accelerator_gets_the_next_chunk_before_the_last_is_read_unless_requests_wait(
    params, monkeypatch, platform, num_prompts, order
):
    """Two chunks a response, in one slot; on an accelerator the last launch finds no response."""
    decoder, events = tiny_decoder(site=any_device(platform)), []
    run_chunk = decoder.run_chunk

    def noted(*args):
        events.append("launch")
        (tokens, *rest), *state = run_chunk(*args)
        return ((Noted(tokens, events), *rest), *state)

    monkeypatch.setattr(decoder, "run_chunk", noted)
    session = decoder.session(params, num_slots=1)
    for keys in fold_in(KEY, np.arange(num_prompts))[:, None]:
        session.submit(PROMPTS[0], keys, SamplingSettings(8, stop_ids=()))
    assert len(list(session.run())) == num_prompts
    short = "".join(event[0].upper() for event in events)
    assert short == order


def test_a_cancelled_request_leaves_nothing_in_its_slot(params):
    """A chunk of the cancelled response is in flight when another response gets the slot."""
    decoder = tiny_decoder(site=any_device("tpu"))
    keys, settings = fold_in(KEY, np.arange(2))[:, None], SamplingSettings(16, stop_ids=())
    (wanted,) = decoder.decode(params, PROMPTS[1:2], num_samples=1, key=keys[1:], settings=settings)
    session = decoder.session(params, num_slots=1)
    first = session.submit(PROMPTS[0], keys[0], settings)
    assert session.step() == session.step() == []
    assert [len(tokens) for tokens, _ in session.unfinished(first).values()] == [4]
    session.cancel(first)
    assert session.is_idle
    session.submit(PROMPTS[1], keys[1], settings)
    (found,) = session.run()
    assert found.request == 1
    np.testing.assert_array_equal(found.tokens, wanted[0].tokens)
    np.testing.assert_array_equal(found.token_logprobs, wanted[0].token_logprobs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_samples": 0}, "num_slots = 0; wanted at least 1"),
        ({"prompts": [PROMPTS[0], PROMPTS[0][:0]]}, "in row 1, an empty prompt"),
        ({"settings": SamplingSettings(24)}, "in row 0, a prompt of 3 tokens.*the cache holds 26"),
        ({"prompts": [np.array([3, 23])]}, r"in row 0, token ids \[23\], not 0 to 22"),
        ({"prompts": [np.array([-1, 3])]}, r"token ids \[-1\]"),
    ],
)
def test_impossible_calls_are_refused(params, decoder, changes, message):
    with pytest.raises(ValueError, match=message):
        decode(decoder, params, **changes)


def test_impossible_settings_are_refused():
    for name, value, message in (
        ("max_new_tokens", 0, "max_new_tokens = 0"),
        ("temperature", -1.0, "temperature = -1.0"),
        ("temperature", float("nan"), "temperature = nan"),
        ("top_p", 0.0, "top_p = 0.0"),
        ("top_p", 1.5, "top_p = 1.5"),
        ("top_k", -1, "top_k = -1"),
        ("stop_ids", tuple(range(33)), "wanted at most 32"),
        ("min_new_tokens", 9, "min_new_tokens = 9; wanted 0 to max_new_tokens = 8"),
    ):
        with pytest.raises(ValueError, match=message):
            SamplingSettings(**{"max_new_tokens": 8, name: value})


def test_logprobs_are_those_of_teacher_forcing(params, decoder):
    """The responses to one prompt have temperatures of their own; others keep theirs."""
    plain = decode(decoder, params)
    temperatures = np.array([[0.7, 1.5, 0.7], [0.7, 0.7, 3.0], [0.7] * 3, [0.7] * 3])
    session = decoder.session(params, num_slots=5)
    keys = fold_in(KEY, np.arange(12)).reshape(4, 3, 2)
    for prompt, *own in zip(PROMPTS, keys, temperatures, strict=True):
        session.submit(prompt, own[0], SETTINGS, own[1])
    for y in session.run():
        temperature = temperatures[y.request, y.sample]
        assert y.temperature == temperature
        want = logprobs_of(CONFIG, params, PROMPTS[y.request], y.tokens, temperature)
        np.testing.assert_allclose(y.token_logprobs, want, rtol=0, atol=bound(temperature))
        if temperature == SETTINGS.temperature:
            alone = plain.tokens[y.request, y.sample, : len(y.tokens)]
            np.testing.assert_array_equal(y.tokens, alone)
