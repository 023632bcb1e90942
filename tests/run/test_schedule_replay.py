# SPDX-License-Identifier: Apache-2.0
"""What one searcher does again from the log of a run that went through several processes."""

import pytest
from fake_search import World

from tba_jax.flow.state import PartState
from tba_jax.run.schedule_replay import ReplayError, SearcherReplay
from tba_jax.weights.transport import Published


def commits_of(world):
    return [
        (c.round, c.version, c.groups[0].prompt.prompt_id, c.groups[0].trajectories[0].version_max)
        for c in world.outbox.take()
    ]


def replay(events, rounds):
    world = World()
    again = SearcherReplay(world.search, lambda version, _: Published(version, None), events)
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
