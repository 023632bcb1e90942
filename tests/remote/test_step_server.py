# SPDX-License-Identifier: Apache-2.0
"""Steps over a channel: every process gets the same decision, and every wait has an end."""

import json
import threading
import time

import pytest

from tba_jax.devices.cluster import PeerError
from tba_jax.devices.worker import WorkerError
from tba_jax.remote.channel import Channel, ChannelServer, Endpoint
from tba_jax.remote.step_server import StepClient, StepRequest, StepServer, step_handlers


def request(process, step, wants_stop=False, is_publishing=False):
    return StepRequest(process, step, wants_stop, is_publishing)


def nothing():
    """No failure of this process."""


def test_a_decision_is_the_same_before_and_after_it_was_made():
    server = StepServer([1, 2], timeout_s=5.0)
    early = server.request(request(1, 0))
    assert not early.done()
    server.answer(0, b"first")
    assert early.result(0) == server.request(request(1, 0)).result(0) == b"first"
    assert server.request(request(2, 0)).result(0) == b"first"
    later = server.request(request(1, 1))
    server.answer(1, b"second")
    assert later.result(0) == b"second"


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (request(3, 1), r"process 3 requests a step, but the other trainer processes are \[1\]"),
        (request(1, 0), "process 1 requests step 0, but the newest decision is of step 1"),
    ],
)
def test_a_request_that_cannot_be_is_refused(sent, words):
    server = StepServer([1], timeout_s=5.0)
    server.request(request(1, 0))
    server.answer(0, b"x")
    server.answer(1, b"y")
    with pytest.raises(ValueError, match=words):
        server.request(sent)


def test_the_owner_waits_for_everyone_and_names_who_is_missing():
    server = StepServer([1, 2], timeout_s=0.3)
    server.request(request(1, 4))
    with pytest.raises(PeerError, match=r"process\(es\) 2 did not request step 4 within 0 s"):
        server.wait(4)
    patient = StepServer([1, 2], timeout_s=60.0)
    patient.request(request(1, 4))
    threading.Timer(0.1, lambda: patient.request(request(2, 4))).start()
    patient.wait(4)


@pytest.fixture
def owner():
    server = StepServer([1], timeout_s=5.0)
    channel = ChannelServer(step_handlers(server), "secret", is_local=True).start()
    yield server, channel
    channel.close()


def client(channel, **changes):
    return StepClient(Channel(lambda: channel.endpoint, timeout_s=5.0), 1, timeout_s=5.0, **changes)


def test_a_step_may_take_longer_than_a_request(owner):
    server, channel = owner
    steps = client(channel)
    threading.Timer(1.5, server.answer, [0, b"decision"]).start()  # two requests
    asked = []

    def facts():
        asked.append(time.monotonic())
        return len(asked) > 1, False

    assert steps.wait(0, facts) == b"decision"
    assert len(asked) >= 2 and server.wants_stop
    steps.close()


def test_an_owner_that_is_gone_is_one_clear_line(owner):
    server, channel = owner
    channel.close()
    steps = StepClient(
        Channel(lambda: Endpoint(("127.0.0.1:9",), "secret"), timeout_s=0.2), 1, timeout_s=0.3
    )
    with pytest.raises(WorkerError) as raised:
        steps.wait(0, lambda: (False, False))
    assert isinstance(raised.value.__cause__, PeerError)
    assert "the first trainer process has not responded" in str(raised.value)


def test_a_failure_of_this_process_ends_its_wait(owner):
    _, channel = owner
    steps = client(channel)

    def check():
        raise LookupError("a searcher failed")

    steps.check = check
    with pytest.raises(LookupError, match="a searcher failed"):
        steps.wait(0, lambda: (False, False))
    steps.close()


def test_an_unread_request_does_not_end_the_server(owner):
    _, channel = owner
    other = Channel(lambda: channel.endpoint, timeout_s=5.0)
    with pytest.raises(ValueError, match="TypeError"):
        other.call("step", json.dumps([1]).encode())
