# SPDX-License-Identifier: Apache-2.0
"""What is drawn from the replay buffer: fresh slots, replay slots, and how often.

Frequencies of up to 40,000 draws are compared with exact probabilities by a chi-square test. The
false-alarm probability of each test is 1e-6; the seeds are fixed.
"""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from fake_groups import distinct_responses, make_buffer, make_groups, prompts_of
from scipy.stats import binom, chi2

from tba_jax.replay.buffer import TRIES

NUM = 40_000


def assert_frequencies(counts, probabilities):
    """Chi-square test of counts by category; all probabilities are positive."""
    assert set(counts) <= set(probabilities)
    num = sum(counts.values())
    expected = {key: num * p for key, p in probabilities.items()}
    statistic = sum((counts[key] - n) ** 2 / n for key, n in expected.items())
    assert statistic < chi2.isf(1e-6, len(expected) - 1), (counts, expected)


def uniform(keys):
    keys = list(keys)
    return dict.fromkeys(keys, 1 / len(keys))


def filled(responses, *, rewards=None, step=0, **settings):
    buffer = make_buffer(**settings)
    buffer.merge(make_groups(responses, rewards=rewards, version=step), step)
    return buffer


# --- replay slots --------------------------------------------------------------------------------


def test_replayed_prompts_are_uniform_and_distinct():
    """Ordered pairs of two slots over four prompts of one to four responses."""
    buffer = filled({p: distinct_responses(1 + p) for p in range(4)})
    counts = Counter(tuple(prompts_of(buffer.draw(2, 1, 0))) for _ in range(NUM // 2))
    assert_frequencies(counts, uniform(itertools.permutations(range(4), 2)))


def probabilities_of_sets(p, size):
    """Probability of each set of `size` draws one by one without replacement."""
    found = Counter()
    for order in itertools.permutations(range(len(p)), size):
        left, product = 1.0, 1.0
        for i in order:
            product *= p[i] / left
            left -= p[i]
        found[tuple(sorted(order))] += product
    return found


@pytest.mark.parametrize("temperature", [0.5, math.inf])
def test_replayed_responses_follow_the_softmax_of_rewards_without_replacement(temperature):
    rewards = np.array([0.0, 0.7, -0.5, 0.3])
    buffer = filled(
        {1: distinct_responses(4)},
        rewards={1: rewards.tolist()},
        priority_temperature=temperature,
    )
    counts = Counter(
        tuple(sorted(draw.ids)) for _ in range(NUM // 100) for draw in buffer.draw(100, 2, 0)
    )
    p = np.exp(rewards / temperature) / np.exp(rewards / temperature).sum()
    assert_frequencies(counts, probabilities_of_sets(p, 2))
    assert buffer.ledger()["repeats"] == 0


def test_repeats_follow_the_same_softmax():
    """Of 5 draws of two responses each is taken once; the other three have p = (0.2, 0.8)."""
    rewards = {1: np.log([0.2, 0.8]).tolist()}
    buffer = filled({1: distinct_responses(2)}, rewards=rewards, priority_temperature=1.0)
    counts = Counter()
    for draw in itertools.chain.from_iterable(buffer.draw(100, 5, 0) for _ in range(NUM // 300)):
        assert len(set(map(id, draw.trajectories))) == len(set(draw.ids)) == 2
        counts[draw.ids.count(1) - 1] += 1
    assert_frequencies(counts, {n: binom.pmf(n, 3, 0.8) for n in range(4)})
    assert buffer.ledger()["repeats"] == 3 * counts.total()


def test_fewer_prompts_than_slots_come_equally_often():
    buffer = filled({p: distinct_responses(4) for p in range(3)}, recency_prob=0.0)
    for _ in range(20):
        counts = Counter(prompts_of(buffer.draw(7, 2, 0)))
        assert sorted(counts.values()) == [2, 2, 3]


# --- fresh slots ---------------------------------------------------------------------------------


@pytest.mark.parametrize("pace", ["off", "trainer"])
def test_each_slot_is_fresh_with_probability_m_although_the_trainer_waits(pace):
    """The number of fresh slots of three, with m = 0.7: binomial.

    With pace=trainer groups arrive one at a time, so that a draw waits until there are enough.
    Were the kinds drawn again after a wait, batches with few fresh slots would be more frequent.
    """
    buffer = make_buffer(recency_prob=0.7, pace=pace, capacity_per_prompt=2)
    counts, prompt_ids = Counter(), itertools.cycle(range(9))
    buffer.merge(make_groups({9: [[1]]}), 0)
    for step in range(1, NUM // 10):
        if pace == "off":
            buffer.merge(make_groups({p: [[1]] for p in range(3)}, version=step), step)
        while (draws := buffer.draw(3, 1, step)) is None:
            buffer.merge(make_groups({next(prompt_ids): [[1]]}, version=step), step)
        counts[sum(d.is_fresh for d in draws)] += 1
    assert_frequencies(counts, {n: binom.pmf(n, 3, 0.7) for n in range(4)})
    assert buffer.ledger()["fresh_short"] == 0
    assert buffer.stats()["buffer/effective_m"] == pytest.approx(0.7, abs=0.02)


def test_fresh_groups_of_one_version_and_their_responses_are_uniform():
    """Which of three groups comes first, and which two of its four responses."""
    counts, responses = Counter(), {p: distinct_responses(4) for p in range(3)}
    groups = make_groups(responses)
    for seed in range(NUM // 25):
        buffer = make_buffer(seed=seed, recency_prob=1.0, max_staleness=5)
        buffer.merge(groups, 0)
        (draw,) = buffer.draw(1, 2, 0)
        counts[tuple(sorted(draw.ids))] += 1
    pairs = (
        (4 * p + a, 4 * p + b) for p in range(3) for a, b in itertools.combinations(range(4), 2)
    )
    assert_frequencies(counts, uniform(pairs))


@pytest.mark.parametrize(("bound", "num_fresh"), [(0, 3), (5, 12)])
def test_groups_of_the_newest_merge_are_drawn_again_uniformly(bound, num_fresh):
    older = {p: distinct_responses(2) for p in range(3, 12)}
    buffer = filled(older, recency_prob=1.0, max_staleness=bound)
    buffer.merge(make_groups({p: distinct_responses(2) for p in range(3)}, version=1), 1)
    assert sorted(prompts_of(buffer.draw(num_fresh, 2, 1))) == list(range(num_fresh))
    counts = Counter(prompts_of(buffer.draw(1, 2, 1))[0] for _ in range(NUM // 10))
    assert_frequencies(counts, uniform(range(3)))
    assert buffer.ledger()["fresh_recycled"] == NUM // 10
    # A group comes once in a batch; the fourth slot is a replay slot.
    draws = buffer.draw(4, 2, 1)
    assert [d.is_fresh for d in draws] == [True, True, True, False]
    assert len(set(prompts_of(draws))) == 4 and buffer.ledger()["fresh_short"] == 1


def test_under_a_bound_groups_wait_oldest_version_first():
    buffer = make_buffer(recency_prob=1.0, pace="trainer", max_staleness=5)
    # A slow searcher's group of version 1 comes with a later merge than those of version 3.
    for step, version, prompts in ((3, 3, (1, 2)), (4, 1, (3,)), (5, 4, (4, 5))):
        responses = {p: distinct_responses(2) for p in prompts}
        buffer.merge(make_groups(responses, version=version), step)
    assert buffer.num_fresh_groups == 5
    assert [sorted(prompts_of(buffer.draw(n, 2, 5))) for n in (1, 2, 2)] == [[3], [1, 2], [4, 5]]
    assert buffer.num_fresh_groups == 0 and buffer.draw(1, 2, 5) is None


def test_without_a_bound_only_the_newest_merge_is_fresh():
    buffer = filled({1: distinct_responses(2)}, step=5, recency_prob=1.0)
    buffer.merge(make_groups({2: distinct_responses(2)}), 5)  # the same merge goes on
    assert buffer.num_fresh_groups == 2
    buffer.merge(make_groups({3: []}, rejected={3: {"reward_nan": 1}}), 6)  # nothing new
    assert buffer.num_fresh_groups == 2
    buffer.merge(make_groups({3: distinct_responses(2)}), 7)
    assert prompts_of(buffer.draw(1, 2, 7)) == [3]


def test_no_drawn_response_exceeds_the_bound():
    """Fresh or replayed, at every step, with data of any age; older ones leave as `age`."""
    rng = np.random.default_rng(0)
    buffer, oldest = make_buffer(recency_prob=0.5, max_staleness=3), Counter()
    for step in range(500):
        version = max(0, step - int(rng.integers(6)))
        buffer.merge(make_groups({int(rng.integers(9)): [[1], [2]]}, version=version), step)
        for draw in buffer.draw(4, 2, step) or ():
            oldest[max(step - y.version_min for y in draw.trajectories)] += 1
    assert sorted(oldest) == [0, 1, 2, 3]
    buffer.draw(1, 1, 504)
    assert buffer.num_trajectories == buffer.num_fresh_groups == 0
    assert buffer.ledger()["evicted_age"] == buffer.ledger()["generated"] == 1000


def test_a_fresh_group_takes_unused_responses_first_and_repeats_if_there_are_too_few():
    rewards = {1: [9.0, 0.0, 0.0, 0.0, 0.0]}
    buffer = filled({1: distinct_responses(5)}, rewards=rewards, priority_temperature=0.01)
    assert buffer.draw(1, 1, 0)[0].ids == (0,)  # replay: with probability 1 - 4e-391
    buffer._settings = make_buffer(recency_prob=1.0)._settings
    (draw,) = buffer.draw(1, 4, 0)
    assert draw.is_fresh and sorted(draw.ids) == [1, 2, 3, 4]
    (draw,) = buffer.draw(1, 8, 0)  # from the newest merge again
    assert draw.is_fresh and sorted(Counter(draw.ids).values()) == [1, 1, 2, 2, 2]
    assert buffer.ledger()["repeats"] == 3 and buffer.ledger()["trained_unique"] == 5


def test_one_prompt_fills_a_slot_with_every_k_unused_responses():
    buffer = make_buffer(recency_prob=1.0, pace="trainer")
    buffer.merge(make_groups({0: [[i] for i in range(7)]}), 0)
    assert buffer.draw(4, 3, 0) is None
    buffer.merge(make_groups({0: [[i] for i in range(7, 13)]}), 0)
    draws = buffer.draw(4, 3, 0)
    assert all(d.is_fresh for d in draws)
    assert len({i for d in draws for i in d.ids}) == 12 and buffer.num_fresh_groups == 0


# --- groups of equal rewards ---------------------------------------------------------------------

# Prompts 1 to 3 always fail, 4 always succeeds, 5 to 7 do both.
REWARDS = {**dict.fromkeys((1, 2, 3), [0.0] * 4), 4: [1.0] * 4}
REWARDS |= {5: [0.0, 0.0, 0.0, 1.0], 6: [1.0, 0.0, 1.0, 0.0], 7: [1.0, 1.0, 0.0, 1.0]}


@pytest.mark.parametrize("recency_prob", [0.0, 1.0])
def test_slots_are_drawn_again_until_their_rewards_differ(recency_prob):
    responses = {p: distinct_responses(4) for p in REWARDS}
    options = {"rewards": REWARDS, "recency_prob": recency_prob}
    buffer = filled(responses, **options, equal_rewards="redraw")
    assert set(prompts_of(buffer.draw(3, 4, 0))) == {5, 6, 7}
    ledger = buffer.ledger()
    assert ledger["redrawn"] <= 4 and ledger["used"] == 4 * (3 + ledger["redrawn"])
    plain = filled(responses, **options)
    assert plain.draw(7, 4, 0) and plain.ledger()["redrawn"] == 0


def test_where_all_rewards_are_equal_the_last_draw_is_taken():
    buffer = filled({p: distinct_responses(4) for p in (1, 2)}, equal_rewards="redraw")
    assert len(buffer.draw(2, 4, 0)) == 2 and buffer.ledger()["redrawn"] == 2 * (TRIES - 1)


def test_groups_of_equal_rewards_leave_their_slots_empty():
    responses = {p: distinct_responses(4) for p in REWARDS}
    buffer = filled(responses, rewards=REWARDS, recency_prob=1.0, equal_rewards="skip")
    draws = buffer.draw(7, 4, 0)
    sizes = {d.prompt.prompt_id: (len(d.trajectories), len(d.ids)) for d in draws}
    assert sizes == {p: (0, 0) if p < 5 else (4, 4) for p in REWARDS}
    assert buffer.ledger()["skipped"] == 4
    # A batch of nothing else is trained on.
    buffer = filled({p: distinct_responses(4) for p in (1, 2)}, equal_rewards="skip")
    assert [len(d.ids) for d in buffer.draw(2, 4, 0)] == [4, 4] and not buffer.ledger()["skipped"]
