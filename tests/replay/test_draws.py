# SPDX-License-Identifier: Apache-2.0
"""What is drawn from the replay buffer: fresh slots, replay slots, and how often."""

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
from fake_rounds import (
    distinct_responses,
    drawn,
    json_snapshot,
    make_buffer,
    make_commit,
    make_trajectory,
    prompts_of,
)

from tba_jax.flow.state import PartState
from tba_jax.replay.draws import response_log_weights, unite

# --- fresh slots ---------------------------------------------------------------------------------


def test_nothing_to_draw_means_wait():
    assert make_buffer().sample(2, 2, 0) is None
    buffer = make_buffer()
    buffer.merge([make_commit({1: []}, rejected={1: {"reward_error": 3}})], 0)
    assert buffer.sample(2, 2, 0) is None


def test_fresh_slots_take_each_prompt_of_the_newest_sync_once_then_again():
    buffer = make_buffer(recency_prob=1.0)
    buffer.merge([make_commit({p: distinct_responses(2) for p in (1, 2, 3, 4)})], 0)
    buffer.merge([make_commit({p: distinct_responses(2, 50) for p in (2, 3)}, version=1)], 1)
    draws = buffer.sample(2, 2, 1)
    assert {d.prompt.prompt_id for d in draws if d.is_fresh} == {2, 3}
    assert {y.version_min for d in draws for y in d.trajectories} == {1}
    assert buffer.ledger()["fresh_recycled"] == 0
    # The newest merge comes again, and then the merge before it.
    draws = buffer.sample(3, 2, 1)
    assert len(set(prompts_of(draws))) == 3 and {2, 3} < set(prompts_of(draws))
    assert (buffer.ledger()["fresh_recycled"], buffer.ledger()["fresh_short"]) == (3, 0)


def test_merges_at_one_step_are_one_sync_and_empty_ones_are_none():
    buffer = make_buffer(recency_prob=1.0)
    buffer.merge([make_commit({1: distinct_responses(2)})], 5)
    buffer.merge([make_commit({2: distinct_responses(2)}, round=1)], 5)
    buffer.merge([], 6)
    buffer.merge([make_commit({3: []}, rejected={3: {"reward_nan": 1}}, round=2)], 7)
    draws = buffer.sample(2, 2, 7)
    assert [d.is_fresh for d in draws] == [True, True]
    buffer.merge([make_commit({3: distinct_responses(2)}, round=3)], 8)
    assert buffer.num_fresh_groups == 1


def test_responses_used_in_replay_are_no_longer_fresh():
    buffer = make_buffer(recency_prob=0.0)
    buffer.merge([make_commit({1: distinct_responses(3)})], 0)
    buffer.sample(1, 2, 0)
    buffer._settings = dataclasses.replace(buffer._settings, recency_prob=1.0)
    arrays, meta = json_snapshot(buffer)
    (draw,) = buffer.sample(1, 1, 0)
    assert draw.is_fresh  # one of the three is unused, and that is the one drawn
    assert arrays["row_uses"][arrays["row_id"].tolist().index(draw.trajectory_ids[0])] == 0
    other = make_buffer(recency_prob=0.0)
    other.restore(PartState(arrays, meta))
    other.sample(1, 3, 0)
    assert other.num_fresh_groups == 0


def test_a_prompt_stays_fresh_while_one_response_is_unused():
    # At this temperature the first response is drawn with probability 1 - e^-100.
    buffer = make_buffer(priority_temperature=0.01)
    buffer.merge([make_commit({1: [[5], [6]]}, rewards={1: [1.0, 0.0]})], 0)
    assert [buffer.sample(1, 1, 0)[0].trajectory_ids for _ in range(3)] == [(0,)] * 3
    buffer._settings = dataclasses.replace(buffer._settings, recency_prob=1.0)
    (draw,) = buffer.sample(1, 1, 0)
    assert draw.is_fresh and draw.trajectory_ids == (1,)


def test_pace_trainer_waits_for_enough_fresh_prompts():
    buffer = make_buffer(recency_prob=1.0, pace="trainer")
    buffer.merge([make_commit({1: distinct_responses(2)})], 0)
    assert buffer.sample(2, 2, 0) is None
    assert buffer.ledger()["used"] == 0
    buffer.merge([make_commit({2: distinct_responses(2)}, round=1)], 0)
    assert [d.is_fresh for d in buffer.sample(2, 2, 0)] == [True, True]
    assert buffer.ledger()["fresh_short"] == 0


def test_rounds_merged_together_or_one_by_one_give_the_same_draws():
    options = {"pace": "off", "recency_prob": 0.5, "capacity_per_prompt": 3}
    commits = [
        make_commit(
            {9: [[1], [2]], 4: [[3], [4]]}, round=0, rewards={9: [0.0, 1.0], 4: [0.5, 0.2]}
        ),
        make_commit(
            {7: [[1], [2]], 4: [[5], [3]]}, round=1, rewards={7: [1.0, 1.0], 4: [0.1, 0.9]}
        ),
        make_commit({1: [[1], [2]], 9: [[7], [8]]}, round=2, rewards={1: [0.3, 0.4]}),
    ]
    together, apart = make_buffer(**options), make_buffer(**options)
    together.merge(commits, 0)
    for commit in commits:
        apart.merge([commit], 0)
    for step in range(20):
        first, second = (b.sample(2, 2, step) for b in (together, apart))
        assert [d.trajectory_ids for d in first] == [d.trajectory_ids for d in second]
    assert together.ledger() == apart.ledger()


def test_waiting_does_not_change_what_is_drawn():
    """The slot kinds are kept over a wait; drawing them anew would favour replay."""
    waiting, patient = (make_buffer(recency_prob=0.5, pace="trainer") for _ in range(2))
    old = make_commit({p: distinct_responses(2) for p in range(8)})
    new = make_commit({p: distinct_responses(2, 50) for p in range(8, 16)}, round=1)
    few = make_commit({99: distinct_responses(2)}, round=2)
    for buffer in (waiting, patient):
        buffer.merge([old], 0)
        buffer.merge([few], 1)
    for _ in range(50):
        assert waiting.sample(8, 2, 1) is None
    for buffer in (waiting, patient):
        buffer.merge([new], 1)
    assert drawn(waiting.sample(8, 2, 1)) == drawn(patient.sample(8, 2, 1))


def test_a_fresh_slot_with_too_few_responses_repeats_and_counts():
    buffer = make_buffer(recency_prob=1.0)
    buffer.merge([make_commit({1: distinct_responses(5)})], 0)
    buffer.merge([make_commit({1: distinct_responses(2, 50)}, version=1)], 1)
    (draw,) = buffer.sample(1, 5, 1)
    assert draw.is_fresh and draw.num_repeats == 3
    assert draw.trajectory_ids == (5, 6)
    assert sum(draw.weights) == 5 and min(draw.weights) >= 1
    assert (buffer.ledger()["repeats"], buffer.ledger()["used"]) == (3, 5)
    assert buffer.ledger()["trained_unique"] == 2


# --- replay slots --------------------------------------------------------------------------------


def test_replay_goes_through_all_prompts_before_any_comes_again():
    buffer = make_buffer()
    buffer.merge([make_commit({p: distinct_responses(2) for p in range(12)})], 0)
    for _ in range(5):
        epoch = [p for _ in range(3) for p in prompts_of(buffer.sample(4, 2, 0))]
        assert sorted(epoch) == list(range(12))


def test_a_fresh_draw_does_not_take_a_prompt_out_of_the_replay_epoch():
    for seed in range(20):
        buffer = make_buffer(recency_prob=1.0, seed=seed)
        buffer.merge([make_commit({p: distinct_responses(1) for p in (1, 2, 3)})], 0)
        buffer.merge([make_commit({3: distinct_responses(1, 50)})], 1)
        assert prompts_of(buffer.sample(1, 1, 1)) == [3]
        buffer._settings = dataclasses.replace(buffer._settings, recency_prob=0.0)
        epoch = [buffer.sample(1, 1, 1)[0].prompt.prompt_id for _ in range(3)]
        assert sorted(epoch) == [1, 2, 3]


def test_no_prompt_comes_twice_in_a_batch_across_the_end_of_an_epoch():
    buffer = make_buffer(recency_prob=0.4)
    buffer.merge([make_commit({p: distinct_responses(4) for p in range(7)})], 0)
    for step in range(1, 200):
        if step % 5 == 0:
            buffer.merge([make_commit({step % 7: distinct_responses(2, step)})], step)
        assert len(set(prompts_of(buffer.sample(5, 2, step)))) == 5


def test_fewer_prompts_than_slots_come_equally_often():
    buffer = make_buffer()
    buffer.merge([make_commit({p: distinct_responses(4) for p in range(3)})], 0)
    counts = Counter(p for _ in range(10) for p in prompts_of(buffer.sample(8, 2, 0)))
    assert sum(counts.values()) == 80
    assert max(counts.values()) - min(counts.values()) <= 10


def test_share_of_fresh_slots():
    """4,000 slots at m = 0.7 while fresh prompts never run out.

    The count is binomial with standard deviation 29; |count - 2800| > 145 (5 deviations) has
    probability 6e-7 for a correct buffer. The seed is fixed.
    """
    buffer = make_buffer(recency_prob=0.7)
    fresh = 0
    for step in range(200):
        responses = {20 * (step % 3) + i: [[step, 1], [step, 2]] for i in range(20)}
        buffer.merge([make_commit(responses, version=step)], step)
        fresh += sum(d.is_fresh for d in buffer.sample(20, 2, step))
    assert buffer.ledger()["fresh_short"] == 0
    assert abs(fresh - 2800) < 145


def test_log_weights_are_those_of_a_softmax():
    rewards = np.array([0.0, 1.0, 3.0])
    softmax = np.exp(rewards / 2) / np.exp(rewards / 2).sum()
    np.testing.assert_allclose(np.exp(response_log_weights(rewards, 2.0)), softmax, rtol=1e-12)
    np.testing.assert_allclose(np.exp(response_log_weights(rewards, math.inf)), 1 / 3, rtol=1e-12)


def test_responses_are_drawn_by_their_probability_without_replacement():
    """20,000 replay groups of 2 of 3 responses with p = (0.1, 0.3, 0.6).

    Drawing one by one without replacement leaves out response i with probability
    sum over the orders of the other two of p_a * p_b / (1 - p_a). A count is more than 5 standard
    deviations off with probability 6e-7 each, 2e-6 for the three. The seed is fixed.
    """
    p = np.array([0.1, 0.3, 0.6])
    buffer = make_buffer(priority_temperature=1.0)
    rewards = {1: np.log(p).tolist()}
    buffer.merge([make_commit({1: distinct_responses(3)}, rewards=rewards)], 0)
    num = 20_000
    left_out = Counter()
    for _ in range(num):
        (draw,) = buffer.sample(1, 2, 0)
        assert draw.num_repeats == 0 and len(set(draw.trajectory_ids)) == 2
        left_out[3 - sum(draw.trajectory_ids)] += 1
    for i in range(3):
        a, b = (j for j in range(3) if j != i)
        prob = p[a] * p[b] / (1 - p[a]) + p[b] * p[a] / (1 - p[b])
        deviation = math.sqrt(num * prob * (1 - prob))
        assert abs(left_out[i] - num * prob) < 5 * deviation, i


def test_repeats_are_drawn_by_the_same_probability():
    """6,000 groups of 3 + 2 repeats, p = (0.2, 0.8) on two responses: 18,000 repeats.

    5 standard deviations are 268; a false alarm has probability 6e-7. The seed is fixed.
    """
    buffer = make_buffer(priority_temperature=1.0)
    rewards = {1: np.log([0.2, 0.8]).tolist()}
    buffer.merge([make_commit({1: distinct_responses(2)}, rewards=rewards)], 0)
    repeats = Counter()
    for _ in range(6000):
        (draw,) = buffer.sample(1, 5, 0)
        assert draw.num_repeats == 3 and draw.trajectory_ids == (0, 1)
        repeats.update({0: draw.weights[0] - 1, 1: draw.weights[1] - 1})
    assert abs(repeats[1] - 0.8 * 18_000) < 268


# --- equal responses ----------------------------------------------------------------------------


def weights_of(draw):
    """Weight of each response by its first token."""
    return {
        int(y.response_tokens[0]): w for y, w in zip(draw.trajectories, draw.weights, strict=True)
    }


@pytest.mark.parametrize("recency_prob", [0.0, 1.0])
def test_copies_are_drawn_without_replacement(recency_prob):
    """4,000 groups of 3 of the 6 responses a a a b b c, fresh or replayed.

    Each set of 3 copies is as likely; P(weight of a = w) = C(3, w) C(3, 3 - w) / C(6, 3). A count
    is more than 5 standard deviations off with probability 6e-7 each. The seed is fixed.
    """
    rng = np.random.default_rng(0)
    num, found = 4000, Counter()
    for i in range(num):
        buffer = make_buffer(recency_prob=recency_prob, seed=int(rng.integers(2**31)))
        buffer.merge([make_commit({1: [[5], [6], [5], [7], [6], [5]]})], i)
        (draw,) = buffer.sample(1, 3, i)
        assert sum(draw.weights) == 3 and draw.num_repeats == 0
        assert draw.is_fresh == (recency_prob == 1.0)
        found[weights_of(draw).get(5, 0)] += 1
    for weight in range(4):
        prob = math.comb(3, weight) * math.comb(3, 3 - weight) / math.comb(6, 3)
        assert abs(found[weight] - num * prob) < 5 * math.sqrt(num * prob * (1 - prob)), weight


def test_a_group_of_all_responses_has_their_counts():
    buffer = make_buffer(recency_prob=1.0)
    buffer.merge([make_commit({1: [[5], [6], [5], [7], [6], [5]]})], 0)
    (draw,) = buffer.sample(1, 6, 0)
    assert draw.weights == (3, 2, 1) and draw.num_repeats == 0
    assert buffer.ledger()["used"] == buffer.ledger()["trained_unique"] == 6


def test_responses_of_another_version_reward_or_temperature_are_not_united():
    y = make_trajectory(1, [5, 6])
    others = [
        dataclasses.replace(y, reward=0.5),
        dataclasses.replace(y, version_min=-1),
        dataclasses.replace(y, version_max=7),
        dataclasses.replace(y, version_spans=((0, 1), (1, 1))),
        dataclasses.replace(y, sampling_temperature=1.5),
        dataclasses.replace(y, is_sampled=np.array([True, False])),
        dataclasses.replace(y, is_sampled=np.array([False, True])),
        dataclasses.replace(y, token_advantages=np.zeros(2, np.float32)),
    ]
    same = dataclasses.replace(y, searcher=3, round=9)  # another searcher's is the same response
    assert unite([y, *others, same]) == [[0, 9], *([i] for i in range(1, 9))]


def test_a_fresh_group_counts_the_newest_merge_alone():
    buffer = make_buffer(recency_prob=1.0)
    buffer.merge([make_commit({1: [[5], [5], [5], [6]]})], 0)
    buffer.merge([make_commit({1: [[5], [6], [6], [6]]}, version=1)], 1)
    (draw,) = buffer.sample(1, 4, 1)
    assert weights_of(draw) == {5: 1, 6: 3}
    assert {y.version_min for y in draw.trajectories} == {1}
    assert buffer.num_trajectories == 8


def test_never_drawn_copies_come_before_drawn_ones():
    for seed in range(20):
        buffer = make_buffer(recency_prob=0.0, seed=seed)
        buffer.merge([make_commit({1: [[5]] * 3 + [[6]] * 3})], 0)
        (first,) = buffer.sample(1, 4, 0)
        buffer._settings = dataclasses.replace(buffer._settings, recency_prob=1.0)
        (second,) = buffer.sample(1, 2, 0)
        # Four copies were drawn in replay: exactly the two others are fresh.
        left = {token: 3 - weights_of(first).get(token, 0) for token in (5, 6)}
        assert weights_of(second) == {token: n for token, n in left.items() if n}
        assert buffer.ledger()["trained_unique"] == 6


def test_repeats_for_lack_of_data_add_to_the_weights():
    buffer = make_buffer()
    buffer.merge([make_commit({1: [[5], [5], [6]]})], 0)
    (draw,) = buffer.sample(1, 8, 0)
    assert draw.num_repeats == 5 and sum(draw.weights) == 8 and len(draw.weights) == 2
    # Repeats are not further uses of a response.
    assert buffer.stats()["buffer/uses_mean"] == 1.0


# --- one prompt ----------------------------------------------------------------------------------


def test_a_single_prompt_fills_as_many_fresh_slots_as_it_has_unused_groups():
    buffer = make_buffer(recency_prob=1.0, capacity_per_prompt=100)
    buffer.merge([make_commit({0: [[i, 1] for i in range(10)]})], 0)
    draws = buffer.sample(4, 3, 0)
    # 10 // 3 = 3 groups; the fourth slot draws responses again.
    assert buffer.economy.unused_slots == 3
    assert (buffer.ledger()["fresh_short"], buffer.ledger()["fresh_recycled"]) == (0, 1)
    assert len({i for d in draws for i in d.trajectory_ids}) >= 9


def test_a_waiting_trainer_gets_a_whole_batch_of_one_prompt():
    buffer = make_buffer(recency_prob=1.0, pace="trainer", capacity_per_prompt=100)
    buffer.merge([make_commit({0: [[i, 1] for i in range(6)]})], 0)
    assert buffer.sample(4, 3, 0) is None
    buffer.merge([make_commit({0: [[i, 2] for i in range(6)]}, round=1)], 0)
    draws = buffer.sample(4, 3, 0)
    assert all(d.is_fresh for d in draws)
    assert len({i for d in draws for i in d.trajectory_ids}) == 12
