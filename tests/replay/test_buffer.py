# SPDX-License-Identifier: Apache-2.0
"""What is kept, that every response is accounted for, and that a saved buffer goes on the same."""

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
from fake_rounds import (
    assert_same_trajectory,
    distinct_responses,
    drawn,
    json_snapshot,
    make_buffer,
    make_commit,
    make_trajectory,
    prompts_of,
    stored,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tba_jax.replay.ledger import LedgerError
from tba_jax.replay.store import PROMPT_OVERHEAD_BYTES, RESPONSE_OVERHEAD_BYTES

# --- keeping -------------------------------------------------------------------------------------


def test_a_draw_gives_back_exactly_what_was_merged():
    parts = {"accuracy": 0.1, "format": -1e-17}
    y = make_trajectory(3, [9, 150_000, 2], reward=1 / 3, version=4, round=7, searcher=2)
    y = dataclasses.replace(y, reward_parts=parts, reference_logprob=float("nan"))
    z = make_trajectory(3, [1], reward=-2.0, version=5)
    commit = make_commit({3: [[0]]})
    group = dataclasses.replace(commit.groups[0], trajectories=(y, z))
    buffer = make_buffer()
    buffer.merge([dataclasses.replace(commit, groups=(group,), generated=2)], 0)
    (draw,) = buffer.sample(1, 2, 0)
    back_y, back_z = sorted(draw.trajectories, key=lambda t: -t.reward)
    assert math.isnan(back_y.reference_logprob)
    assert_same_trajectory(
        dataclasses.replace(back_y, reference_logprob=0.0),
        dataclasses.replace(y, reference_logprob=0.0),
    )
    assert_same_trajectory(back_z, z)
    assert draw.prompt is group.prompt
    assert not back_y.response_tokens.flags.writeable


def test_capacity_per_prompt_evicts_the_oldest():
    buffer = make_buffer(capacity_per_prompt=3)
    # Version 1 arrives before version 0: age is the policy version, not the time of arrival.
    buffer.merge([make_commit({1: [[4], [5]]}, version=1, rewards={1: [0.9, 0.1]})], 1)
    buffer.merge([make_commit({1: [[1], [2]]}, version=0, rewards={1: [0.8, 0.0]})], 1)
    buffer.merge([make_commit({1: [[6]], 2: [[1]]}, version=2, rewards={1: [0.5]})], 2)
    assert stored(buffer) == [(1, (4,)), (1, (5,)), (1, (6,)), (2, (1,))]
    assert buffer.ledger()["evicted_capacity"] == 2


def test_the_byte_bound_evicts_the_oldest_of_the_whole_buffer():
    """Against a sort of everything, over 40 merges."""
    rng = np.random.default_rng(0)
    # At most 3 tokens of 4 bytes each, and text.
    prompt_bytes = 5 * (3 * 4 + len("prompt 0") + PROMPT_OVERHEAD_BYTES)
    limit = 20 * (16 + RESPONSE_OVERHEAD_BYTES) + prompt_bytes
    buffer = make_buffer(max_bytes=limit)
    kept = []  # (sort key, prompt, tokens)
    serial = 0
    for step in range(40):
        responses = {int(p): distinct_responses(2, start=2 * step) for p in range(5)}
        rewards = {p: rng.integers(-3, 3, 2).astype(float).tolist() for p in responses}
        version = int(rng.integers(0, 5))
        buffer.merge([make_commit(responses, version=version, rewards=rewards)], step)
        for p, token_lists in responses.items():
            for tokens in token_lists:
                kept.append(((version, serial), p, tuple(tokens)))
                serial += 1
        kept.sort()
        while len(kept) * (16 + RESPONSE_OVERHEAD_BYTES) + _bytes_of_prompts(kept) > limit:
            kept.pop(0)
        assert stored(buffer) == sorted((p, tokens) for _, p, tokens in kept)
        assert buffer.num_bytes <= limit
        buffer.check_ledger(0)


def _bytes_of_prompts(kept):
    prompts = {p for _, p, _ in kept}
    return sum(4 * (2 + p % 3) + len(f"prompt {p}") + PROMPT_OVERHEAD_BYTES for p in prompts)


# --- the ledger ----------------------------------------------------------------------------------


def test_rejected_responses_are_counted_by_reason():
    buffer = make_buffer()
    rejected = {1: {"reward_timeout": 2}, 2: {"reward_timeout": 1, "reward_nan": 1}}
    counts = buffer.merge([make_commit({1: [[5]], 2: []}, rejected=rejected)], 0)
    assert (counts["generated"], counts["stored"], counts["rejected"]) == (5, 1, 4)
    assert buffer.ledger()["rejected"] == {"reward_nan": 1, "reward_timeout": 3}
    assert buffer.num_prompts == 1
    buffer.check_ledger(0)


def test_the_ledger_check_sees_a_lost_and_an_invented_response():
    buffer = make_buffer()
    buffer.merge([make_commit({1: distinct_responses(3)})], 0)
    buffer.check_ledger(4, outbox_generated=7)
    with pytest.raises(LedgerError, match="8 responses were generated, but 7 are accounted for"):
        buffer.check_ledger(4, outbox_generated=8)
    buffer._contents.store.num_trajectories += 1
    with pytest.raises(LedgerError, match="3 stored .counted 4."):
        buffer.check_ledger(0)
    buffer._contents.store.num_trajectories -= 1
    buffer._contents.ledger.counters["generated"] -= 1
    with pytest.raises(LedgerError, match="2 responses were generated, but 3 .* 3 stored"):
        buffer.check_ledger(0)


def test_a_refused_merge_changes_nothing():
    buffer = make_buffer()
    good = make_commit({1: distinct_responses(3)})
    bad = make_commit({2: [[1]]}, rewards={2: [float("nan")]})
    with pytest.raises(ValueError, match="reward is nan"):
        buffer.merge([good, bad], 0)
    assert buffer.num_trajectories == 0
    assert buffer.ledger()["generated"] == 0


def test_stats_are_those_of_what_is_stored():
    buffer = make_buffer(capacity_per_prompt=3)
    assert buffer.stats()["buffer/reward_mean"] == 0.0
    rewards = {1: [1.0, 2.0, 3.0, 4.0], 2: [0.5, 0.5]}
    responses = {1: distinct_responses(4), 2: [[1], [1]]}
    buffer.merge([make_commit(responses, version=2, rewards=rewards)], 4)
    buffer.sample(1, 2, 5)
    stats = buffer.stats()
    assert stats["buffer/num_trajectories"] == 5 and stats["buffer/num_prompts"] == 2
    assert stats["buffer/reward_mean"] == (2.0 + 3.0 + 4.0 + 0.5 + 0.5) / 5
    assert stats["buffer/age_mean"] == 3.0
    assert stats["buffer/replay_ratio"] == 2 / 6


# --- saving, and everything together -------------------------------------------------------------


OPTIONS = st.fixed_dictionaries(
    {
        "recency_prob": st.sampled_from([0.0, 0.5, 1.0]),
        "pace": st.sampled_from(["off", "trainer"]),
        "priority_temperature": st.sampled_from([0.5, math.inf]),
        "capacity_per_prompt": st.integers(3, 6),
        "max_bytes": st.sampled_from([2500, 6000, 2**30]),
        "max_staleness": st.sampled_from([0, 1]),
    }
)
ROUNDS = st.lists(
    st.dictionaries(
        st.integers(0, 5),
        st.lists(st.tuples(st.integers(0, 4), st.integers(-2, 2)), max_size=4),
        max_size=4,
    ),
    min_size=3,
    max_size=12,
)


def _commit_of(round_, number):
    return make_commit(
        {p: [[token, 9] for token, _ in ys] for p, ys in round_.items()},
        round=number,
        version=max(0, number - 1),
        rewards={p: [float(r) for _, r in ys] for p, ys in round_.items()},
        rejected={p: {"reward_none": 1} for p in round_ if p == 3},
    )


@settings(max_examples=150, deadline=None)
@given(OPTIONS, ROUNDS)
def test_invariants_hold_and_a_restored_buffer_draws_the_same(options, rounds):
    buffer = make_buffer(**options)
    half = len(rounds) // 2
    twin = None
    generated = 0
    for step, round_ in enumerate(rounds):
        if step == half:
            twin = make_buffer(**(options | {"seed": 99}))
            twin.restore(json_snapshot(buffer))
        commit = _commit_of(round_, step)
        generated += commit.generated
        before = buffer.num_trajectories
        counts = buffer.merge([commit], step)
        assert counts["stored"] == buffer.num_trajectories - before
        buffer.check_ledger(0, outbox_generated=generated)
        contents = stored(buffer)
        arrays = buffer.state().arrays
        assert len(arrays["row_id"]) == buffer.num_trajectories
        assert (arrays["row_uses"] >= 0).all()
        per_prompt = Counter(p for p, _ in contents)
        assert len(per_prompt) == buffer.num_prompts
        assert max(per_prompt.values(), default=0) <= options["capacity_per_prompt"]
        assert buffer.num_bytes <= options["max_bytes"]
        for attempt in range(2):
            num_prompts = buffer.num_prompts
            draws = buffer.sample(3, 3, step)
            buffer.check_ledger(0, outbox_generated=generated)
            if draws is not None:
                _check_draws(draws, num_prompts)
            if twin is not None:
                if attempt == 0:
                    twin.merge([commit], step)
                twins = twin.sample(3, 3, step)
                assert (twins is None) == (draws is None)
                if twins is not None:
                    assert drawn(twins) == drawn(draws)
        if twin is not None:
            assert twin.ledger() == buffer.ledger()
            assert twin.stats() == buffer.stats()


def _check_draws(draws, num_prompts):
    assert len(draws) == 3
    if num_prompts >= 3:
        assert len(set(prompts_of(draws))) == 3
    for d in draws:
        assert len(d.trajectories) == len(set(d.trajectory_ids)) == len(d.weights)
        assert sum(d.weights) == 3 and min(d.weights) >= 1
        assert {y.prompt_id for y in d.trajectories} == {d.prompt.prompt_id}


def test_restore_replaces_what_was_there():
    buffer = make_buffer(max_bytes=3000, seed=(3, 4))
    other = make_buffer(max_bytes=3000, seed=5)
    rng = np.random.default_rng(0)
    for step in range(12):
        for target in (buffer, other):
            rewards = {1: rng.normal(size=4).tolist()}
            commit = make_commit({1: distinct_responses(4, 4 * step)}, rewards=rewards)
            target.merge([commit], step)
            target.sample(2, 2, step)
    other.restore(json_snapshot(buffer))
    assert stored(other) == stored(buffer)
    assert other.ledger() == buffer.ledger()
    assert other.stats() == buffer.stats()
    later = make_commit({2: distinct_responses(4)}, rewards={2: [9.0, 9.0, -9.0, 9.0]})
    for target in (buffer, other):
        target.merge([later], 12)
    assert stored(other) == stored(buffer)
    assert drawn(other.sample(2, 2, 12)) == drawn(buffer.sample(2, 2, 12))


def test_a_sync_that_was_saved_in_the_middle_goes_on():
    buffer = make_buffer(recency_prob=1.0)
    buffer.merge([make_commit({1: distinct_responses(2)})], 5)
    other = make_buffer(recency_prob=1.0)
    other.restore(json_snapshot(buffer))
    assert other.stats() == buffer.stats()
    other.merge([make_commit({2: distinct_responses(2)}, round=1)], 5)
    assert [d.is_fresh for d in other.sample(2, 2, 5)] == [True, True]


def test_an_empty_buffer_can_be_saved():
    buffer = make_buffer()
    buffer.restore(json_snapshot(make_buffer()))
    buffer.merge([make_commit({1: distinct_responses(2)})], 0)
    assert len(buffer.sample(1, 2, 0)) == 1
