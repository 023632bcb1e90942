# SPDX-License-Identifier: Apache-2.0
"""The plan of a step: made in one process, the same in all."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from test_trainer import PADDED, make_draws

from tba_jax.flow.layout import Batch
from tba_jax.train.step_plan import (
    Decision,
    OwnBatches,
    StepPlan,
    pack_decision,
    received,
    unpack_decision,
)


class Peers:
    """Another trainer process; what it is told."""

    def __init__(self, *, wants_stop=False, is_publishing=False):
        self.wants_stop, self.is_publishing = wants_stop, is_publishing
        self.waited, self.answers = [], {}

    def wait(self, step):
        self.waited.append(step)

    def answer(self, step, decision):
        assert step in self.waited
        self.answers[step] = decision


def batches(peers, *, is_ready=True):
    buffer = SimpleNamespace(draw=lambda *_: make_draws() if is_ready else None)
    return OwnBatches(buffer, PADDED, num_steps=10, sync_period=2, checkpoint_period=5, peers=peers)


def no():
    return False


def yes():
    return True


@pytest.mark.parametrize(
    ("step", "sync", "save"), [(0, False, False), (1, True, False), (4, False, True), (9, 0, True)]
)
def test_publications_and_checkpoints_follow_the_step_alone(step, sync, save):
    plan = batches(Peers()).decide(step, no, no).plan
    assert plan == StepPlan(wait=False, stop=False, sync=bool(sync), save=save)


def test_a_version_that_is_needed_waits_for_the_one_before():
    owner = dataclasses.replace(batches(Peers(is_publishing=True)), needs_versions=True)
    assert owner.decide(1, no, yes).plan.publish


def test_everyone_receives_what_the_owner_decided():
    peers = Peers(is_publishing=True)
    decision = batches(peers).decide(3, no, no)
    assert peers.answers == {3: decision} and not decision.plan.publish
    sent = pack_decision(decision)
    found = received(lambda step, facts: sent)(3, no, no)
    assert found.plan == decision.plan and not found.draws
    np.testing.assert_array_equal(found.batch.tokens, decision.batch.tokens)


def test_a_step_that_waits_for_data_is_not_sent():
    peers = Peers()
    decision = batches(peers, is_ready=False).decide(3, no, no)
    assert decision.plan.wait and decision.batch is None and not peers.waited


@pytest.mark.parametrize(("own", "of_a_peer"), [(yes, False), (no, True)])
@pytest.mark.parametrize("is_ready", [True, False])
def test_an_interruption_anywhere_stops_everyone_at_the_same_step(own, of_a_peer, is_ready):
    peers = Peers(wants_stop=of_a_peer)
    decision = batches(peers, is_ready=is_ready).decide(3, own, no)
    assert decision.plan.stop and decision.plan.wait is not is_ready
    assert peers.answers == {3: decision}


def test_a_batch_is_exact_after_its_transfer():
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.standard_normal((3, i + 1)).astype("float32" if i % 2 else "int32")
        for i, name in enumerate(Batch._fields)
    }
    arrays["num_computed"] = np.int32(7)
    arrays["mask"], arrays["prompts"] = rng.random((3, 2)) < 0.5, None
    sent = Decision(StepPlan(False, False, True, False), Batch(**arrays))
    back = unpack_decision(pack_decision(sent))
    assert back.plan == sent.plan and back.batch is not None and back.batch.prompts is None
    for name, array in arrays.items():
        if array is not None:
            np.testing.assert_array_equal(getattr(back.batch, name), array)
            assert getattr(back.batch, name).dtype == array.dtype
    with pytest.raises(ValueError, match="checksum"):
        unpack_decision(pack_decision(sent)[:-9] + b"x" * 9)
