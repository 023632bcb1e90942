# SPDX-License-Identifier: Apache-2.0
"""Admission: the number of open groups with a bound on staleness, and rounds of driver=sync."""

import pytest

from tba_jax.replay.admission import Admission, RoundAdmission


def make_admission(searchers=(0,), unmerged=0, **changes):
    settings = {"num_prompts": 4, "share": 1.0, "max_staleness": 2, **changes}
    return Admission(searchers, unmerged=unmerged, **settings)


def admit_all(admission, searcher=0, version=0):
    count = 0
    while count < 1000 and admission.admit(searcher, version):
        count += 1
    return count


@pytest.mark.parametrize(
    ("changes", "version", "step", "wanted"),
    [
        ({"max_staleness": 0}, 0, 9, 1000),  # no bound
        ({}, 0, 0, 12),  # three batches of four: used at staleness 0, 1 and 2
        ({}, 7, 7, 12),
        ({}, 6, 7, 8),  # one step since these weights is gone
        ({}, 4, 7, 0),  # it would be late at once
        ({"share": 0.5}, 0, 0, 6),  # half of the slots are replay
        ({"share": 0.1}, 0, 0, 4),  # never less than a batch can need at once
        ({"initial": 20}, 0, 0, 20),
        ({"initial": 20}, 1, 1, 12),
    ],
)
def test_as_many_are_open_as_the_trainer_takes_within_the_bound(changes, version, step, wanted):
    admission = make_admission(**changes)
    admission.update(step=step, num_merged=0, num_fresh=0)
    assert admit_all(admission, version=version) == wanted


def test_a_group_is_open_until_it_is_used():
    admission = make_admission(unmerged=3)
    assert admit_all(admission) == 12 - 3
    for _ in range(5):
        admission.commit(0, 0)
    assert admit_all(admission) == 0 and admission.num_under_way == 12
    admission.update(step=0, num_merged=8, num_fresh=8)
    assert admit_all(admission) == 0 and admission.num_under_way == 12
    admission.update(step=1, num_merged=0, num_fresh=4)
    assert admission.num_under_way == 8 and admit_all(admission, version=1) == 4


def test_groups_of_old_weights_are_open_until_they_are_committed_or_lost():
    admission = make_admission(searchers=(0, 1))
    assert admission.admit(0, 3) and admission.admit(1, 4)
    assert not admission.has_open_below(3) and admission.has_open_below(4)
    admission.commit(0, 3)
    assert not admission.has_open_below(4) and admission.has_open_below(5)
    admission.set_open(1, [])  # lost
    assert not admission.has_open_below(5) and admission.num_under_way == 1
    admission.set_open(1, [4])  # it has reconnected
    assert admission.has_open_below(5) and admission.num_under_way == 2


def test_rounds_are_admitted_up_to_the_allowed_number_with_one_version():
    admission = RoundAdmission([1, 2])
    assert not admission.admit(1, -1)
    admission.allow({1: 2, 2: 1}, version=3)
    assert not admission.admit(1, 2) and not admission.admit(1, 4)
    assert [admission.admit(1, 3) for _ in range(3)] == [True, True, False]
    assert admission.admit(2, 3) and not admission.admit(2, 3)
    admission.commit(1, 3)
    admission.allow({1: 1}, version=4)
    assert not admission.admit(1, 3) and admission.admit(1, 4) and not admission.admit(1, 4)


def test_rounds_of_a_lost_searcher_are_admitted_again():
    admission = RoundAdmission([1])
    admission.allow({1: 2}, version=0)
    assert admission.admit(1, 0)
    admission.set_open(1, [])  # lost
    assert admission.admit(1, 0) and admission.admit(1, 0) and not admission.admit(1, 0)
    admission.set_open(1, [0])  # one of the two is known to continue
    assert admission.admit(1, 0) and not admission.admit(1, 0)
