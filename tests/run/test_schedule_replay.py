# SPDX-License-Identifier: Apache-2.0
"""What one searcher does again from the log of a run that went through several processes."""

import gzip
import json

import pytest
from fake_search import World

from tba_jax.flow.state import PartState
from tba_jax.run.schedule_replay import (
    Admissions,
    Admitted,
    ReplayError,
    SearcherReplay,
    read_schedule,
)
from tba_jax.weights.transport import Published


def commits_of(world):
    return [
        (c.round, c.version, c.groups[0].prompt.prompt_id, c.groups[0].trajectories[0].version_max)
        for c in world.outbox.take()
    ]


def replay(events, rounds):
    world = World(admission=Admitted())
    chunks = [event for event in events if event["event"] == "chunk"]
    admissions = Admissions()
    for event in chunks:
        admissions.add(event["chunk"], event["tickets"])
    again = SearcherReplay(
        world.search, lambda version, _: Published(version, None), iter(chunks), admissions
    )
    for number, version, *_ in rounds:
        again.do({"searcher": 3, "round": number, "version": version})
    return commits_of(world)


def test_what_a_killed_process_ended_but_did_not_commit_is_taken_from_the_next_one():
    first = World()
    for _ in range(2):
        first.search.step()  # both tickets have ended, and nobody has graded them
    second = World()
    second.version = 5
    second.searcher.restore(PartState({}, first.searcher.state().meta))
    second.run(3)
    events = first.events + second.events
    assert [(e["begins"], e["version"], e["tickets"]) for e in events[::2]] == [
        (True, 0, [0, 1]),
        (True, 5, [0, 1]),
        (False, 5, [4, 5]),
    ]
    done = commits_of(second)
    assert done == [(n, 5, n, 5) for n in range(6)]
    assert replay(events, done) == done


def test_a_log_without_the_chunk_of_a_ticket_is_refused():
    world = World()
    world.run(2)
    done = commits_of(world)
    with pytest.raises(ReplayError, match="round 2 of searcher 3 never ends"):
        replay(world.events[:1], done)


CHUNK = {"event": "chunk", "chunk": 0, "version": 0, "begins": True, "tickets": [0]}
EVENTS = (
    {"event": "sync", "step": 0, "version": 0},
    {**CHUNK, "searcher": 1},
    {**CHUNK, "searcher": 0},
    {"event": "round", "searcher": 1, "round": 0, "version": 0},
    {"event": "step", "step": 0, "trajectory_ids": [], "weights": [], "bucket": [1], "x": "chunk"},
    {"event": "eval", "step": 0},
)


@pytest.mark.parametrize("name", ["schedule.jsonl", "schedule.jsonl.gz"])
def test_a_log_is_streamed_compressed_or_not(tmp_path, name):
    text = "".join(json.dumps(event) + "\n" for event in EVENTS).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    schedule = read_schedule(tmp_path / name)
    assert [*schedule.events("sync", "round", "step")] == [EVENTS[0], EVENTS[3], EVENTS[4]]
    assert [*schedule.chunks(0)] == [*schedule.chunks(0)] == [EVENTS[2]]
    assert schedule.uses == {1: {0: 2}, 0: {0: 1}}


def test_a_ticket_that_is_admitted_again_is_committed_by_its_last_admission():
    admissions = Admissions()
    for chunk, tickets in enumerate(([0, 1], [2, 3], [1, 3, 4], [3])):
        admissions.add(chunk, tickets)
    last = {n: [c for c in range(4) if admissions.is_last(n, c)] for n in (1, 3)}
    assert last == {1: [2], 3: [3]}
    assert admissions.is_last(0, 0) and admissions.is_last(2, 1) and admissions.is_last(4, 2)


def test_a_log_that_lost_lines_is_refused(tmp_path):
    path = tmp_path / "schedule.jsonl"
    facts = {"step": 7, "num_bytes": 9000, "found_bytes": 12}
    lost = {"event": "lost", "log": "schedule.jsonl", **facts}
    path.write_text("".join(json.dumps(event) + "\n" for event in (*EVENTS, lost)))
    with pytest.raises(ReplayError, match="12 of 9,000 bytes when the run was resumed at step 7"):
        read_schedule(path)
    lost["log"] = "metrics.jsonl"  # which a replay does not need
    path.write_text("".join(json.dumps(event) + "\n" for event in (*EVENTS, lost)))
    assert len([*read_schedule(path).events("step")]) == 1
    path.write_text(json.dumps(EVENTS[0]) + "\n")
    with pytest.raises(ReplayError, match="has no steps to replay"):
        read_schedule(path)
    path.write_text("".join(json.dumps(event) + "\n" for event in EVENTS).replace("ound", "oun", 1))
    with pytest.raises(ValueError, match="line 4: 'event' is 'roun'. Remove that line"):
        read_schedule(path)
