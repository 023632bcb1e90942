# SPDX-License-Identifier: Apache-2.0
"""What the buffer says about the searchers' work: shares, ranks and warnings."""

import dataclasses
import json
import re

import numpy as np
import pytest
from fake_rounds import distinct_responses, json_snapshot, make_buffer, make_commit

from tba_jax.replay.config import ReplaySettings
from tba_jax.replay.ledger import Economy


def responses_of(length, count, start=0):
    """`count` different responses of so many tokens."""
    return [[start + i] * length for i in range(count)]


def test_a_group_is_trained_waiting_or_lost():
    buffer = make_buffer(recency_prob=1.0)
    for step, prompts in enumerate(((1, 2, 3, 4), (5, 6, 7))):
        responses = {p: distinct_responses(2) for p in prompts}
        buffer.merge([make_commit(responses, version=step, round=step)], step)
        if step == 0:
            buffer.sample(1, 2, step)
    # One was trained, three fell out of the window, three wait.
    assert buffer.economy.merged_groups == 7
    assert buffer.stats()["buffer/trained_share"] == 1 / 4
    buffer.sample(2, 2, 1)
    assert buffer.stats()["buffer/trained_share"] == 3 / 6


def test_a_group_that_replay_reaches_while_it_waits_is_trained_once():
    buffer = make_buffer(recency_prob=0.0)
    buffer.merge([make_commit({1: distinct_responses(4)})], 0)
    buffer.sample(1, 2, 0)
    assert (buffer.num_fresh_groups, buffer.stats()["buffer/trained_share"]) == (1, 1.0)
    for _ in range(20):
        buffer.sample(1, 2, 0)
    assert (buffer.num_fresh_groups, buffer.economy.trained_groups) == (0, 1)


def test_replay_of_what_was_forgotten_is_no_training_of_its_group():
    buffer = make_buffer(recency_prob=0.0)
    buffer.merge([make_commit({1: distinct_responses(2)})], 0)
    buffer.merge([make_commit({2: distinct_responses(2)}, round=1)], 1)
    buffer.sample(2, 2, 1)
    assert buffer.ledger()["trained_unique"] == 4
    assert buffer.stats()["buffer/trained_share"] == 0.5


@pytest.mark.parametrize(
    ("trained", "rank"),
    [((1, 2, 3), 0.5), ((1,), 1 / 6), ((3,), 5 / 6), ((1, 2), 1 / 3), ((2, 3), 2 / 3)],
)
def test_length_rank_is_that_of_the_prompts_that_were_trained(trained, rank):
    buffer = make_buffer(recency_prob=1.0)
    # Two responses of each length; prompt p has length p.
    lengths = {p: responses_of(p, 2) for p in (1, 2, 3) if p not in trained}
    buffer.merge([make_commit(lengths)] if lengths else [], 0)
    wanted = {p: responses_of(p, 2) for p in trained}
    buffer.merge([make_commit(wanted, round=1)], 1)
    buffer.sample(len(trained), 2, 1)
    assert buffer.stats()["buffer/length_rank"] == pytest.approx(rank, abs=1e-12)


def test_length_rank_against_scipys_ranks():
    from scipy.stats import rankdata

    rng = np.random.default_rng(0)
    came_in = rng.integers(1, 40, 500)
    is_trained = rng.random(500) < came_in / 40  # long ones are preferred
    economy = Economy()
    economy.came_in.update(came_in.tolist())
    economy.trained.update(came_in[is_trained].tolist())
    ranks = (rankdata(came_in) - 0.5) / 500
    assert economy.length_rank() == pytest.approx(ranks[is_trained].mean(), abs=1e-12)
    assert economy.length_rank() > 0.6


def test_a_response_counts_as_trained_once_and_every_copy_does():
    buffer = make_buffer(recency_prob=1.0)
    buffer.merge([make_commit({1: [[5], [5], [5], [6, 7]]})], 0)
    for _ in range(3):
        buffer.sample(1, 4, 0)
    assert buffer.economy.trained == buffer.economy.came_in == {1: 3, 2: 1}
    assert buffer.ledger()["trained_unique"] == 4


def test_effective_m_counts_slots_with_newest_data():
    buffer = make_buffer(recency_prob=0.0)
    buffer.merge([make_commit({p: distinct_responses(2) for p in range(6)})], 0)
    buffer.sample(3, 2, 0)
    assert buffer.stats()["buffer/effective_m"] == 0.0
    buffer = make_buffer(recency_prob=1.0)
    buffer.merge([make_commit({p: distinct_responses(2) for p in range(6)})], 0)
    for _ in range(4):
        buffer.sample(3, 2, 0)
    economy = buffer.economy
    assert (economy.batches, economy.slots, economy.fresh_slots) == (4, 12, 12)
    assert (economy.unused_slots, economy.recycled_slots) == (6, 6)
    assert buffer.stats()["buffer/effective_m"] == 1.0


def test_before_there_is_data_nothing_is_wasted():
    stats = make_buffer().stats()
    names = ("trained_share", "length_rank", "effective_m", "late_share")
    assert [stats[f"buffer/{name}"] for name in names] == [1.0, 0.5, 0.0, 0.0]


def run_short(num_batches, **settings):
    """Three prompts a merge, and batches of two."""
    buffer = make_buffer(recency_prob=1.0, **settings)
    for step in range(num_batches):
        commit = make_commit({3 * step + n: responses_of(2, 2) for n in (1, 2, 3)}, round=step)
        buffer.merge([commit], step)
        buffer.sample(2, 2, step)
    return buffer


def test_warnings_say_what_to_change_after_twenty_batches():
    assert run_short(19).warnings() == []
    (waste,) = run_short(20).warnings()
    # 40 of the 59 whose turn is over.
    assert waste.startswith("only 68% of the searchers' groups") and "replay.max_staleness" in waste
    assert run_short(20, max_staleness=100).warnings() == []


def test_warnings_of_lengths_and_of_m():
    economy, settings = Economy(), ReplaySettings(recency_prob=0.95)
    economy.batches, economy.slots, economy.unused_slots = 20, 100, 95
    economy.merged_groups = economy.trained_groups = 95
    economy.came_in.update({1: 50, 9: 50})
    economy.trained.update({1: 50, 9: 50})
    assert economy.warnings(0, settings) == []
    economy.trained.subtract({9: 20})
    (short,) = economy.warnings(0, settings)
    assert short.startswith("training prefers short responses") and "0.44" in short
    economy.trained.subtract({1: 25})
    assert economy.warnings(0, settings) == []
    economy.unused_slots = 80
    (m,) = economy.warnings(0, settings)
    assert "0.80 of the slots" in m
    economy.recycled_slots = 15
    assert economy.warnings(0, settings) == []
    # More newest data than asked for is chance; no setting is wrong.
    assert economy.warnings(0, ReplaySettings(recency_prob=0.85)) == []


@pytest.mark.parametrize("pace", ["off", "trainer"])
@pytest.mark.parametrize(
    "bound",
    [
        {},
        {"max_staleness": 4},
        {"max_staleness": 4, "late": "wait", "pace": "trainer"},
    ],
    ids=lambda bound: " ".join(map(str, bound.values())),
)
def test_every_setting_that_a_warning_advises_is_new_and_accepted(bound, pace):
    settings = ReplaySettings(**{"recency_prob": 0.5, "pace": pace, **bound})
    economy = Economy()
    economy.batches, economy.slots, economy.merged_groups, economy.trained_groups = 20, 40, 40, 10
    economy.came_in.update({1: 50, 9: 50})
    economy.trained.update({1: 50})
    lines = economy.warnings(0, settings)
    assert len(lines) == 3
    for line in lines:
        given = dict(re.findall(r"--config\.replay\.(\w+)=(\w+)", line))
        given = {name: value == "True" or value for name, value in given.items()}
        # Settings to raise are named without a value.
        raised = set(re.findall(r"replay\.(\w+)", line)) - set(given) - {"recency_prob"}
        advised = given | {name: getattr(settings, name) + 1 for name in raised}
        assert advised or line.endswith("Add searchers.")
        for name, value in advised.items():
            changed = dataclasses.replace(settings, **{name: value})
            changed.check()
            assert changed != settings


def test_the_counts_are_saved():
    buffer = run_short(5, max_staleness=1)
    state = json_snapshot(buffer)[1]["economy"]
    restored = Economy.restored(json.loads(json.dumps(state)))
    assert vars(restored) == vars(buffer.economy)
