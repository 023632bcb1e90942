# SPDX-License-Identifier: Apache-2.0
"""What the replay buffer keeps, that it counts every response, and that it can be saved."""

import dataclasses
import itertools
import threading

import numpy as np
import pytest
from fake_groups import (
    assert_same_trajectory,
    distinct_responses,
    drawn,
    json_snapshot,
    make_buffer,
    make_groups,
    make_prompt,
    make_trajectory,
    stored,
)
from scipy.stats import rankdata

from tba_jax.flow.trajectory import Group
from tba_jax.replay.config import PROMPT_OVERHEAD_BYTES, RESPONSE_OVERHEAD_BYTES, ReplaySettings
from tba_jax.replay.ledger import Ledger, LedgerError
from tba_jax.replay.records import from_snapshot

# --- contents ------------------------------------------------------------------------------------


def varied_trajectories():
    """Trajectories with every optional field, to prompt 3."""
    y = make_trajectory(3, range(1, 38), reward=1 / 3, version=4, ticket=7, searcher=2)
    return [
        make_trajectory(3, [150_000], reward=-2.0, version=5),
        dataclasses.replace(y, reward_parts={"accuracy": 0.1, "format": -1e-17}),
        dataclasses.replace(y, is_sampled=np.arange(37) % 3 > 0, path_lengths=(30, 7)),
        dataclasses.replace(y, version_max=6),
        dataclasses.replace(y, token_advantages=np.linspace(-1, 1, 37, dtype=np.float32)),
        dataclasses.replace(
            y, reference_token_logprobs=np.linspace(-9, 0, 37, dtype=np.float32), reward=0.0
        ),
    ]


def test_a_draw_gives_back_exactly_what_was_merged():
    ys = varied_trajectories()
    for restores in (False, True):
        buffer = make_buffer()
        buffer.merge([Group(make_prompt(3), tuple(ys), {})], 0)
        if restores:
            buffer.restore(json_snapshot(buffer))
        (draw,) = buffer.draw(1, len(ys), 0)
        for row_id, y in zip(draw.ids, draw.trajectories, strict=True):
            assert_same_trajectory(y, ys[row_id])
            assert not y.response_tokens.flags.writeable
        assert draw.prompt.columns == {"answer": "3"} and draw.prompt.tokens.tolist() == [1, 2]


def test_references_stay_with_their_responses():
    """Those of a restored buffer are tested below, at every state."""
    buffer = make_buffer()
    buffer.merge(make_groups({1: [[5, 6], [7]], 2: [[8]], 3: [[9]]}), 0)
    draws = buffer.draw(3, 2, 0)
    before = buffer.num_bytes
    values = [
        [np.float32(-0.5) * y.response_tokens.astype(np.float32) for y in d.trajectories]
        for d in draws
    ]
    buffer.keep_references(draws, values)
    assert buffer.num_bytes == before + 4 * 5
    for y in itertools.chain.from_iterable(d.trajectories for d in buffer.draw(3, 2, 0)):
        assert y.reference_token_logprobs.dtype == np.float32
        np.testing.assert_array_equal(y.reference_token_logprobs, -0.5 * y.response_tokens)
    # Responses that were removed in the meantime are left out.
    small = make_buffer(capacity_per_prompt=1)
    small.merge(make_groups({1: [[5]], 2: [[6]]}), 0)
    draws = small.draw(2, 1, 0)
    small.merge(make_groups({1: [[7]]}, version=1), 1)
    small.keep_references(draws, [[np.float32([-1])]] * 2)
    kept = {d.prompt.prompt_id: d.trajectories[0] for d in small.draw(2, 1, 1)}
    assert kept[1].reference_token_logprobs is None
    assert kept[2].reference_token_logprobs.tolist() == [-1]


def test_capacity_per_prompt_removes_the_oldest_versions():
    buffer = make_buffer(capacity_per_prompt=3)
    # Version 1 arrives before version 0: age is the policy version, not the time of arrival.
    buffer.merge(make_groups({1: [[4], [5]]}, version=1), 1)
    buffer.merge(make_groups({1: [[1], [2]]}, version=0), 1)
    buffer.merge(make_groups({1: [[6]], 2: [[1]]}, version=2), 2)
    assert stored(buffer) == [(1, (4,)), (1, (5,)), (1, (6,)), (2, (1,))]
    assert buffer.ledger()["evicted_capacity"] == 2


def test_the_byte_limit_removes_the_oldest_of_the_whole_buffer():
    """Against a sort of everything, over 60 merges, with references that take space, too."""
    rng = np.random.default_rng(0)
    prompts = (2, 5, 8)  # of four tokens each
    of_prompt = 4 * 4 + len("prompt 2") + PROMPT_OVERHEAD_BYTES
    probe = make_buffer()
    probe.merge(make_groups({2: [[1, 7]]}), 0)
    of_row = probe.num_bytes - of_prompt
    assert RESPONSE_OVERHEAD_BYTES + 16 < of_row < RESPONSE_OVERHEAD_BYTES + 100
    limit = 3 * of_prompt + 20 * of_row
    buffer, kept = make_buffer(max_bytes=limit), {}
    for step in range(60):
        prompt_id, version = int(rng.choice(prompts)), int(rng.integers(0, step + 1))
        responses = distinct_responses(2, 2 * step)
        buffer.merge(make_groups({prompt_id: responses}, version=version), step)
        kept |= {(version, y[0]): (prompt_id, tuple(y)) for y in responses}
        while (size := size_of(kept, of_prompt, of_row)) > limit:
            del kept[min(kept)]
        assert stored(buffer) == sorted(kept.values()) and buffer.num_bytes == size
    draws = buffer.draw(1, 4, 60)
    buffer.keep_references(draws, [[np.zeros(2, np.float32)] * 4])
    assert buffer.num_bytes <= limit and buffer.num_trajectories < len(kept)
    assert buffer.ledger()["evicted_bytes"] == 120 - buffer.num_trajectories


def size_of(kept, of_prompt, of_row):
    return of_prompt * len({prompt_id for prompt_id, _ in kept.values()}) + of_row * len(kept)


# --- the ledger ----------------------------------------------------------------------------------


def test_the_ledger_check_sees_a_lost_and_an_invented_response():
    buffer = make_buffer()
    rejected = {1: {"reward_timeout": 2}, 2: {"reward_timeout": 1, "reward_nan": 1}}
    buffer.merge(make_groups({1: [[5]], 2: []}, rejected=rejected), 0)
    counts = buffer.ledger()
    assert (counts["generated"], counts["stored"]) == (5, 1)
    assert counts["rejected"] == {"reward_timeout": 3, "reward_nan": 1}
    buffer.check_ledger(0)
    buffer.check_ledger(4, num_generated=9)
    with pytest.raises(LedgerError, match="8 responses were generated, but 9 are accounted for"):
        buffer.check_ledger(4, num_generated=8)
    with pytest.raises(LedgerError, match="10 responses were generated, but 9 are accounted for"):
        buffer.check_ledger(4, num_generated=10)


def random_groups(rng, step):
    """One or two groups of up to four responses with old and new versions."""
    groups = []
    for prompt_id in rng.integers(0, 6, rng.integers(1, 3)).tolist():
        count, rejected = int(rng.integers(0, 5)), int(rng.integers(0, 2))
        (group,) = make_groups(
            {prompt_id: rng.integers(0, 9, (count, 2)).tolist()},
            version=max(0, step - int(rng.integers(4))),
            rewards={prompt_id: rng.integers(-1, 2, count).astype(float).tolist()},
            rejected={prompt_id: {"reward_none": rejected}},
        )
        mixed = tuple(
            dataclasses.replace(y, version_min=max(0, y.version_min - int(rng.integers(2))))
            for y in group.trajectories
        )
        groups.append(dataclasses.replace(group, trajectories=mixed))
    return groups


def act(buffer, rng, step):
    """A random operation; return the draws, if any."""
    kind = rng.integers(4)
    if kind < 2:
        buffer.merge(random_groups(rng, step), step)
        return None
    draws = buffer.draw(3, int(rng.integers(1, 4)), step)
    if draws and kind == 3:
        values = [[np.full(len(y.response_tokens), -1.0) for y in d.trajectories] for d in draws]
        buffer.keep_references(draws, values)
    return draws


def assert_consistent(buffer, settings, step):
    """The counters are those of the contents, and every limit is kept."""
    arrays, meta = buffer.state()
    prompts, packed, packer = from_snapshot(arrays, meta)
    ys = [packer.unpack(y) for own in packed for y in own]
    buffer.check_ledger(0)
    assert len(ys) == buffer.num_trajectories
    assert len(prompts) == buffer.stats()["buffer/num_prompts"]
    assert min(map(len, packed), default=1) >= 1
    assert max(map(len, packed), default=0) <= settings.capacity_per_prompt
    overhead = RESPONSE_OVERHEAD_BYTES * len(ys) + PROMPT_OVERHEAD_BYTES * len(prompts)
    payload = sum(map(len, itertools.chain.from_iterable(packed)))
    prompt_bytes = sum(p.tokens.nbytes + len(p.text) for p in prompts)
    assert buffer.num_bytes == overhead + payload + prompt_bytes <= settings.max_bytes
    stats = buffer.stats()
    if ys:
        assert stats["buffer/reward_mean"] == pytest.approx(np.mean([y.reward for y in ys]))
        age = step - np.mean([y.version_min for y in ys])
        assert stats["buffer/age_mean"] == pytest.approx(age)


@pytest.mark.parametrize("num", [5_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(3600)
def test_the_ledger_closes_after_random_operations(num):
    settings = {"recency_prob": 0.5, "capacity_per_prompt": 5, "max_bytes": 11_000}
    buffer, rng = make_buffer(**settings, max_staleness=3), np.random.default_rng(0)
    for i in range(num):
        step = i // 8
        for draw in act(buffer, rng, step) or ():
            assert all(0 <= step - y.version_min <= 3 for y in draw.trajectories)
        if i % (num // 500) == 0:
            buffer.check_ledger(0)
            buffer.draw(1, 1, step)  # removes what is too old at this step
            assert_consistent(buffer, buffer._settings, step)
    ledger = buffer.ledger()
    assert min(ledger[f"evicted_{reason}"] for reason in ("age", "bytes", "capacity")) > num // 100


# --- saving --------------------------------------------------------------------------------------

LIMITS = [
    {},
    {"max_staleness": 2, "capacity_per_prompt": 4, "priority_temperature": 0.5},
    {"max_staleness": 2, "max_bytes": 10_000},
]
SETTINGS = [
    {"recency_prob": m, "pace": pace, "equal_rewards": equal, **LIMITS[(i + j) % 3]}
    for i, (m, pace) in enumerate(itertools.product((0.0, 0.5, 1.0), ("off", "trainer")))
    for j, equal in enumerate(("train", "redraw", "skip"))
]


def assert_same_state(buffer, other):
    arrays, meta = json_snapshot(buffer)
    others, other_meta = json_snapshot(other)
    assert meta == other_meta and set(arrays) == set(others)
    for name, x in arrays.items():
        np.testing.assert_array_equal(x, others[name], err_msg=name)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: " ".join(map(str, s.values())))
def test_a_restored_buffer_goes_on_as_the_saved_one_at_every_state(settings):
    buffer, rng = make_buffer(**settings, seed=(3, 4)), np.random.default_rng(0)
    for i in range(60):
        step, choice = i // 3, int(rng.integers(2**31))
        twin = make_buffer(**settings, seed=i)
        twin.merge(random_groups(rng, 99), 99)  # replaced by what is restored
        twin.restore(json_snapshot(buffer))
        assert_same_state(buffer, twin)
        for _ in range(2):
            draws, others = (act(b, np.random.default_rng(choice), step) for b in (buffer, twin))
            assert drawn(draws) == drawn(others)
        assert drawn(buffer.draw(4, 2, step)) == drawn(twin.draw(4, 2, step))
        assert_same_state(buffer, twin)
        assert buffer.stats() == twin.stats() and buffer.ledger() == twin.ledger()
        assert_consistent(buffer, buffer._settings, step)


@pytest.mark.timeout(120)
def test_threads_share_a_buffer():
    """Two threads merge while others draw, save and read; nothing is lost or torn."""
    buffer = make_buffer(recency_prob=0.5, max_staleness=3, capacity_per_prompt=5)
    stop, failures = threading.Event(), []

    def work(number):
        rng = np.random.default_rng(number)
        try:
            for i in range(300):
                if number < 2:
                    buffer.merge(random_groups(rng, i // 10), i // 10)
                elif number == 2:
                    act(buffer, rng, i // 10)
                else:
                    make_buffer().restore(buffer.state())
                    buffer.check_ledger(0)
                    buffer.stats()
        except BaseException as error:
            failures.append(error)
            stop.set()

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not failures and not any(thread.is_alive() for thread in threads)
    buffer.draw(1, 1, 29)
    assert_consistent(buffer, buffer._settings, 29)


# --- what became of the groups -------------------------------------------------------------------


def test_a_group_is_trained_waiting_or_unused():
    buffer = make_buffer(recency_prob=1.0)
    buffer.merge(make_groups({p: distinct_responses(2) for p in (1, 2, 3, 4)}), 0)
    buffer.draw(1, 2, 0)
    buffer.merge(make_groups({p: distinct_responses(2) for p in (5, 6, 7)}), 1)
    # One was trained, three are no longer fresh, three wait.
    found = {"trained_share": 1 / 4, "length_rank": 0.5, "effective_m": 1.0, "warnings": []}
    assert buffer.economy() == found and buffer.stats()["buffer/trained_share"] == 1 / 4
    buffer.draw(2, 2, 1)
    assert buffer.stats()["buffer/trained_share"] == 3 / 6 and buffer.num_fresh_groups == 1
    replay = make_buffer()
    replay.merge(make_groups({1: distinct_responses(4)}), 0)
    for _ in range(20):  # replay reaches a group while it waits
        replay.draw(1, 2, 0)
    assert replay.num_fresh_groups == 0 and replay.ledger()["groups_trained"] == 1


def test_length_rank_against_scipys_ranks():
    rng = np.random.default_rng(0)
    merged = rng.integers(1, 40, 500)
    is_trained = rng.random(500) < merged / 40  # long ones are preferred
    ledger = Ledger()
    ledger.lengths.update(merged.tolist())
    ledger.trained_lengths.update(merged[is_trained].tolist())
    ranks = (rankdata(merged) - 0.5) / 500
    found = ledger.stats()["buffer/length_rank"]
    assert found == pytest.approx(ranks[is_trained].mean(), abs=1e-12) and found > 0.6
    assert Ledger().stats()["buffer/length_rank"] == 0.5


def test_warnings_of_waste_lengths_and_m():
    buffer = make_buffer(recency_prob=1.0)
    for step in range(20):
        assert buffer.economy()["warnings"] == []
        buffer.merge(make_groups({3 * step + n: distinct_responses(2) for n in range(3)}), step)
        buffer.draw(2, 2, step)
    (waste,) = buffer.economy()["warnings"]  # 40 of 59 groups
    assert waste.startswith("only 68% of the searchers' groups") and "max_staleness" in waste
    ledger, settings = Ledger(), ReplaySettings(recency_prob=0.95)
    ledger.counters |= {"batches": 20, "slots": 100, "fresh": 95, "groups_trained": 95}
    ledger.lengths.update({1: 50, 9: 50})
    ledger.trained_lengths.update({1: 50, 9: 50})
    assert ledger.warnings(settings) == []
    ledger.trained_lengths[9] -= 20
    (short,) = ledger.warnings(settings)
    assert short.startswith("training prefers short responses") and "0.44" in short
    ledger.trained_lengths[1] -= 20
    ledger.counters["fresh"] = 80
    (m,) = ledger.warnings(settings)
    assert "0.80 of the slots" in m and "replay.pace=trainer" in m
    assert "pace" not in ledger.warnings(ReplaySettings(pace="trainer"))[0]
    assert ledger.warnings(ReplaySettings(recency_prob=0.5)) == []
