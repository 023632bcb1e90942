# SPDX-License-Identifier: Apache-2.0
"""Admission: how many groups may be under way, for whom, and which bound can be met."""

import math

import pytest

from tba_jax.replay.admission import Admission, Demand


def make_admission(searchers=(0,), unmerged=0, **changes):
    demand = {"prompts": 4, "share": 1.0, "max_staleness": 2, "sync_period": 1}
    return Admission(Demand(**{**demand, **changes}), searchers, unmerged)


def admit_all(admission, searcher=0, most=1000, version=0):
    count = 0
    while count < most and admission.admit(searcher, version):
        count += 1
    return count


def test_without_a_bound_everything_is_admitted():
    admission = make_admission(max_staleness=0)
    assert admit_all(admission) == 1000 and admission.limit == math.inf


@pytest.mark.parametrize(
    ("changes", "version", "step", "wanted"),
    [
        ({}, 0, 0, 12),  # three batches of four: used at staleness 0, 1 and 2
        ({}, 7, 7, 12),
        ({"sync_period": 2}, 6, 7, 8),  # one step since the publication is gone
        ({"share": 0.5}, 0, 0, 6),  # half of the slots are replay
        ({"share": 0.1}, 0, 0, 4),  # never less than a batch can need at once
        ({"initial": 20}, 0, 0, 20),
        ({"initial": 20}, 1, 1, 12),
    ],
)
def test_as_many_are_under_way_as_the_trainer_takes_within_the_bound(
    changes, version, step, wanted
):
    admission = make_admission(**changes)
    admission.update(step=step, version=version, num_merged=0, num_fresh=0)
    assert admit_all(admission, version=version) == wanted


def test_a_group_is_under_way_until_it_is_used():
    admission = make_admission(unmerged=3)
    assert admit_all(admission) == 12 - 3
    for _ in range(5):
        admission.commit(0, 0.1, 0)
    assert admit_all(admission) == 0 and admission.num_under_way == 12
    admission.update(step=0, version=0, num_merged=8, num_fresh=8)
    assert admit_all(admission) == 0 and admission.num_under_way == 12
    admission.update(step=1, version=1, num_merged=0, num_fresh=4)
    assert admission.num_under_way == 8 and admit_all(admission, version=1) == 4


def test_responses_slower_than_the_bound_do_not_starve_the_trainer():
    """Ten steps each: what the trainer takes in ten steps is under way, and a little more."""
    admission = make_admission()
    admission.note_step(1.0)
    admit_all(admission, most=8)
    for _ in range(8):
        admission.commit(0, 10.0, 0)
    assert admission.limit == 4 * (10 + 0.5 + 1)
    found = admission.latency()
    assert (found.mean_steps, found.p95_steps, found.step_s) == (10.0, 10.0, 1.0)
    assert (found.late_share, found.feasible) == (1.0, 11)


def test_what_is_fast_is_not_made_early():
    """A bound of 20 steps, but half a step each: only what keeps the trainer fed is under way."""
    admission = make_admission(max_staleness=20)
    admission.note_step(1.0)
    assert admission.latency() is None and admission.limit == 4 * 21  # nothing measured
    admit_all(admission, most=8)
    for _ in range(8):
        admission.commit(0, 0.5, 0)
    assert admission.limit == 4 * (0.5 + 0.5 + 1)
    found = admission.latency()
    assert (found.late_share, found.feasible) == (0.0, 2)
    # A bound that they cannot meet gives way: the trainer is not to starve.
    tight = make_admission(max_staleness=1)
    tight.note_step(1.0)
    for _ in range(8):
        tight.admit(0, 0)
        tight.commit(0, 0.5, 0)
    tight.update(step=0, version=0, num_merged=8, num_fresh=0)
    assert tight.latency().feasible == 2 and tight.limit == 4 * 2


def test_those_come_first_that_were_admitted_the_longest_ago():
    """One place at a time, and searcher 0 always asks first: each gets its share."""
    admission = make_admission(searchers=(0, 1, 2), prompts=1, max_staleness=1, share=1.0)
    admitted = [s for s in (0, 1, 2) if admission.admit(s, 0)]
    assert admitted == [0, 1]  # two places
    turns = []
    for _ in range(9):
        admission.commit(admitted.pop(0), 0.1, 0)
        admission.update(step=0, version=0, num_merged=1, num_fresh=0)
        for s in (0, 1, 2, 0, 1, 2):
            if admission.admit(s, 0):
                admitted.append(s)
                turns.append(s)
    assert turns == [2, 0, 1] * 3


def test_weights_that_travelled_have_used_up_a_part_of_the_bound():
    """Version 7 is published and searcher 0 has version 6: two batches are in time, not three."""
    admission = make_admission(searchers=(0, 1))
    admission.update(step=7, version=7, num_merged=0, num_fresh=0)
    assert admit_all(admission, version=6) == 8
    assert admit_all(admission, searcher=1, version=7) == 4 - 1  # one is kept for searcher 0


def test_the_least_feasible_bound_counts_the_way_of_the_weights():
    admission = make_admission(max_staleness=8)
    admission.note_step(1.0)
    admission.update(step=5, version=5, num_merged=0, num_fresh=0)
    for _ in range(8):
        assert admission.admit(0, 2)
        admission.commit(0, 0.5, 2)
    found = admission.latency()
    assert (found.behind_steps, found.feasible, found.late_share) == (3, 1 + 3 + 1, 0.0)


def test_a_strict_bound_gives_way_to_nothing():
    admission = make_admission(searchers=(0, 1), is_strict=True)
    admission.note_step(1.0)
    assert admit_all(admission) == 12
    for _ in range(12):
        admission.commit(0, 10.0, 0)  # ten steps each
    admission.update(step=3, version=3, num_merged=12, num_fresh=0)
    assert not admission.admit(0, 0)  # it would be late at once; its weights are on their way
    assert admit_all(admission, searcher=1, version=3) == 12  # and it stands in nobody's way
    assert not admission.holds(4)
    assert admission.holds(5)  # after step 5 what began with version 3 is late
    admission.set_open(1, [])
    assert not admission.holds(5)


def test_a_soft_bound_delays_no_searcher():
    admission = make_admission()
    assert admission.admit(0, 0) and not admission.holds(100)
