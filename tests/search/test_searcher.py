# SPDX-License-Identifier: Apache-2.0
"""The searcher: tickets begin as slots free up, and come back as graded groups."""

import numpy as np
import pytest
from fake_models import start_model
from fake_search import ByFunction, World, make_searcher
from fake_tickets import IDENTITY, House

from tba_jax.config.schema import make_config
from tba_jax.environments.episode import Episode
from tba_jax.flow.padding import Padding
from tba_jax.flow.tickets import Ticket
from tba_jax.flow.trajectory import Prompt
from tba_jax.models.logprobs import Scoring
from tba_jax.models.transformer import unstack_layers
from tba_jax.rewards.scores import Grader, Score
from tba_jax.run.model_parts import make_decoder
from tba_jax.search.groups import assemble, grade_groups, measure
from tba_jax.search.prompts import PromptReader, Prompts
from tba_jax.search.sampler import SampledGroup, Sampler
from tba_jax.search.start_data import GivenScorer
from tba_jax.tasks.arithmetic import Arithmetic
from tba_jax.weights.publication import Published


def test_a_ticket_comes_back_when_its_last_response_ended():
    """Meanwhile the other slots go on: a later ticket comes back before an earlier one."""
    world = World(eos_ids=(0, 1))
    begun = [*world.run(1)]
    results = world.run(8)
    order, groups = list(results), {n: result.group for n, result in results.items()}
    longest = {n: max(len(y.response_tokens) for y in g.trajectories) for n, g in groups.items()}
    assert begun == [n for n in (0, 1) if longest[n] <= 4] and order != sorted(order)
    for n, result in results.items():
        assert (result.version, result.generated, len(groups[n].trajectories)) == (0, 2, 2)
        for y in groups[n].trajectories:
            assert (y.ticket, y.reward) == (n, y.response_tokens[0])
    lengths = [len(y.response_tokens) for g in groups.values() for y in g.trajectories]
    assert world.owner.decoded_tokens == sum(lengths) and min(lengths) < 5 < max(lengths)


@pytest.mark.parametrize("in_flight", [True, False])
def test_newer_weights_come_between_chunks_or_when_the_session_has_drained(in_flight):
    world = World(in_flight=in_flight)

    def spans():
        groups = [result.group for result in world.owner._results.values()]
        world.house.merge()
        return {(y.version_min, y.version_max) for g in groups for y in g.trajectories}

    world.run(1)
    world.version = 5
    world.run(2)
    assert spans() == {(0, 5) if in_flight else (0, 0)}
    world.run(3)
    assert spans() == {(5, 5)}


LENGTH = ByFunction(lambda text, ids: None if text == "9" else float(len(text)))


@pytest.fixture(scope="module")
def model():
    config, params, tokenizer = start_model()
    return config, unstack_layers(params, config), tokenizer


def real_searchers(model, given=(), num_searchers=1):
    """(house, searchers of the start model) with three responses to a prompt, six slots."""
    model_config, params, tokenizer = model
    search = {"max_new_tokens": 8, "num_slots": 6, "samples_per_prompt": 3}
    search = {f"search.{name}": value for name, value in search.items()}
    config = make_config({"task.max_prompt_tokens": 12} | search)
    scoring = Scoring(eos_ids=tokenizer.eos_ids)
    padding = Padding((12,), (8,), tokenizer.pad_id)
    prompts = Prompts(PromptReader(Arithmetic(), tokenizer, 12), seed=0)
    house = House(num_searchers, prompts=prompts, given=given)
    decoder = make_decoder(config, model_config, tokenizer)
    searchers = [
        make_searcher(
            house.owner,
            Sampler(decoder, config.search, np.zeros(2, np.uint32)),
            Grader(LENGTH, tokenizer.batch_decode, lambda text: None, ""),
            lambda: Published(0, params),
            index=i,
            given=GivenScorer(model_config, scoring, padding, 3),
        )
        for i in range(num_searchers)
    ]
    return house, searchers


def sample(house, searchers, count):
    """Results of `count` tickets, by number."""
    house.owner.allow(house.owner.num_given + count, 0)
    while not house.owner.is_done:
        for searcher in searchers:
            searcher.step()
            searcher.grade()
    return dict(house.owner._results)


def test_given_responses_are_scored_first_as_if_they_were_drawn_and_then_it_draws(model):
    drawn = [result.group for result in sample(*real_searchers(model), 6).values()]
    whole = [[y for y in g.trajectories if y.finish_reason == "eos"] for g in drawn]
    given = [
        Ticket(i, group.prompt, tuple(y.response_tokens for y in ys))
        for i, (group, ys) in enumerate(zip(drawn, whole, strict=True))
    ]
    results = sample(*real_searchers(model, given), 1)
    for i, ys in enumerate(whole):
        found = results[i].group
        assert found.prompt is given[i].prompt and results[i].report.tokens == 0
        for y, z in zip(found.trajectories, ys, strict=True):
            np.testing.assert_array_equal(y.response_tokens, z.response_tokens)
            # Float32: one forward pass over whole sequences against a cache, token by token.
            wanted = z.behavior_token_logprobs
            np.testing.assert_allclose(y.behavior_token_logprobs, wanted, atol=2e-4)
            assert (y.behavior_token_logprobs < 0).all()  # the stop token is scored too
            assert (y.reward, y.finish_reason, y.version_min) == (z.reward, "eos", 0)
            assert y.sampling_temperature == z.sampling_temperature == 1.0
    assert sum(map(len, whole)) > 8 and len(results) == 7
    assert results[6].generated == 3 and results[6].report.tokens > 0


def test_what_a_ticket_draws_depends_on_its_number_alone(model):
    """Two searchers give the bits of one; a lost ticket is drawn again with the same bits."""
    alone = sample(*real_searchers(model), 7)
    house, searchers = real_searchers(model, num_searchers=2)
    house.owner.join((1,), "a", IDENTITY)
    house.owner.take(1, 2, 0)
    house.owner.join((1,), "a", IDENTITY)  # the process restarts
    shared = sample(house, searchers, 7)
    assert sorted(alone) == sorted(shared) == list(range(7))
    assert len({y.searcher for r in shared.values() for y in r.group.trajectories}) == 2
    for n, result in alone.items():
        pairs = zip(result.group.trajectories, shared[n].group.trajectories, strict=True)
        for y, z in pairs:
            np.testing.assert_array_equal(y.response_tokens, z.response_tokens)
            np.testing.assert_array_equal(y.behavior_token_logprobs, z.behavior_token_logprobs)


PROMPTS = [Prompt(i, f"p{i}", np.arange(1, n + 1, dtype=np.int32), {}) for i, n in ((4, 3), (7, 2))]


class SumReward:
    """The sum of a response's tokens; none where that is 13."""

    async def score(self, completions):
        sums = [float(x.ids.sum()) for x in completions]
        assert [x.text for x in completions] == [f"text {int(x)}" for x in sums]
        whys = [(None, "thirteen") if x == 13 else (x, None) for x in sums]
        return [Score(*why, "", {"half": x / 2}) for why, x in zip(whys, sums, strict=True)]


def make_grader():
    return Grader(
        SumReward(),
        lambda rows: [f"text {row.sum()}" for row in rows],
        lambda text: "short" if len(text) < 7 else None,
        "short",
    )


def episode(*tokens, logprobs=None, is_sampled=None, finish="eos", temperature=1.0):
    tokens = np.array(tokens, np.int32)
    logprobs = np.full(len(tokens), -1, np.float32) if logprobs is None else np.float32(logprobs)
    return Episode(0, 0, tokens, logprobs, is_sampled, finish, 3, 4, temperature)


def sampled():
    """Two responses to the first prompt, one to the second."""
    first = episode(5), episode(6, 7, logprobs=[-2, -3], finish="length", temperature=0.5)
    return [
        SampledGroup(PROMPTS[0], first),
        SampledGroup(PROMPTS[1], (episode(8, logprobs=[-4]),)),
    ]


def test_every_response_is_a_trajectory_or_counted_by_its_reason():
    groups = sampled()
    grades = grade_groups(make_grader(), groups)
    first, second = (
        assemble(*each, searcher=1, number=9) for each in zip(groups, grades, strict=True)
    )
    assert (first.prompt, first.rejected) == (PROMPTS[0], {"thirteen": 1})
    (y,) = first.trajectories
    assert (y.response_tokens.tolist(), y.reward, y.reward_parts) == ([5], 5.0, {"half": 2.5})
    assert y.behavior_token_logprobs.tolist() == [-1.0]
    assert (y.version_min, y.version_max, y.searcher, y.ticket) == (3, 4, 1, 9)
    assert (y.sampling_temperature, y.finish_reason, y.is_sampled) == (1.0, "eos", None)
    assert [(z.prompt_id, z.reward) for z in second.trajectories] == [(7, 8.0)]
    assert second.rejected == {}
    report = measure(groups[0], grades[0])
    assert report.tokens == 3
    assert report.means == {
        "reward_mean": 5.0,
        "response_length_mean": 1.5,
        "unique_fraction": 1.0,
        "kind_share": 0.5,
        "cut_share": 0.5,
        "equal_rewards_share": 0.0,
        "reward_part_half": pytest.approx((2.5 + 6.5) / 2),
    }
    assert measure(groups[1], grades[1]).means["equal_rewards_share"] == 1.0


def test_what_an_environment_wrote_is_marked():
    marks = np.array([True, False, True])
    answered = episode(6, 9, 7, logprobs=[-1, 0, -1], is_sampled=marks)
    turns = SampledGroup(PROMPTS[1], (*sampled()[1].episodes, answered))
    (grades,) = grade_groups(make_grader(), [turns])
    group = assemble(turns, grades, searcher=0, number=0)
    assert [y.is_sampled is marks for y in group.trajectories] == [False, True]
