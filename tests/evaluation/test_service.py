# SPDX-License-Identifier: Apache-2.0
"""Evaluations by request, part by part."""

import itertools

from tba_jax.evaluation.service import EvaluationService
from tba_jax.flow.evaluation_shard import EvaluationShard


class Notes:
    """Three parts; notes who does which with which weights."""

    num_shards = 3

    def __init__(self):
        self.done = []

    def shard(self, params, number, device_set=0):
        self.done.append((params, number, device_set))
        return EvaluationShard(number, [[[number]]], [], [[params]], [], {}, [], {})

    def merge(self, parts):
        ((name,),) = {tuple(row) for part in parts for row in part.texts}
        return f"figures of {name}: {sorted(part.first for part in parts)}"


def make_service():
    notes = Notes()
    return notes, EvaluationService(notes, itertools.count().__next__)


def test_each_device_set_evaluates_the_next_shard_with_its_own_weights():
    notes, service = make_service()
    assert not service.step() and service.poll() == []
    service.request(0, ["start", "start"])
    service.request(4, ["four", "four"])
    assert notes.done == [] and service.poll() == []  # who asks does not wait
    for device_set in (0, 1, 1, 0):
        assert service.step(device_set)
    assert notes.done == [("start", 0, 0), ("start", 1, 1), ("start", 2, 1), ("four", 0, 0)]
    assert not service.is_idle
    assert service.step(1) and service.step(0) and service.is_idle and not service.step(0)
    finished = service.poll()
    assert [(f.version, f.evaluation) for f in finished] == [
        (0, "figures of start: [0, 1, 2]"),
        (4, "figures of four: [0, 1, 2]"),
    ]
    assert service.poll() == []


def test_a_device_set_without_that_version_takes_no_part():
    notes, service = make_service()
    service.request(4, [None, "four"])
    assert not service.step(0)
    assert [service.step(1) for _ in range(4)] == [True, True, True, False]
    assert {device_set for _, _, device_set in notes.done} == {1}


def test_what_is_begun_is_finished_and_the_rest_forgotten():
    notes, service = make_service()
    service.request(4, ["four"])
    service.request(8, ["eight"])
    assert service.newest_begun == -1
    assert service.step() and service.newest_begun == 4
    service.forget(after=4)
    while service.step():
        pass
    assert [f.version for f in service.poll()] == [4] and len(notes.done) == 3
