# SPDX-License-Identifier: Apache-2.0
"""Searching without rounds: tickets are admitted as slots free up and committed as they end."""

import json

import pytest
from fake_search import World

from tba_jax.devices.worker import StopFlag, Worker, WorkerError
from tba_jax.flow.state import PartState


def ids(commits):
    return [(c.round, c.groups[0].prompt.prompt_id) for c in commits]


def test_a_group_is_committed_when_its_last_response_ended():
    """Prompt 0 takes three chunks; the other slots go on meanwhile."""
    world = World(lambda i, j: 3 if (i, j) == (0, 1) else 1)
    world.run(1)
    assert ids(world.outbox.take()) == [(1, 1)]
    world.run(1)
    assert ids(world.outbox.take()) == [(2, 2)]
    world.run(1)
    first, *others = world.outbox.take()
    assert ids([first]) == [(0, 0)] and ids(others) == [(3, 3)]
    (group,) = first.groups
    assert [y.response_tokens.tolist() for y in group.trajectories] == [[10, 0], [10, 1]]
    assert [y.reward for y in group.trajectories] == [10.0, 10.0]
    assert (first.searcher, first.generated, group.trajectories[0].round) == (3, 2, 0)
    assert world.outbox.committed == (4, {"position": 4})
    assert world.searcher.decoded_tokens == 4 * 4


def test_what_was_not_committed_is_drawn_again_after_a_resume_and_nothing_twice():
    world = World(lambda i, j: 9 if i == 1 else 1)
    world.run(3)
    committed = [number for number, _ in ids(world.outbox.take())]
    assert committed == [0, 2, 3, 4][: len(committed)] and 1 not in committed
    saved = json.loads(json.dumps(world.outbox.state().meta))
    counters = world.searcher.state()

    after = World(lambda i, j: 1)
    after.outbox.restore(PartState(world.outbox.state().arrays, saved))
    after.searcher.restore(counters)
    after.run(3)
    again = ids(after.outbox.take())
    assert [number for number, _ in again] == [n for n in range(9) if n not in committed][
        : len(again)
    ]
    assert all(number == prompt_id for number, prompt_id in again) and len(again) >= 4


@pytest.mark.parametrize("in_flight", [True, False])
def test_newer_weights_come_between_chunks_or_when_the_session_has_drained(in_flight):
    world = World(lambda i, j: 3, in_flight=in_flight)
    world.run(1)
    world.version = 5
    world.run(2)
    spans = [(y.version_min, y.version_max) for c in world.outbox.take() for y in
             c.groups[0].trajectories]  # fmt: skip
    assert set(spans) == {(0, 5) if in_flight else (0, 0)}
    world.run(3)
    spans = [(y.version_min, y.version_max) for c in world.outbox.take() for y in
             c.groups[0].trajectories]  # fmt: skip
    assert set(spans) == {(5, 5)}


def test_a_searcher_over_the_bound_waits():
    """Bound 1, two prompts a step: four groups under way, and then nothing until some are used."""
    world = World(max_staleness=1)
    world.run(2)
    assert len(ids(world.outbox.take())) == 4
    assert not world.search.step() and world.stream.position == 4
    world.version = 1
    world.admission.update(step=1, num_merged=4, num_fresh=2)
    assert world.search.step() and world.stream.position == 6


def test_slow_grades_stop_decoding_not_memory():
    world = World()
    for _ in range(10):
        world.search.step()
    # Four slots are two prompts; two sessions' worth may wait.
    assert world.stream.position == 2 * 2
    assert world.search.grade() and world.search.step()


def test_decoding_is_counted_from_one_question_to_the_next():
    world = World(lambda i, j: 1)
    world.run(2)
    assert world.search.decode_counts() == (8, 8, 0, 0)
    assert world.search.decode_counts() == (0, 0, 0, 0)


def test_a_grader_that_fails_stops_its_searcher_and_is_named():
    class LostPool:
        def score(self, prompts, completions, columns, *, completion_ids, has_eos):
            raise OSError("no process is left")

    world, stop = World(reward=LostPool), StopFlag()
    workers = [
        Worker("searcher-3", world.search.step, stop, idle_s=0.001),
        Worker("grader-3", world.search.grade, stop, idle_s=0.001),
    ]
    for worker in workers:
        worker.start()
    assert stop.wait(30.0)
    for worker in workers:
        worker.join(30.0)
    with pytest.raises(WorkerError, match="grader-3 failed: OSError: no process is left"):
        stop.check()
    assert not world.outbox.take()  # what was not graded is not committed
