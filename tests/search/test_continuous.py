# SPDX-License-Identifier: Apache-2.0
"""Searching without rounds: tickets are admitted as slots free up and committed as they end."""

import itertools
import json

import numpy as np
import pytest

from tba_jax.decoding.requests import Response, Statistics
from tba_jax.flow.padding import Padding
from tba_jax.flow.state import PartState
from tba_jax.flow.trajectory import Prompt
from tba_jax.replay.admission import Admission, Demand
from tba_jax.replay.outbox import Outbox
from tba_jax.rewards.grader import Grader
from tba_jax.rewards.source import ScoreResult
from tba_jax.search.config import SearchSettings
from tba_jax.search.continuous import ContinuousSearch
from tba_jax.search.searcher import Searcher, SearchParts
from tba_jax.weights.transport import Published

SETTINGS = SearchSettings(samples_per_prompt=2, prompts_per_round=2)


class CountingStream:
    """Prompts 0, 1, 2, ..."""

    def __init__(self):
        self.position = 0

    def take(self, num_prompts):
        first, self.position = self.position, self.position + num_prompts
        ids = range(first, self.position)
        return [Prompt(i, f"p{i}", np.array([1 + i], np.int32), {}) for i in ids]

    def state(self):
        return {"position": self.position}

    def restore(self, state):
        self.position = state["position"]


class CountdownSession:
    """Four slots; sample j of prompt i ends after its own number of chunks."""

    def __init__(self, published, lengths):
        self.version, self.num_slots = published.version, 4
        self.statistics = Statistics()
        self._lengths = lengths
        self._queue = []
        self._slots = []
        self._requests = itertools.count()

    @property
    def is_idle(self):
        return not (self._queue or self._slots)

    @property
    def room(self):
        return self.num_slots - len(self._slots) - len(self._queue)

    def submit(self, prompt):
        request, prompt_id = next(self._requests), int(prompt[0]) - 1
        for sample in range(2):
            self._queue.append([request, sample, prompt_id, self._lengths(prompt_id, sample), 0])
        return request

    def swap(self, params, version):
        self.version = version

    def step(self):
        while self._queue and len(self._slots) < self.num_slots:
            entry = self._queue.pop(0)
            entry[4] = self.version
            self._slots.append(entry)
        for entry in self._slots:
            entry[3] -= 1
        self.statistics.tokens += len(self._slots)
        self.statistics.slot_steps += self.num_slots
        ended = [e for e in self._slots if not e[3]]
        self._slots = [e for e in self._slots if e[3]]
        return [
            Response(r, j, np.array([10 + i, j], np.int32), np.zeros(2, np.float32), True, v,
                     self.version)
            for r, j, i, _, v in ended
        ]  # fmt: skip


class CountdownSampler:
    """Opens such sessions."""

    settings = SETTINGS

    def __init__(self, lengths):
        self._lengths = lengths

    def open(self, published):
        return CountdownSession(published, self._lengths)

    def submit(self, session, prompt, number):
        return session.submit(prompt), np.ones(2)


class FirstToken:
    """The first token's id."""

    def score(self, prompts, completions, columns, *, completion_ids, has_eos):
        return ScoreResult([float(x[0]) for x in completion_ids], [None] * len(prompts), "")


class World:
    """A searcher over such sessions, and what it logged."""

    def __init__(self, lengths=lambda i, j: 1, *, max_staleness=0, in_flight=True):
        self.version, self.events = 0, []
        self.outbox, self.stream = Outbox(2**20), CountingStream()
        parts = SearchParts(
            index=3,
            stream=self.stream,
            weights=lambda: Published(self.version, None),
            sampler=CountdownSampler(lengths),
            grader=Grader(FirstToken(), lambda rows: ["x"] * len(rows), lambda text: None, ""),
            reference=None,
            padding=Padding((4,), (4,), 0),
            outbox=self.outbox,
            clock=lambda: 0.0,
        )
        self.searcher = Searcher(parts)
        self.admission = Admission(Demand(2, 1.0, max_staleness, 1), [3])
        self.in_flight = in_flight
        self.search = self.begin()

    def begin(self):
        return ContinuousSearch(
            self.searcher,
            self.admission,
            swaps_in_flight=self.in_flight,
            log_event=self.events.append,
        )

    def run(self, num_chunks):
        for _ in range(num_chunks):
            self.search.step()
            self.search.grade()


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
    chunks = world.searcher.num_chunks

    after = World(lambda i, j: 1)
    after.outbox.restore(PartState(world.outbox.state().arrays, saved))
    after.searcher.restore(counters)
    assert after.searcher.num_chunks == chunks
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


def test_the_log_has_the_chunks_of_admissions_and_swaps_and_no_others():
    world = World(lambda i, j: 2)
    world.run(3)
    world.version = 4
    world.run(1)
    common = {"event": "chunk", "searcher": 3}
    assert world.events == [
        {**common, "chunk": 0, "begins": True, "version": 0, "tickets": [0, 1]},
        {**common, "chunk": 2, "begins": False, "version": 0, "tickets": [2, 3]},
        {**common, "chunk": 3, "begins": False, "version": 4, "tickets": []},
    ]


def test_a_searcher_over_the_bound_waits():
    """Bound 1, two prompts a step: four groups under way, and then nothing until some are used."""
    world = World(max_staleness=1)
    world.run(2)
    assert len(ids(world.outbox.take())) == 4
    assert not world.search.step() and world.stream.position == 4
    world.admission.update(step=1, version=1, num_merged=4, num_fresh=2)
    assert world.search.step() and world.stream.position == 6


def test_slow_grades_stop_decoding_not_memory():
    world = World()
    for _ in range(10):
        world.search.step()
    # Four slots are two prompts; two sessions' worth may wait.
    assert world.stream.position == 2 * 2
    assert world.search.grade() and world.search.step()


def test_slot_use_is_counted_from_one_question_to_the_next():
    world = World(lambda i, j: 1)
    world.run(2)
    assert world.search.slot_use() == (8, 8)
    assert world.search.slot_use() == (0, 0)
