# SPDX-License-Identifier: Apache-2.0
"""Groups that teach nothing are drawn again, where that is asked for."""

import pytest
from fake_rounds import distinct_responses, make_buffer, make_commit, prompts_of

from tba_jax.replay.draws import TRIES

# Prompts 1 to 3 always fail, 4 always succeeds, 5 to 7 do both.
REWARDS = {**dict.fromkeys((1, 2, 3), [0.0] * 4), 4: [1.0] * 4}
REWARDS |= {5: [0.0, 0.0, 0.0, 1.0], 6: [1.0, 0.0, 1.0, 0.0], 7: [1.0, 1.0, 0.0, 1.0]}


def filled(**settings):
    buffer = make_buffer(**settings)
    buffer.merge([make_commit({p: distinct_responses(4) for p in REWARDS}, rewards=REWARDS)], 0)
    return buffer


@pytest.mark.parametrize("recency_prob", [0.0, 1.0])
def test_slots_are_drawn_again_until_their_rewards_differ(recency_prob):
    buffer = filled(recency_prob=recency_prob, equal_rewards="redraw")
    wanted = {5, 6, 7}
    draws = buffer.sample(len(wanted), 4, 0)
    assert set(prompts_of(draws)) == wanted
    buffer.check_ledger(0)
    # Everything else that came before the last wanted one was used, and counted.
    assert buffer.ledger()["redrawn"] <= len(REWARDS) - len(wanted)
    assert buffer.ledger()["used"] == 4 * (len(wanted) + buffer.ledger()["redrawn"])


def test_where_nothing_is_wanted_a_batch_comes_all_the_same():
    buffer = make_buffer(equal_rewards="redraw")
    buffer.merge([make_commit({1: distinct_responses(4), 2: distinct_responses(4)})], 0)
    draws = buffer.sample(2, 4, 0)
    assert set(prompts_of(draws)) <= {1, 2} and len(draws) == 2
    assert buffer.ledger()["redrawn"] == 2 * (TRIES - 1)


def test_by_default_nothing_is_drawn_twice():
    plain = filled(recency_prob=0.5)
    assert plain.sample(7, 4, 0) and plain.ledger()["redrawn"] == 0


def test_groups_of_equal_rewards_leave_their_slots_empty():
    buffer = filled(recency_prob=1.0, equal_rewards="skip")
    draws = buffer.sample(7, 4, 0)
    assert sorted(prompts_of(draws)) == sorted(REWARDS)
    for draw in draws:
        is_empty = draw.prompt.prompt_id < 5
        assert (sum(draw.weights), len(draw.trajectory_ids)) == ((0, 0) if is_empty else (4, 4))
    ledger = buffer.ledger()
    assert (ledger["skipped"], ledger["redrawn"], ledger["used"]) == (4, 0, 28)
    assert buffer.stats()["buffer/skipped"] == 4
    buffer.check_ledger(0)


def test_a_batch_of_nothing_else_is_trained_on():
    buffer = make_buffer(equal_rewards="skip")
    buffer.merge([make_commit({1: distinct_responses(4), 2: distinct_responses(4)})], 0)
    assert [sum(draw.weights) for draw in buffer.sample(2, 4, 0)] == [4, 4]
    assert buffer.ledger()["skipped"] == 0
