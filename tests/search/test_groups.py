# SPDX-License-Identifier: Apache-2.0
"""Sampled groups become trajectories: a finished one as a whole round, observations apart."""

import numpy as np
import pytest

from tba_jax.environments.episode import Episode
from tba_jax.flow.padding import Padding
from tba_jax.flow.trajectory import Prompt
from tba_jax.rewards.grader import Grader
from tba_jax.rewards.source import ScoreResult
from tba_jax.search.groups import assemble, grade_groups, measure
from tba_jax.search.reference import dispatch_reference
from tba_jax.search.sampler import SampledGroup

PROMPTS = [Prompt(i, f"p{i}", np.arange(1, n + 1, dtype=np.int32), {}) for i, n in ((4, 3), (7, 2))]


class SumReward:
    """The sum of a response's tokens; none where that is 13."""

    def score(self, prompts, completions, columns, *, completion_ids, has_eos):
        sums = [float(ids.sum()) for ids in completion_ids]
        assert completions == [f"text {int(x)}" for x in sums]
        rewards = [None if x == 13 else x for x in sums]
        reasons = ["thirteen" if r is None else None for r in rewards]
        return ScoreResult(rewards, reasons, "", {"half": [x / 2 for x in sums]})


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
    reference = [np.array([-0.5, -0.25], np.float32), np.array([-2.0], np.float32)]
    first, second = (
        assemble(*each, searcher=1, number=9, reference_logprob=own)
        for *each, own in zip(groups, grades, reference, strict=True)
    )
    assert (first.prompt, first.rejected) == (PROMPTS[0], {"thirteen": 1})
    (y,) = first.trajectories
    assert (y.response_tokens.tolist(), y.reward, y.reward_parts) == ([5], 5.0, {"half": 2.5})
    assert (y.reference_logprob, y.behavior_token_logprobs.tolist()) == (-0.5, [-1.0])
    assert (y.version_min, y.version_max, y.searcher, y.round) == (3, 4, 1, 9)
    assert (y.sampling_temperature, y.finish_reason, y.is_sampled) == (1.0, "eos", None)
    assert [(z.prompt_id, z.reward) for z in second.trajectories] == [(7, 8.0)]
    assert second.rejected == {}
    report = measure(groups[0], grades[0])
    assert report.reward_mean == 5.0 and report.response_length_mean == 1.5
    assert (report.tokens, report.unique_fraction, report.cut_share) == (3, 1.0, 0.5)
    assert (report.kind_share, report.equal_rewards_share) == (0.5, 0.0)
    assert report.further == {"reward_part_half": pytest.approx((2.5 + 6.5) / 2)}
    assert measure(groups[1], grades[1]).equal_rewards_share == 1.0


def test_the_reference_scores_each_distinct_response_once_in_rows_of_its_own_buckets():
    seen = []

    def reference(tokens, prompt_lengths, response_lengths, response_bucket, is_sampled):
        seen.append((tokens, prompt_lengths, response_lengths, response_bucket, is_sampled))
        return -tokens.sum(axis=-1, keepdims=True)

    padding = Padding((4,), (2, 4), 0)
    groups = sampled()
    first = SampledGroup(PROMPTS[0], (*groups[0].episodes, groups[0].episodes[0]))
    scored = dispatch_reference(reference, [first, groups[1]], 2, padding)
    # Three distinct responses in calls of two rows; the row that is missing repeats the first.
    assert [call[0].tolist() for call in seen] == [
        [[0, 1, 2, 3, 5, 0], [0, 1, 2, 3, 6, 7]],
        [[0, 0, 1, 2, 8, 0], [0, 0, 1, 2, 8, 0]],
    ]
    assert [call[1].tolist() for call in seen] == [[3, 3], [2, 2]]
    assert [call[2].tolist() for call in seen] == [[[1], [2]], [[1], [1]]]
    assert [call[3:] for call in seen] == [(2, None), (2, None)]
    assert [sums.tolist() for sums in scored.sums()] == [[-11, -19, -11], [-11]]


def test_a_prompt_is_scored_once_for_several_responses():
    seen = []

    def reference(tokens, prompt_lengths, response_lengths, response_bucket, is_sampled):
        seen.append((tokens, prompt_lengths, response_lengths))
        return (
            -tokens[:, -response_lengths.shape[1] * 2 :].reshape(*response_lengths.shape, 2).sum(-1)
        )

    # Calls of eight responses: seven of one prompt are a row, three of the other two rows of two.
    many = SampledGroup(PROMPTS[0], tuple(episode(i) for i in (4, 5, 6, 7, 8, 9, 4, 10)))
    few = SampledGroup(PROMPTS[1], tuple(episode(i, 1) for i in (4, 5, 6)))
    padding = Padding((4,), (2,), 0)
    scored = dispatch_reference(reference, [many, few], 8, padding, shares_prompts=True)
    (wide, narrow) = seen
    assert wide[0].tolist() == [[0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 7, 0, 8, 0, 9, 0, 10, 0, 0, 0]]
    assert (wide[1].tolist(), wide[2].tolist()) == ([3], [[1, 1, 1, 1, 1, 1, 1, 0]])
    assert narrow[0][:2].tolist() == [[0, 0, 1, 2, 4, 1, 5, 1], [0, 0, 1, 2, 6, 1, 0, 0]]
    assert (narrow[0].shape, narrow[2][:2].tolist()) == ((4, 8), [[2, 2], [2, 0]])
    assert [sums.tolist() for sums in scored.sums()] == [
        [-4, -5, -6, -7, -8, -9, -4, -10],
        [-5, -6, -7],
    ]


def test_what_an_environment_wrote_is_marked_and_scored_apart():
    seen = []

    def reference(tokens, prompt_lengths, response_lengths, response_bucket, is_sampled):
        seen.append((response_bucket, is_sampled))
        return np.zeros(response_lengths.shape)

    marks = np.array([True, False, True])
    answered = episode(6, 9, 7, logprobs=[-1, 0, -1], is_sampled=marks)
    turns = SampledGroup(PROMPTS[1], (*sampled()[1].episodes, answered))
    dispatch_reference(reference, [turns], 2, Padding((4,), (2, 4), 0))
    (t, none), (longer, is_sampled) = seen
    assert (t, none, longer) == (2, None, 4)
    assert is_sampled.astype(int).tolist() == [[[1, 0, 1, 0]], [[1, 0, 1, 0]]]
    (grades,) = grade_groups(make_grader(), [turns])
    group = assemble(turns, grades, searcher=0, number=0)
    assert [y.is_sampled is marks for y in group.trajectories] == [False, True]
    assert np.isnan([y.reference_logprob for y in group.trajectories]).all()


@pytest.mark.parametrize("shares_prompts", [False, True])
def test_the_reference_of_an_episode_that_forks_is_the_sum_over_its_paths(shares_prompts):
    def reference(tokens, prompt_lengths, response_lengths, response_bucket, is_sampled):
        shape = *response_lengths.shape, response_bucket
        own = tokens[:, tokens.shape[1] - shape[1] * shape[2] :].reshape(shape)
        return -(own if is_sampled is None else own * is_sampled).sum(-1)

    # The second path repeats tokens of the first, which count once.
    marks = np.array([True, False, True, False, False, True])
    y = episode(6, 9, 7, 6, 9, 8, is_sampled=marks)._replace(path_lengths=(3, 3))
    group = SampledGroup(PROMPTS[1], (y, *sampled()[1].episodes))
    padding = Padding((4,), (2, 4), 0)
    scored = dispatch_reference(reference, [group], 4, padding, shares_prompts=shares_prompts)
    assert [sums.tolist() for sums in scored.sums()] == [[-(6 + 7 + 8), -8]]
