# SPDX-License-Identifier: Apache-2.0
"""Sampled groups become trajectories: a finished one as a whole round, observations apart."""

import numpy as np
import pytest

from tba_jax.environments.episode import Episode
from tba_jax.flow.trajectory import Prompt
from tba_jax.rewards.scores import Grader, Scores
from tba_jax.search.groups import assemble, grade_groups, measure
from tba_jax.search.sampler import SampledGroup

PROMPTS = [Prompt(i, f"p{i}", np.arange(1, n + 1, dtype=np.int32), {}) for i, n in ((4, 3), (7, 2))]


class SumReward:
    """The sum of a response's tokens; none where that is 13."""

    async def score(self, completions):
        sums = [float(ids.sum()) for ids in completions.ids]
        assert completions.texts == [f"text {int(x)}" for x in sums]
        rewards = [None if x == 13 else x for x in sums]
        reasons = ["thirteen" if r is None else None for r in rewards]
        return Scores(rewards, reasons, "", {"half": [x / 2 for x in sums]})


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
