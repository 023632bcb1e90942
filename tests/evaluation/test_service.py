# SPDX-License-Identifier: Apache-2.0
"""Evaluations by request."""

import itertools

from tba_jax.evaluation.service import EvaluationService, Finished


def make_service(evaluated):
    def evaluate(params):
        evaluated.append(params)
        return f"figures of {params}"

    return EvaluationService(evaluate, itertools.count().__next__)


def test_requests_are_done_in_order_by_whoever_steps_and_given_once():
    evaluated = []
    service = make_service(evaluated)
    assert not service.step() and service.poll() == []
    service.request(0, "start")
    service.request(4, "later")
    assert evaluated == [] and service.poll() == []  # who asks does not wait
    assert service.step() and service.step() and not service.step()
    assert service.poll() == [
        Finished(0, "figures of start", 0),
        Finished(4, "figures of later", 1),
    ]
    assert service.poll() == []


def test_an_evaluation_on_the_calling_thread_leaves_requests_alone():
    evaluated = []
    service = make_service(evaluated)
    service.request(2, "asked")
    assert service.evaluate(3, "now") == Finished(3, "figures of now", 0)
    assert evaluated == ["now"] and service.poll() == []
    assert service.step() and evaluated == ["now", "asked"]
