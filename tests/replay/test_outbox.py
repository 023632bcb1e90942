# SPDX-License-Identifier: Apache-2.0
"""Rounds are transactions; nothing is lost, duplicated or torn between threads."""

import dataclasses
import json
import threading
import time

import numpy as np
import pytest
from fake_rounds import assert_same_trajectory, distinct_responses, make_commit, make_trajectory

from tba_jax.flow.rounds import RoundCommit, pack_commits, unpack_commits
from tba_jax.flow.state import PartState
from tba_jax.flow.trajectory import Group
from tba_jax.replay.outbox import Outbox


def test_rounds_come_out_in_order_and_once():
    outbox = Outbox(10**6)
    commits = [make_commit({1: distinct_responses(2)}, round=i) for i in range(4)]
    for commit in commits:
        outbox.put(commit)
    assert outbox.counts.pending == 8 and outbox.num_rounds == 4
    assert outbox.take(1) == commits[:1]
    assert outbox.counts.pending == 6
    assert outbox.take() == commits[1:]
    assert outbox.take() == []
    assert (outbox.counts.pending, outbox.counts.generated, outbox.num_rounds) == (0, 8, 0)


def test_groups_prompt_state_and_round_number_commit_together():
    outbox = Outbox(10**6)
    assert outbox.committed == (0, None)
    outbox.put(make_commit({1: [[5]]}, round=0))
    assert outbox.committed == (1, {"position": 1})
    bad = make_commit({1: [[5]]}, round=1)
    bad = dataclasses.replace(bad, generated=7)
    with pytest.raises(ValueError, match="has a count of 7 responses, but its groups have 1"):
        outbox.put(bad)
    with pytest.raises(ValueError, match="committed round 0 again; wanted round 1"):
        outbox.put(make_commit({1: [[5]]}, round=0))
    assert outbox.committed == (1, {"position": 1})
    assert outbox.counts.pending == 1


def test_rounds_that_end_out_of_order_are_each_committed_once():
    """The position stays before the lowest number that is missing, through a restore too."""
    outbox = Outbox(10**6)
    for number in (1, 3, 4):
        outbox.put(make_commit({number: [[5]]}, round=number))
    assert outbox.committed == (0, None)
    assert [outbox.is_committed(i) for i in range(6)] == [False, True, False, True, True, False]
    assert [c.round for c in outbox.take(1)] == [1]
    arrays, meta = outbox.state()
    outbox = Outbox(10**6)
    outbox.restore(PartState(arrays, json.loads(json.dumps(meta))))
    assert [c.round for c in outbox.take()] == [3, 4] and outbox.counts.generated == 3
    with pytest.raises(ValueError, match="committed round 3 again; wanted round 0 or"):
        outbox.put(make_commit({3: [[5]]}, round=3))
    outbox.put(make_commit({0: [[5]]}, round=0))
    assert outbox.committed == (2, {"position": 2})
    outbox.put(make_commit({2: [[5]]}, round=2))
    assert outbox.committed == (5, {"position": 5}) and outbox.num_groups == 2


@pytest.mark.parametrize(
    ("trajectory", "message"),
    [
        (make_trajectory(1, [5], reward=float("nan")), "reward is nan, wanted a finite number"),
        (make_trajectory(1, [5], reward=float("inf")), "reward is inf, wanted a finite number"),
        (make_trajectory(2, [5]), "response to prompt 2 is in the group of prompt 1"),
        (make_trajectory(1, []), "0 response tokens and 0 log-probs"),
        (
            dataclasses.replace(
                make_trajectory(1, [5, 6]), behavior_token_logprobs=np.zeros(1, np.float32)
            ),
            "2 response tokens and 1 log-probs, wanted equal counts",
        ),
        (
            dataclasses.replace(make_trajectory(1, [5, 6]), is_sampled=np.zeros(2, bool)),
            "is_sampled has 2 values, 0 of them True, for 2 response tokens; wanted a value for",
        ),
        (
            dataclasses.replace(make_trajectory(1, [5, 6]), is_sampled=np.ones(1, bool)),
            "is_sampled has 1 values, 1 of them True, for 2 response tokens; wanted a value for",
        ),
    ],
)
def test_a_round_that_would_break_the_buffer_is_refused(trajectory, message):
    good = make_commit({1: [[5]]})
    group = Group(good.groups[0].prompt, (trajectory,), {})
    with pytest.raises(ValueError, match=message):
        Outbox(10**6).put(dataclasses.replace(good, groups=(group,)))


def test_room_ends_at_the_byte_bound_and_returns():
    # One response of two tokens is 8 bytes of ids and 8 of log-probs.
    outbox = Outbox(32)
    outbox.put(make_commit({1: distinct_responses(1)}, round=0))
    assert outbox.has_room()
    outbox.put(make_commit({1: distinct_responses(1)}, round=1))
    assert not outbox.has_room()
    outbox.take(1)
    assert outbox.has_room()


def _assert_same_commit(a: RoundCommit, b: RoundCommit):
    for name in ("searcher", "round", "version", "prompt_state", "generated", "report"):
        assert getattr(a, name) == getattr(b, name), name
    assert len(a.groups) == len(b.groups)
    for left, right in zip(a.groups, b.groups, strict=True):
        assert left.rejected == right.rejected
        assert left.prompt.prompt_id == right.prompt.prompt_id
        assert (left.prompt.text, left.prompt.columns) == (right.prompt.text, right.prompt.columns)
        np.testing.assert_array_equal(left.prompt.tokens, right.prompt.tokens)
        for y, z in zip(left.trajectories, right.trajectories, strict=True):
            assert_same_trajectory(y, z)


def _varied_commits():
    first = make_commit(
        {3: [[1, 2, 3], [4]], 9: []},
        round=0,
        version=5,
        rewards={3: [0.1, 1 / 3]},
        rejected={3: {"reward_timeout": 2}, 9: {"reward_nan": 1}},
    )
    parts = {"accuracy": 0.1, "length": -1e-17}
    y = make_trajectory(4, [8, 8], reward=0.1, parts=parts, searcher=2)
    y = dataclasses.replace(y, reference_logprob=float("-inf"), sampling_temperature=1.0)
    z = make_trajectory(4, [150_000], searcher=2)
    marks = np.arange(37) % 3 > 0
    w = make_trajectory(4, range(37), searcher=2, parts=parts)
    w = dataclasses.replace(w, is_sampled=marks)
    z = dataclasses.replace(z, version_spans=((1, 1),))
    prompt = dataclasses.replace(first.groups[0].prompt, prompt_id=4, columns={"x": [1, None]})
    second = dataclasses.replace(
        first, round=1, groups=(Group(prompt, (w, y, z), {}),), generated=3
    )
    return [first, second]


def test_packing_is_exact_through_json():
    commits = _varied_commits()
    arrays, meta = pack_commits(commits)
    restored = unpack_commits(arrays, json.loads(json.dumps(meta)))
    for a, b in zip(commits, restored, strict=True):
        _assert_same_commit(a, b)


def test_packing_no_commits():
    arrays, meta = pack_commits([])
    assert unpack_commits(arrays, json.loads(json.dumps(meta))) == []


def test_a_restored_outbox_goes_on_where_the_saved_one_was():
    outbox = Outbox(1000)
    commits = _varied_commits()
    for commit in commits:
        outbox.put(commit)
    outbox.take(1)
    arrays, meta = outbox.state()
    outbox.put(make_commit({1: [[5]]}, round=2))  # after the snapshot: not in it
    other = Outbox(1000)
    other.restore(PartState(arrays, json.loads(json.dumps(meta))))
    assert other.committed == (2, {"position": 1})
    assert (other.counts, other.num_rounds) == ((8, 3, 0), 1)
    (pending,) = other.take()
    _assert_same_commit(pending, commits[1])
    other.put(make_commit({1: [[5]]}, round=2))
    assert other.committed[0] == 3


@pytest.mark.timeout(60)
def test_nothing_is_lost_or_torn_between_a_writer_and_a_reader():
    outbox = Outbox(10**9)
    num_rounds = 400
    done = threading.Event()

    def write():
        for i in range(num_rounds):
            outbox.put(make_commit({1: distinct_responses(1 + i % 3)}, round=i))
        done.set()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    taken, torn = [], []
    deadline = time.monotonic() + 50
    while time.monotonic() < deadline:
        finished = done.is_set()
        # A snapshot in the middle of everything is one instant: its pending rounds end exactly
        # where its committed position says.
        arrays, meta = outbox.state()
        pending = unpack_commits(arrays, meta)
        if pending and pending[-1].round + 1 != meta["position"]["next_round"]:
            torn.append(meta["position"])
        taken.extend(outbox.take(2))
        if finished and not outbox.num_rounds:
            break
    writer.join(10)
    assert not writer.is_alive()
    assert torn == []
    assert [c.round for c in taken] == list(range(num_rounds))
    assert outbox.counts.generated == sum(c.generated for c in taken)
    assert outbox.counts.pending == 0


def test_lost_responses_are_counted_and_saved():
    outbox = Outbox(10**6)
    outbox.put(make_commit({1: [[5]]}, round=1))
    outbox.lose(4)
    outbox.lose(-2)
    arrays, meta = outbox.state()
    other = Outbox(10**6)
    other.restore(PartState(arrays, json.loads(json.dumps(meta))))
    assert other.counts == outbox.counts == (3, 1, 2)
    other.start_from(json.loads(json.dumps(outbox.position())))
    assert other.counts == (0, 0, 0) and other.is_committed(1) and not other.is_committed(0)
