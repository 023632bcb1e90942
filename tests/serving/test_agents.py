# SPDX-License-Identifier: Apache-2.0
"""Agents over HTTP as environments: exact tokens and log-probs, and every way to fail by a name."""

import dataclasses
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents_for_tests import refused
from fake_models import START_MODEL_LOGIT, load_folder, logprob_bound, scored_tokens
from served_model import folder_with_template

from tba_jax.config.schema import make_config
from tba_jax.decoding.keys import row_keys
from tba_jax.decoding.requests import Response
from tba_jax.environments.episodes import EpisodeSession
from tba_jax.environments.pool import continues
from tba_jax.flow.trajectory import Prompt
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import unstack_layers
from tba_jax.run.model_parts import START_MODEL, make_decoder
from tba_jax.run.task_parts import make_environments
from tba_jax.search.sampler import sampling_settings
from tba_jax.serving.protocol import ApiError, Generation

FILE = Path(__file__).with_name("agents_for_tests.py")
LIMIT = 48


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    template = (
        "<bos>{% for m in messages %}{{ m.content }}"
        "{{ '=' if m.role == 'user' else '<eos>' }}{% endfor %}"
    )
    folder = folder_with_template(tmp_path_factory.mktemp("model"), template)
    config, params, _ = load_folder(str(START_MODEL), param_dtype=jnp.float32)
    tokenizer = Tokenizer.load(folder)
    changes = {"task.max_prompt_tokens": 12, "task.environment": f"{FILE}:talk"}
    changes |= {"search.max_new_tokens": LIMIT}
    settings = make_config({**changes, "reward.timeout_s": 2.0, "search.num_slots": 4})
    decoder = make_decoder(settings, config, tokenizer)
    names = {"params": params, "tokenizer": tokenizer, "settings": settings, "decoder": decoder}
    return types.SimpleNamespace(config=config, **names)


def bound(model):
    return logprob_bound(model.config, 1 + LIMIT, START_MODEL_LOGIT)


def pool_of(model, name):
    task = dataclasses.replace(model.settings.task, environment=f"{FILE}:{name}")
    return make_environments(dataclasses.replace(model.settings, task=task), model.tokenizer)


def drawn(model, environments, rows, *, max_turns=8, swap=None):
    """The episodes of the rows, in order; weights change to `swap` after the first turns."""
    params = unstack_layers(model.params, model.config)
    inner = model.decoder.session(params, num_slots=4, version=3, keeps_caches=True)
    environments.max_turns = max_turns
    session = EpisodeSession(inner, environments)
    for i, (row, key) in enumerate(zip(rows, row_keys(jax.random.key(5), len(rows)), strict=True)):
        tokens = model.tokenizer.encode(row["prompt"], add_bos=True)[:1]
        prompt = Prompt(i, row["prompt"], tokens, row)
        session.submit(prompt, key[None], sampling_settings(model.settings.search), np.ones(1))
    found, end = [], time.monotonic() + 60
    while not session.is_idle:
        assert time.monotonic() < end
        if session.is_waiting:
            if swap is not None and session.statistics.tokens and session.version == 3:
                session.swap(swap, 4)
            time.sleep(0.002)
            continue
        found += session.step()
    return sorted(found, key=lambda y: y.request)


def scored(model, params, rows, episode):
    """log pi of each sampled token of an episode."""
    prompt = model.tokenizer.encode(rows[episode.request]["prompt"], add_bos=True)[:1]
    return np.concatenate(
        [
            scored_tokens(model.config, params, prompt, episode.tokens[path])[
                episode.is_sampled[path]
            ]
            for path in episode.paths
        ]
    )


ROWS = [
    {"prompt": text, "kind": kind}
    for text in ("7+5-3=", "1-1+6=", "9+9-8=")
    for kind in ("tokens", "text")
]


@pytest.fixture(scope="module")
def talked(model):
    """Episodes of agents that talk."""
    environments = pool_of(model, "talk")
    try:
        environments.check()
        return drawn(model, environments, ROWS)
    finally:
        environments.close()


def test_every_sampled_token_has_the_log_prob_that_the_scorer_gives_it(model, talked):
    assert {y.verdict.reason for y in talked} == {None}
    for y, row in zip(talked, ROWS, strict=True):
        own = scored(model, model.params, ROWS, y)
        np.testing.assert_allclose(y.token_logprobs[y.is_sampled], own, rtol=0, atol=bound(model))
        assert y.verdict.reward == len(own) / 10  # no token was lost, or counted twice
        text = model.tokenizer.decode(y.tokens)
        assert text.startswith(row["prompt"]) and not y.token_logprobs[~y.is_sampled].any()
        assert (np.diff(y.is_sampled.astype(int)) == 1).sum() == 3  # turns


def test_turns_after_a_weight_change_have_the_log_probs_of_the_new_weights(model):
    other = jax.tree.map(lambda x: x * 1.02, model.params)
    swap = unstack_layers(other, model.config)
    environments = pool_of(model, "talk")
    try:
        environments.check()
        (y,) = drawn(model, environments, ROWS[:1], swap=swap)
    finally:
        environments.close()
    assert (y.version_min, y.version_max) == (3, 4)
    before, after = (scored(model, each, ROWS, y) for each in (model.params, other))
    num_first = np.argmax(~y.is_sampled[np.argmax(y.is_sampled) :])
    wanted = np.concatenate([before[:num_first], after[num_first:]])
    versions = y.token_versions[y.is_sampled]
    assert set(versions[:num_first]) == {3} and set(versions[num_first:]) == {4}
    np.testing.assert_allclose(y.token_logprobs[y.is_sampled], wanted, rtol=0, atol=bound(model))
    assert np.abs(before - after).max() > 1e-3


def test_a_request_that_continues_no_turn_begins_a_path_of_its_episode(model):
    environments, rows = pool_of(model, "fork"), ROWS[::2]
    try:
        environments.check()
        episodes = drawn(model, environments, rows)
    finally:
        environments.close()
    for y in episodes:
        own = scored(model, model.params, rows, y)
        np.testing.assert_allclose(y.token_logprobs[y.is_sampled], own, rtol=0, atol=bound(model))
        assert len(y.paths) == 2 and sum(y.path_lengths) == len(y.tokens)
        assert y.verdict.reward == len(own) / 10  # no token was lost, or counted twice
        starts = [model.tokenizer.decode(y.tokens[path]) for path in y.paths]
        assert starts[0].startswith(rows[y.request]["prompt"]) and starts[1].startswith("1+1=")


USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
NEXT = {"role": "user", "content": "c"}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([USER, ANSWER, NEXT], True),
        ([NEXT, ANSWER, NEXT], False),  # another history: a renderer would not notice
        ([USER, ANSWER, NEXT, ANSWER, NEXT], False),  # an answer that was not sampled here
        ([USER, NEXT], False),
    ],
)
def test_a_chat_continues_an_earlier_request_and_its_answer_only(messages, expected):
    assert continues(messages, [USER]) is expected


FAILURES = {
    "hang": "environment_timeout",
    "crash": "environment_crash",
    "error": "environment_error",
    "no turn": "environment_no_turn",
    "two at once": "environment_fork",
    "nonsense": "environment_request",
    "first token": "environment_first_token",
    "type": "environment_type",
    "late": "environment_timeout",
    "good": None,
    "turns": None,
}


def test_each_failure_is_a_rejection_by_its_name_and_costs_no_other_episode(model, tmp_path, capfd):
    file = tmp_path / "late"
    rows = [{"prompt": "7+5-3=", "kind": kind, "file": str(file)} for kind in FAILURES]
    environments = pool_of(model, "misbehave")
    environments.timeout_s = 6.0
    try:
        environments.check()
        episodes = drawn(model, environments, rows, max_turns=3)
        assert {k: y.verdict.reason for k, y in zip(FAILURES, episodes, strict=True)} == FAILURES
        by_kind = dict(zip(FAILURES, episodes, strict=True))
        assert (by_kind["turns"].finish, by_kind["turns"].verdict.reward) == ("turns", 0.5)
        assert by_kind["turns"].is_sampled.sum() == 3
        assert refused(file.read_text(), "7+5-3=") == "episode_ended"  # after its deadline
        lines = capfd.readouterr().err
        for name in filter(None, FAILURES.values()):
            assert f"rejected as {name}" in lines
    finally:
        environments.close()


def generation(received):
    settings = sampling_settings(make_config({}).search)
    prompt = np.array([1, 2, 3], np.int32)
    return Generation(prompt, np.zeros((1, 2), np.uint32), settings, False, received.append)


def test_a_client_that_disconnects_ends_its_episode_by_a_name(model):
    environments, received = pool_of(model, "misbehave"), []
    try:
        environments.check()
        agent = environments.open(Prompt(0, "1", np.ones(1, np.int32), {"kind": "idle"}))
        agent.begin()
        agent.submit(own := generation(received))
        assert agent.is_answered and agent.poll().prompt.tolist() == [1, 2, 3]
        assert not agent.is_answered and agent.poll() is None
        agent.cancel(own)
        tokens = np.array([4, 2], np.int32)
        agent.turn(Response(0, 0, tokens, np.zeros(2, np.float32), True, 0, 0))
        assert agent.is_answered and agent.poll().failure == "environment_disconnect"
        agent.submit(generation(received))
        assert isinstance(received[-1], ApiError) and received[-1].code == "episode_ended"
    finally:
        environments.close()
