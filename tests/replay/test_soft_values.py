# SPDX-License-Identifier: Apache-2.0
"""Soft values of prompts: of what the start policy drew, counted once, kept with the buffer."""

import dataclasses
import math

import numpy as np
from fake_rounds import distinct_responses, make_commit

from tba_jax.flow.packing import Packing
from tba_jax.flow.padding import Padding
from tba_jax.flow.trajectory import Group
from tba_jax.replay import soft_values
from tba_jax.replay.buffer import ReplayBuffer
from tba_jax.replay.config import ReplaySettings
from tba_jax.replay.soft_values import SoftValues

REWARDS = {1: [1.0, 0.0, 0.5, 0.0], 2: [0.0] * 4, 3: [1.0, 1.0, 1.0, 0.0]}
T = 0.3


def drawn(prompts, version, temperature=0.7, **options):
    """A round of one version, as fakes that say two are not."""
    commit = make_commit(
        {p: distinct_responses(4) for p in prompts}, rewards=REWARDS, version=version, **options
    )

    def of_one(y):
        return dataclasses.replace(y, version_max=version, sampling_temperature=temperature)

    groups = [Group(g.prompt, tuple(map(of_one, g.trajectories)), {}) for g in commit.groups]
    return dataclasses.replace(commit, groups=tuple(groups))


def make():
    return ReplayBuffer(ReplaySettings(recency_prob=0.0), 0, SoftValues(T, 0.7))


def expected(rewards):
    return T * math.log(np.mean(np.exp(np.array(rewards) / T)))


def values(draws):
    return {draw.prompt.prompt_id: draw.soft_value for draw in draws}


def test_a_value_is_of_all_that_the_start_policy_drew_and_of_nothing_else():
    buffer = make()
    buffer.merge([drawn([1, 2], 0)], 0)
    # Again at the start, later, and by the start policy at another temperature.
    buffer.merge([drawn([1], 0, round=1), drawn([2, 3], 5, round=2)], 5)
    buffer.merge([drawn([2, 3], 0, temperature=1.5, round=3)], 6)
    found = values(buffer.sample(3, 4, 6))
    np.testing.assert_allclose(found[1], expected(REWARDS[1]), rtol=1e-12)
    np.testing.assert_allclose(found[2], 0.0, atol=1e-15)
    assert math.isnan(found[3])
    assert buffer.stats()["buffer/soft_values"] == 2


def test_values_are_kept_and_divided_with_the_buffer():
    buffer, other = make(), make()
    buffer.merge([drawn([1, 2], 0), drawn([3], 0, round=1)], 0)
    other.merge([drawn([3], 0)], 0)
    again = make()
    again.restore(buffer.state())
    again.merge([drawn([3], 0, round=2)], 1)
    buffer.merge([drawn([3], 0, round=2)], 1)
    assert values(again.sample(3, 4, 1)) == values(buffer.sample(3, 4, 1))
    arrays = soft_values.divided([buffer.state(), other.state()], lambda i: i % 2 == 1)
    assert arrays["soft_ids"].tolist() == [1, 3]
    assert arrays["soft_counts"].tolist() == [4, 12]
    np.testing.assert_allclose(
        T * (arrays["soft_sums"][1] - math.log(12)), expected(REWARDS[3]), rtol=1e-12
    )
    plain = ReplayBuffer(ReplaySettings(), 0)
    assert soft_values.divided([plain.state()], lambda i: True) == {}


def test_a_batch_has_the_value_of_every_prompt():
    buffer = make()
    buffer.merge([drawn([1], 0), drawn([3], 5, round=1)], 5)
    draws = buffer.sample(2, 4, 5)
    packing = Packing(2, 4, Padding((4,), (4,), 0), 0.7, has_soft_values=True)
    batch = packing.batch(draws)
    rows = {d.prompt.prompt_id: row for d, row in zip(draws, batch.soft_values, strict=True)}
    np.testing.assert_allclose(rows[1], [expected(REWARDS[1])] * 4, rtol=1e-6)
    assert np.isnan(rows[3]).all()
