# SPDX-License-Identifier: Apache-2.0
"""Rounds of driver=sync: as many as were allowed, with the weights they were allowed for."""

from tba_jax.replay.admission import RoundAdmission


def test_rounds_are_admitted_up_to_the_allowed_number_with_one_version():
    admission = RoundAdmission([1, 2])
    assert not admission.admit(1, -1)
    admission.allow({1: 2, 2: 1}, version=3)
    assert not admission.admit(1, 2) and not admission.admit(1, 4)
    assert [admission.admit(1, 3) for _ in range(3)] == [True, True, False]
    assert admission.admit(2, 3) and not admission.admit(2, 3)
    admission.commit(1, 0.1, 3)
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
