# SPDX-License-Identifier: Apache-2.0
"""Steps: every trainer process gets the same decision, and every wait has an end."""

import concurrent.futures
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from fake_groups import PADDED, make_draws

from tba_jax.devices.cluster import PeerError
from tba_jax.flow.layout import Batch
from tba_jax.remote.channel import Channel, ChannelServer, Endpoint
from tba_jax.remote.client import Client
from tba_jax.remote.messages import Decision, StepPlan, decode, encode
from tba_jax.remote.owner import owner_handlers
from tba_jax.remote.steps import Steps


def no():
    return False


def yes():
    return True


def make_steps(*processes, is_ready=yes, timeout_s=5.0, **changes):
    buffer = SimpleNamespace(draw=lambda *_: make_draws() if is_ready() else None)
    settings = {"num_steps": 10, "sync_period": 2, "checkpoint_period": 5, **changes}
    return Steps(buffer, PADDED, processes=processes, timeout_s=timeout_s, **settings)


def request(steps, process, step, wants_stop=False, is_publishing=False):
    """A request on another thread; its result is b"" if no decision comes within a second."""
    found = concurrent.futures.Future()

    def ask():
        found.set_result(steps.request(process, step, wants_stop, is_publishing))

    threading.Thread(target=ask, daemon=True).start()
    end = time.monotonic() + 5
    while steps._requests.get(process, (-1,))[0] < step and time.monotonic() < end:
        time.sleep(0.001)
    return found


@pytest.mark.parametrize(
    ("step", "sync", "save"),
    [(0, False, False), (1, True, False), (4, False, True), (9, False, True)],
)
def test_publications_and_checkpoints_follow_the_step_alone(step, sync, save):
    assert make_steps().decide(step, no, no).plan == StepPlan(sync=sync, save=save)


def test_a_publication_waits_only_if_its_version_is_needed():
    assert not make_steps().decide(1, no, yes).plan.publish
    assert make_steps(needs_versions=True).decide(1, no, yes).plan.publish
    steps = make_steps(1)
    request(steps, 1, 1, is_publishing=True)
    assert not steps.decide(1, no, no).plan.publish


def test_everyone_receives_what_the_owner_decided_before_and_after():
    steps = make_steps(1, 2)
    early, other = request(steps, 1, 3), request(steps, 2, 3)
    decision = steps.decide(3, no, no)
    late = request(steps, 1, 3)
    assert early.result(5) == other.result(5) == late.result(5)
    found = decode(late.result(5))
    assert found.plan == decision.plan and not found.draws
    np.testing.assert_array_equal(found.batch.tokens, decision.batch.tokens)


def test_a_step_that_waits_for_data_is_not_sent():
    decision = make_steps(1, is_ready=no).decide(3, no, no)  # process 1 did not even ask
    assert decision == (StepPlan(wait=True), None, ())


@pytest.mark.parametrize("is_ready", [yes, no])
def test_a_stop_ends_everyone_before_the_same_step_and_draws_nothing(is_ready):
    steps = make_steps(1, is_ready=is_ready)
    asked = request(steps, 1, 3, wants_stop=True)
    decision = steps.decide(3, yes, no)
    assert decision == (StepPlan(wait=True, stop=True), None, ())
    assert decode(asked.result(5)) == decision
    assert steps.wants_stop


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ((3, 1), r"process 3 requests step 1; the other trainer processes are \[1\]"),
        ((1, 0), "process 1 requests step 0; .*newest decision is of step 1. Stop all"),
    ],
)
def test_a_request_that_cannot_be_is_refused(sent, words):
    steps = make_steps(1)
    for step in (0, 1):
        request(steps, 1, step)
        steps.decide(step, no, no)
    with pytest.raises(ValueError, match=words):
        steps.request(*sent, False, False)


def test_the_owner_waits_for_everyone_and_names_who_is_missing():
    steps = make_steps(1, 2, timeout_s=0.3)
    request(steps, 1, 4)
    with pytest.raises(PeerError, match=r"process\(es\) 2 did not request step 4 within 0 s"):
        steps.decide(4, no, no)
    patient = make_steps(1, timeout_s=60.0)
    threading.Timer(0.1, patient.request, [1, 4, False, False]).start()
    assert patient.decide(4, no, no).batch is not None


@pytest.fixture
def owner():
    found = SimpleNamespace(steps=make_steps(1))
    found.channel = ChannelServer(owner_handlers(lambda: found), "secret").start()
    yield found
    found.channel.close()


def client(endpoint, **changes):
    channel = Channel(lambda: endpoint, timeout_s=5.0)
    return Client(channel, "a", process=1, **{"timeout_s": 5.0, **changes})


def test_a_step_may_take_longer_than_a_request(owner):
    threading.Timer(1.5, owner.steps.decide, [0, no, no]).start()  # two requests
    asked = []

    def wants_stop():
        asked.append(1)
        return False

    decision = client(owner.channel.endpoint).step(0, wants_stop, no)
    assert decision.batch is not None and len(asked) >= 2


def test_an_owner_that_is_gone_is_one_clear_line():
    steps = client(Endpoint("127.0.0.1:9", "secret"), timeout_s=0.3)
    with pytest.raises(PeerError, match="the first trainer process has not responded"):
        steps.step(0, no, no)


def test_a_failure_of_this_process_ends_its_wait(owner):
    steps, failures = client(owner.channel.endpoint), []

    def check():
        failures.append(1)
        if len(failures) > 1:
            raise LookupError("a searcher failed")

    steps.check = check
    with pytest.raises(LookupError, match="a searcher failed"):
        steps.step(0, no, no)


def test_a_batch_is_exact_after_its_transfer():
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.standard_normal((3, i + 1)).astype("float32" if i % 2 else "int32")
        for i, name in enumerate(Batch._fields)
    }
    arrays["num_computed"] = np.int32(7)
    arrays["mask"], arrays["segments"] = rng.random((3, 2)) < 0.5, None
    sent = Decision(StepPlan(sync=True), Batch(**arrays))
    back = decode(encode(sent))
    assert back.plan == sent.plan and back.batch is not None and back.batch.segments is None
    for name, array in arrays.items():
        if array is not None:
            np.testing.assert_array_equal(getattr(back.batch, name), array)
            assert getattr(back.batch, name).dtype == array.dtype
