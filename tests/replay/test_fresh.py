# SPDX-License-Identifier: Apache-2.0
"""Fresh slots under a bound on staleness, and where nothing unused is left."""

import numpy as np
from fake_rounds import (
    distinct_responses,
    drawn,
    json_snapshot,
    make_buffer,
    make_commit,
)

from tba_jax.flow.state import PartState
from tba_jax.replay.fresh import KEPT_MERGES, FreshGroups


def fresh_prompts(draws):
    return [d.prompt.prompt_id for d in draws if d.is_fresh]


# --- a queue -------------------------------------------------------------------------------------


def test_under_a_bound_everything_unused_is_fresh_oldest_version_first():
    buffer = make_buffer(recency_prob=1.0, max_staleness=5)
    # A slow searcher's group of version 1 comes with a later merge than version 3's.
    for step, version, prompts in ((3, 3, (1, 2)), (4, 1, (3,)), (5, 4, (4, 5))):
        responses = {p: distinct_responses(2) for p in prompts}
        buffer.merge([make_commit(responses, version=version)], step)
    assert buffer.num_fresh_groups == 5
    assert fresh_prompts(buffer.sample(1, 2, 5)) == [3]
    assert set(fresh_prompts(buffer.sample(2, 2, 5))) == {1, 2}
    assert set(fresh_prompts(buffer.sample(2, 2, 5))) == {4, 5}
    assert buffer.num_fresh_groups == 0
    assert buffer.economy.trained_groups == buffer.economy.merged_groups == 5


def test_versions_of_one_age_are_drawn_in_random_order():
    """Which of two groups of one version, of different merges, comes first: 200 draws.

    A count of fair draws is more than 5 standard deviations (35) off with probability 6e-7.
    """
    first = []
    for seed in range(200):
        buffer = make_buffer(recency_prob=1.0, max_staleness=5, seed=seed)
        buffer.merge([make_commit({1: distinct_responses(2)}, version=0)], 1)
        buffer.merge([make_commit({2: distinct_responses(2)}, version=0, round=1)], 2)
        first += fresh_prompts(buffer.sample(1, 2, 2))
    assert abs(first.count(1) - 100) < 35


def test_a_prompt_waits_with_each_of_its_groups_but_comes_once_in_a_batch():
    buffer = make_buffer(recency_prob=1.0, max_staleness=5)
    buffer.merge([make_commit({1: distinct_responses(2), 2: distinct_responses(2)})], 0)
    buffer.merge([make_commit({1: distinct_responses(2)}, round=1)], 1)
    buffer.merge([make_commit({1: distinct_responses(2)}, version=1, round=2)], 2)
    assert sorted(fresh_prompts(buffer.sample(2, 2, 2))) == [1, 2]
    batches = [buffer.sample(1, 2, 2) for _ in range(2)]
    assert fresh_prompts(batches[0]) == fresh_prompts(batches[1]) == [1]
    assert [b[0].trajectories[0].version_min for b in batches] == [0, 1]


def test_what_is_late_is_trained_and_counted():
    buffer = make_buffer(recency_prob=1.0, pace="trainer", max_staleness=2)
    buffer.merge([make_commit({1: distinct_responses(2)}, version=1)], 4)
    buffer.merge([make_commit({2: distinct_responses(2)}, version=3)], 4)
    assert fresh_prompts(buffer.sample(1, 2, 4)) == [1]
    assert fresh_prompts(buffer.sample(1, 2, 4)) == [2]
    assert buffer.stats()["buffer/late_share"] == 0.5
    assert buffer.economy.staleness == {3: 2, 1: 2}


def test_a_restored_queue_draws_the_same():
    options = {"recency_prob": 0.8, "max_staleness": 3}
    buffer, twin = make_buffer(**options), make_buffer(**options, seed=9)
    rng = np.random.default_rng(0)
    for step in range(30):
        if step == 15:
            twin.restore(json_snapshot(buffer))
        for number in range(3):
            responses = {int(p): distinct_responses(3, 3 * step) for p in rng.choice(20, 3)}
            version = max(0, step - int(rng.integers(5)))
            commit = make_commit(responses, version=version, round=3 * step + number)
            for which in (buffer, twin)[: 1 + (step >= 15)]:
                which.merge([commit], step)
        draws = buffer.sample(4, 2, step)
        if step >= 15:
            assert drawn(twin.sample(4, 2, step)) == drawn(draws)
            assert twin.ledger() == buffer.ledger() and twin.stats() == buffer.stats()


def test_a_long_queue_costs_a_draw_no_more_than_a_short_one():
    """As many pools are looked at, whatever waits behind the first."""

    class Counted(list):
        def __iter__(self):
            for item in super().__iter__():
                looked_at.append(item)
                yield item

    looked_at = []
    groups, rng = FreshGroups(keeps_older=True), np.random.default_rng(0)
    for merged in range(1000):
        for prompt_id in range(4):
            groups.put(merged, 4 * merged + prompt_id, 2, version=merged)
    groups._order = Counted(groups._order)
    found = [groups.draw(rng, (), 0) for _ in range(400)]
    assert [g.merged for g in found] == [i // 4 for i in range(400)]
    assert len(looked_at) == 400
    assert len(groups) == groups.count(0) == groups.num_untouched == 3600


# --- drawn again ---------------------------------------------------------------------------------


def test_a_short_fresh_slot_draws_the_newest_merges_again():
    buffer = make_buffer(recency_prob=1.0)
    buffer.merge([make_commit({p: distinct_responses(2) for p in range(10, 20)})], 0)
    newest = {p: distinct_responses(2) for p in (1, 2, 3)}
    buffer.merge([make_commit(newest, version=1, round=1)], 1)
    assert sorted(fresh_prompts(buffer.sample(2, 2, 1))) != []
    # One prompt is unused; the two others come again, and then one of the merge before.
    draws = buffer.sample(4, 2, 1)
    assert [p for p in sorted(fresh_prompts(draws)) if p < 10] == [1, 2, 3]
    assert all(d.is_fresh for d in draws)
    assert (buffer.ledger()["fresh_recycled"], buffer.ledger()["fresh_short"]) == (3, 0)
    # Every prompt comes as often.
    again = [p for _ in range(6) for p in fresh_prompts(buffer.sample(2, 2, 1))]
    assert {again.count(p) for p in (1, 2, 3)} == {4}
    assert buffer.stats()["buffer/effective_m"] == 1.0


def test_what_can_be_drawn_again_does_not_reach_far_back():
    """Nine merges of a prompt each: of the oldest nothing is newest data."""
    buffer = make_buffer(recency_prob=1.0)
    for step in range(KEPT_MERGES + 1):
        buffer.merge([make_commit({step: distinct_responses(2)}, version=step, round=step)], step)
    draws = buffer.sample(KEPT_MERGES + 1, 2, KEPT_MERGES)
    assert [d.prompt.prompt_id for d in draws if not d.is_fresh] == [0]
    assert buffer.ledger()["fresh_short"] == 1
    arrays, meta = json_snapshot(buffer)
    other = make_buffer(seed=3, recency_prob=1.0)
    other.restore(PartState(arrays, meta))
    for _ in range(3):
        assert drawn(buffer.sample(5, 2, KEPT_MERGES)) == drawn(other.sample(5, 2, KEPT_MERGES))


def test_a_waiting_trainer_recycles_nothing():
    buffer = make_buffer(recency_prob=1.0, pace="trainer")
    buffer.merge([make_commit({1: distinct_responses(2)})], 0)
    assert buffer.is_ready(1, 2, 0)
    assert buffer.sample(1, 2, 0) is not None
    assert buffer.sample(1, 2, 0) is None
    assert not buffer.is_ready(1, 2, 0)


def test_a_task_of_one_prompt_recycles_it_in_every_slot():
    buffer = make_buffer(recency_prob=1.0)
    buffer.merge([make_commit({0: distinct_responses(8)})], 0)
    buffer.merge([make_commit({0: distinct_responses(8, 50)}, version=1, round=1)], 1)
    draws = buffer.sample(4, 4, 1)
    assert all(d.is_fresh for d in draws)
    assert {y.version_min for d in draws for y in d.trajectories} == {1}
    assert buffer.ledger()["fresh_recycled"] == 2


def test_what_is_evicted_is_not_drawn_again():
    buffer = make_buffer(recency_prob=1.0, capacity_per_prompt=2)
    buffer.merge([make_commit({1: distinct_responses(2), 2: distinct_responses(2)})], 5)
    buffer.sample(2, 2, 5)
    # Newer versions push the newest merge's rows of prompt 1 out, by another merge at that step.
    buffer.merge([make_commit({1: distinct_responses(2, 50)}, version=3, round=1)], 5)
    (draw,) = (d for d in buffer.sample(2, 2, 5) if d.prompt.prompt_id == 1)
    assert {y.version_min for y in draw.trajectories} == {3}
    buffer._contents._evict(buffer._contents.store.indices(2)[0].item(), "bytes")
    buffer._contents._evict(buffer._contents.store.indices(2)[0].item(), "bytes")
    assert fresh_prompts(buffer.sample(2, 2, 5)) == [1, 1]
