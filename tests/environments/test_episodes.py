# SPDX-License-Identifier: Apache-2.0
"""Episodes over a real decode session, with environments of this process that take their time."""

import asyncio
import itertools
import threading
import time
import types
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_models import START_MODEL_LOGIT, load_folder, logprob_bound, scored_tokens

from tba_jax import workers
from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.requests import SamplingSettings, StopStrings
from tba_jax.decoding.sampling import fold_in
from tba_jax.environments.episode import Environment
from tba_jax.environments.episodes import EpisodeSession
from tba_jax.flow.trajectory import Prompt
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.run.model_parts import START_MODEL
from tba_jax.serving.chat import Chat
from tba_jax.serving.failures import FailureLines

LIMIT = 20


class Counting(Environment):
    """Says a z and how long a turn was, after a delay; ends with the third turn."""

    async def play(self):
        world = self.pool
        decode, encode = world.tokenizer.decode, world.tokenizer.encode
        prompt, delay = self.attempt.prompt.tokens, next(world.delays)
        for turn in range(world.most):
            await asyncio.sleep(delay)
            _, y = await self.turn(Chat(()), prompt)
            if y is None or self.limit:
                return 0.5
            text = decode(y.tokens)
            if turn == world.most - 1:
                return 1.0
            prompt = np.concatenate([prompt, y.tokens, encode(f"z{len(text)}", add_bos=False)])


class World:
    """In the place of a pool; its loop runs on a thread."""

    has_reward, schemas, first_token_only, served = True, (), False, None

    def __init__(self, delays=(0,), most=3):
        self.delays, self.most = itertools.cycle(delays), most
        self.workers = types.SimpleNamespace(numbers=iter(range(999)))
        self.timeout_s, self.failures = 30.0, FailureLines("world")
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def close(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10.0)
        self.loop.close()

    def start(self, attempt, sample):
        return asyncio.run_coroutine_threadsafe(Counting(self, attempt, sample).run(), self.loop)


@pytest.fixture(scope="module")
def model():
    config, params, _ = load_folder(str(START_MODEL), param_dtype=jnp.float32)
    tokenizer = Tokenizer.load(str(START_MODEL))
    ids = {"eos_ids": tokenizer.eos_ids, "pad_id": tokenizer.pad_id, "chunk_steps": 5}
    limits = {"prompt_tokens": 12, "max_length": 12 + LIMIT}
    decoder = Decoder(config, compute_dtype=jnp.float32, **ids, **limits)
    texts = ["7+5-3+8-6+2", "1-1+6+8-7+3", "9+9-8"]
    return types.SimpleNamespace(
        config=config,
        params=params,
        tokenizer=tokenizer,
        decoder=decoder,
        settings=SamplingSettings(LIMIT, stop_strings=StopStrings([",", ":"], tokenizer.decode)),
        prompts=[Prompt(i, x, tokenizer.encode(x, add_bos=True), {}) for i, x in enumerate(texts)],
    )


def drawn(model, world, *, in_turn, max_turns=4, keeps_caches=True):
    """All episodes, two for each prompt, in order."""
    options = {"num_slots": 4, "version": 3, "keeps_caches": keeps_caches}
    world.tokenizer, world.max_turns = model.tokenizer, max_turns
    session = EpisodeSession(model.decoder, model.params, world, **options)
    keys = fold_in(jax.random.key(5), np.arange(6)).reshape(3, 2, 2)
    for prompt, own in zip(model.prompts, keys, strict=True):
        session.submit(prompt, own, model.settings, np.ones(2))
    found = []
    if in_turn:
        found = list(session.run())
    else:
        end = time.monotonic() + 60
        while not session.is_idle and time.monotonic() < end:
            found += [] if session.is_waiting else session.step()
    world.close()
    assert session.is_idle and session.room == 4
    assert (session.statistics.kept_tokens > 0) == (keeps_caches and max_turns > 1)
    kept = session._session._kept
    assert all(key[:4] == b"\xff" * 4 for key in kept)  # free rows: nothing is kept
    return sorted(found, key=lambda y: (y.request, y.sample))


@pytest.mark.parametrize("keeps_caches", [True, False])
def test_every_sampled_token_has_the_log_prob_that_the_scorer_gives_it(model, keeps_caches):
    episodes = drawn(model, World(), in_turn=True, keeps_caches=keeps_caches)
    assert {y.finish for y in episodes} <= {"done", "length"}
    assert any((~y.is_sampled).sum() > 2 for y in episodes)
    bound = logprob_bound(model.config, 12 + LIMIT, START_MODEL_LOGIT)
    for y in episodes:
        prompt = model.prompts[y.request].tokens
        own = scored_tokens(model.config, model.params, prompt, y.tokens)
        wanted = np.where(y.is_sampled, own, 0)
        np.testing.assert_allclose(y.token_logprobs, wanted, rtol=0, atol=bound)
        # One wrong mark on one token of the environment would be seen.
        assert np.abs(own[~y.is_sampled]).min(initial=1) > 1e-3


@pytest.mark.parametrize("delays", [(0,), (0.003, 0.04, 0, 0.011)])
def test_what_is_sampled_does_not_depend_on_when_environments_answer(model, delays):
    first = drawn(model, World(), in_turn=True)
    again = drawn(model, World(delays), in_turn=False)
    assert [y.tokens.tolist() for y in first] == [y.tokens.tolist() for y in again]
    assert [y.verdict for y in first] == [y.verdict for y in again]
    assert {(y.version_min, y.version_max) for y in again} == {(3, 3)}


def test_limits_end_an_episode_that_keeps_its_reward(model):
    one_turn = drawn(model, World(most=10), in_turn=False, max_turns=1)
    assert {y.finish for y in one_turn} <= {"turns", "length"}
    assert any(y.finish == "turns" for y in one_turn)
    assert all(y.is_sampled.all() and y.verdict.reward == 0.5 for y in one_turn)
    long = drawn(model, World(most=10), in_turn=False, max_turns=10)
    assert all(len(y.tokens) <= LIMIT for y in long)
    assert any(y.finish == "length" for y in long)


def test_a_session_waits_no_longer_than_every_deadline(model, monkeypatch):
    monkeypatch.setattr(workers, "START_TIMEOUT_S", 0.5)
    monkeypatch.setattr(World, "start", lambda *arguments: Future())
    world = World()
    world.timeout_s = 0.0
    with pytest.raises(RuntimeError, match="no environment has answered for 0.5 s, longer than"):
        drawn(model, world, in_turn=True)
    world.close()
