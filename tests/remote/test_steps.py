# SPDX-License-Identifier: Apache-2.0
"""Steps: every trainer process gets the same plan, and every wait has an end."""

import concurrent.futures
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from fake_groups import PADDED, make_draws

from tba_jax.devices.cluster import PeerError
from tba_jax.flow.layout import Batch
from tba_jax.remote.channel import Channel, ChannelServer
from tba_jax.remote.client import Client
from tba_jax.remote.messages import Plan, decode, encode
from tba_jax.remote.owner import Owner
from tba_jax.remote.steps import Steps


def no():
    return False


def yes():
    return True


def make_steps(*processes, is_ready=yes, timeout_s=5.0, **changes):
    buffer = SimpleNamespace(draw=lambda *_: make_draws() if is_ready() else None)
    settings = {"num_steps": 10, "sync_period": 2, "checkpoint_period": 5, **changes}
    return Steps(buffer, PADDED, processes=processes, timeout_s=timeout_s, **settings)


def request(steps, process, step, wants_stop=False):
    """A request on another thread; its result is b"" if no decision comes within a second."""
    found = concurrent.futures.Future()

    def ask():
        found.set_result(steps.request(process, step, wants_stop))

    threading.Thread(target=ask, daemon=True).start()
    end = time.monotonic() + 5
    while steps._requested[process] < step and time.monotonic() < end:
        time.sleep(0.001)
    return found


@pytest.mark.parametrize(
    ("step", "sync", "save"),
    [(0, False, False), (1, True, False), (4, False, True), (9, False, True)],
)
def test_publications_and_checkpoints_follow_the_step_alone(step, sync, save):
    plan = make_steps().decide(step, no)
    assert (plan.sync, plan.save, plan.stop) == (sync, save, False) and plan.draws


@pytest.mark.parametrize(("is_publishing", "expected"), [(None, True), (no, True), (yes, False)])
def test_a_publication_waits_only_if_its_version_is_needed(is_publishing, expected):
    assert make_steps(is_publishing=is_publishing).decide(1, no).publish is expected


def test_everyone_receives_what_the_owner_decided_before_and_after():
    steps = make_steps(1, 2)
    early, other = request(steps, 1, 3), request(steps, 2, 3)
    plan = steps.decide(3, no)
    late = request(steps, 1, 3)
    assert early.result(5) == other.result(5) == late.result(5)
    found = decode(late.result(5))
    assert found[:4] == plan[:4] and not found.draws
    np.testing.assert_array_equal(found.batch.tokens, plan.batch.tokens)


def test_a_step_that_waits_for_data_is_not_sent():
    steps = make_steps(1, is_ready=no)
    asked = request(steps, 1, 3)
    assert steps.decide(3, no) == Plan() and asked.result(5) == b""


@pytest.mark.parametrize("is_ready", [yes, no])
def test_a_stop_ends_everyone_before_the_same_step_and_draws_nothing(is_ready):
    steps = make_steps(1, is_ready=is_ready)
    asked = request(steps, 1, 3, wants_stop=True)
    assert steps.decide(3, no) == decode(asked.result(5)) == Plan(stop=True)
    assert make_steps(is_ready=is_ready).decide(3, yes) == Plan(stop=True)


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
        steps.decide(step, no)
    with pytest.raises(ValueError, match=words):
        steps.request(*sent, False)


def test_the_owner_waits_for_everyone_and_names_who_is_missing():
    steps = make_steps(1, 2, timeout_s=0.3)
    request(steps, 1, 4)
    with pytest.raises(PeerError, match=r"process\(es\) 2 did not request step 4 within 0 s"):
        steps.decide(4, no)
    patient = make_steps(1, timeout_s=60.0)
    threading.Timer(0.1, patient.request, [1, 4, False]).start()
    assert patient.decide(4, no).batch is not None


@pytest.fixture
def owner():
    server, steps = ChannelServer("secret"), make_steps(1)
    server.handlers = Owner.handlers(SimpleNamespace(steps=steps))
    channel = Channel(lambda: server.endpoint, timeout_s=5.0)
    yield SimpleNamespace(steps=steps, client=Client(channel, "a", process=1, timeout_s=5.0))
    server.close()


def test_a_step_may_take_longer_than_a_request_and_a_signal_is_sent_meanwhile(owner):
    def decide():
        time.sleep(1.5)  # two requests
        owner.steps.decide(0, no)

    threading.Thread(target=decide, daemon=True).start()
    signals = [False]
    plan = owner.client.step(0, lambda: signals.pop() if signals else True)
    assert plan == Plan(stop=True) and owner.steps.wants_stop


def test_a_failure_of_this_process_ends_its_wait(owner):
    failures = []

    def check():
        failures.append(1)
        if len(failures) > 1:
            raise LookupError("a searcher failed")

    owner.client.check = check
    with pytest.raises(LookupError, match="a searcher failed"):
        owner.client.step(0, no)


def test_a_batch_is_exact_after_its_transfer():
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.standard_normal((3, i + 1)).astype("float32" if i % 2 else "int32")
        for i, name in enumerate(Batch._fields)
    }
    arrays["num_computed"] = np.int32(7)
    arrays["mask"], arrays["segments"] = rng.random((3, 2)) < 0.5, None
    sent = Plan(sync=True, batch=Batch(**arrays))
    back = decode(encode(sent))
    assert back[:4] == sent[:4] and back.batch is not None and back.batch.segments is None
    for name, array in arrays.items():
        if array is not None:
            np.testing.assert_array_equal(getattr(back.batch, name), array)
            assert getattr(back.batch, name).dtype == array.dtype
