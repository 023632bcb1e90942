# SPDX-License-Identifier: Apache-2.0
"""Values of states by drawing on, against all responses of a tiny model counted out."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from fake_models import random_params, teacher_forced, tiny_config
from fake_search import ByFunction, grader_of, make_searcher
from fake_tickets import House

from tba_jax.decoding.engine import Decoder
from tba_jax.flow.trajectory import Prompt
from tba_jax.search.config import SearchSettings
from tba_jax.search.sampler import Sampler
from tba_jax.search.state_values import advantages_of, states_of, values_of
from tba_jax.weights.publication import Published

CONFIG = tiny_config(vocab_size=12)
EOS, LIMIT = 2, 3
X = np.array([3, 5, 7], np.int32)
PROMPT = Prompt(4, "x", X, {})


def reward_of(tokens):
    """Right is what adds up to more than 14; what begins with a 1 has no reward."""
    return None if tokens[0] == 1 else float(sum(tokens) > 14)


GRADER = grader_of(ByFunction(lambda text, ids: reward_of(ids.tolist())))


@pytest.fixture(scope="module")
def decoder():
    ids = {"eos_ids": (EOS,), "pad_id": 0}
    sizes = {"prompt_tokens": 6, "max_length": 6, "chunk_steps": 2}
    return Decoder(CONFIG, compute_dtype=jnp.float32, **ids, **sizes)


def make_sampler(decoder, num_continuations):
    settings = SearchSettings(samples_per_prompt=4, max_new_tokens=LIMIT, num_slots=256)
    key = np.zeros(2, np.uint32)
    return Sampler(decoder, settings, key, None, 1, num_continuations)


def sampled(sampler, published, *numbers):
    """Groups of tickets of the prompt."""
    session = sampler.open(published)
    for number in numbers:
        session.submit(number, PROMPT)
    found = session.run()
    return [found[number] for number in numbers]


@pytest.fixture(scope="module")
def published():
    return Published(0, random_params(CONFIG))


def exact_value(params, state):
    """The mean reward of all that may follow these tokens, each with its probability."""
    if len(state) == LIMIT or EOS in state:
        return reward_of(state)
    after = teacher_forced(CONFIG, params, [*X, *state], [0])[0]  # the 0 is not read
    return sum(p * exact_value(params, (*state, token)) for token, p in enumerate(np.exp(after)))


def test_advantages_are_those_of_the_exact_values(decoder, published):
    (group,) = sampled(make_sampler(decoder, 3000), published, 5)
    responses = [y.tokens for y in group.episodes]
    values = values_of(GRADER, PROMPT, group.continuations)
    assert set(values) == {state.tobytes() for state in states_of(responses, 1)}
    states = [state for state in states_of(responses, 1) if state[0] != 1]  # 1 has no reward
    exact = {x.tobytes(): exact_value(published.params, tuple(x.tolist())) for x in states}
    for state, value in exact.items():
        # 3,000 draws: 5 standard errors, 0.5 / sqrt(3000) each, are 0.046.
        np.testing.assert_allclose(values[state], value, atol=0.046)
    # What the policy makes of these states differs by more than that.
    assert np.ptp(list(exact.values())) > 0.1


def test_continuations_follow_from_the_number_of_the_ticket(decoder, published):
    def drawn(*numbers):
        return [
            {state: [y.tokens.tolist() for y in own] for state, own in g.continuations.items()}
            for g in sampled(make_sampler(decoder, 16), published, *numbers)
        ]

    first, second = drawn(3, 4)
    assert [second, first] == drawn(4, 3) and [first] == drawn(3) and first != second
    for of_state in (first, second):
        for state, rows in of_state.items():
            tokens = np.frombuffer(state, np.int32).tolist()
            assert len(rows) == 16 and all(row[: len(tokens)] == tokens for row in rows)


def test_tokens_between_two_states_share_their_advantage():
    tokens = np.arange(7, dtype=np.int32)
    values = {tokens[:2].tobytes(): 0.5, tokens[:4].tobytes(): np.nan, tokens[:6].tobytes(): 0.25}
    (found, other) = advantages_of([tokens, tokens[:2]], [1.0, 0.125], values, 2)
    np.testing.assert_allclose(found, [0.375, 0.375, *[-0.25] * 4, 0.75])
    np.testing.assert_allclose(other, [0.125 - 1.0] * 2)
    (alone,) = advantages_of([tokens[:2]], [None], values, 2)
    assert (alone == 0).all()


def test_a_ticket_brings_advantages(decoder, published):
    prompts = SimpleNamespace(from_number=lambda number: (number, PROMPT))
    house = House(1, prompts=prompts)
    searcher = make_searcher(house.owner, make_sampler(decoder, 4), GRADER, lambda: published)
    house.owner.allow(1, 0)
    while not house.owner.is_done:
        assert searcher.step() or searcher.grade()
    (result,) = house.owner._results.values()
    rewards = [y.reward for y in result.group.trajectories]
    for j, y in enumerate(result.group.trajectories):
        total = y.reward - np.mean(np.delete(rewards, j))
        np.testing.assert_allclose(y.token_advantages.sum(), total, atol=1e-6)
