# SPDX-License-Identifier: Apache-2.0
"""Steps: every trainer process gets the same plan, and every wait has an end."""

import concurrent.futures
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from fake_groups import make_groups

from tba_jax.flow.layout import RowLayout
from tba_jax.flow.padding import Padding
from tba_jax.flow.trajectory import Draw
from tba_jax.remote.channel import Channel, ChannelServer
from tba_jax.remote.client import Client
from tba_jax.remote.messages import Plan, decode
from tba_jax.remote.owner import Owner, OwnerSettings

LAYOUT = RowLayout(1, 2, Padding((4,), (8,), 0))


def no():
    return False


def yes():
    return True


def make_draws():
    (group,) = make_groups({0: [[3], [3, 4, 5, 6]]})
    return [Draw(group.prompt, group.trajectories, True, (0, 1))]


def make_owner(*, is_ready=yes, is_publishing=None):
    buffer = SimpleNamespace(draw=lambda *_: make_draws() if is_ready() else None)
    settings = OwnerSettings("1/r", 0, 0, 1.0, 0, 0, 2)
    return Owner(settings, buffer, None, None, LAYOUT, is_publishing=is_publishing, log=print)


def request(owner, step, wants_stop=False):
    """A request on another thread; its result is b"" if no decision comes within a second."""
    found = concurrent.futures.Future()

    def ask():
        found.set_result(owner.answer_step(step, wants_stop))

    threading.Thread(target=ask, daemon=True).start()
    return found


@pytest.mark.parametrize(("is_publishing", "expected"), [(None, True), (no, True), (yes, False)])
def test_a_publication_waits_only_if_its_version_is_needed(is_publishing, expected):
    assert make_owner(is_publishing=is_publishing).step(1, no).publish is expected


def test_everyone_receives_what_the_owner_decided_before_and_after():
    owner = make_owner()
    early, other = request(owner, 3), request(owner, 3)
    plan = owner.step(3, no)
    owner.step(4, no)  # the owner may be a step ahead
    late = request(owner, 3)
    assert early.result(5) == other.result(5) == late.result(5)
    found = decode(late.result(5))
    assert found[:2] == plan[:2] and not found.draws
    assert found.batch.segments is None
    for sent, x in zip(plan.batch, found.batch, strict=True):
        np.testing.assert_array_equal(x, sent)
        assert getattr(x, "dtype", None) == getattr(sent, "dtype", None)
    assert request(owner, 5).result(5) == b""
    for step in (5, 6, 7):
        owner.step(step, no)
    with pytest.raises(ValueError, match="it requests step 3, and step 7 is decided. Stop all"):
        owner.answer_step(3, False)


def test_a_step_that_waits_for_data_is_not_sent():
    owner = make_owner(is_ready=no)
    asked = request(owner, 3)
    assert owner.step(3, no) == Plan() and asked.result(5) == b""


@pytest.mark.parametrize("is_ready", [yes, no])
def test_a_stop_ends_everyone_before_the_same_step_and_draws_nothing(is_ready):
    owner = make_owner(is_ready=is_ready)
    assert owner.answer_step(3, True) == b""
    assert owner.step(3, no) == decode(request(owner, 3).result(5)) == Plan(stop=True)
    assert make_owner(is_ready=is_ready).step(3, yes) == Plan(stop=True)


@pytest.fixture
def pod():
    """An owner, and the client of another process."""
    server, owner = ChannelServer("secret"), make_owner()
    server.handlers = owner.handlers()
    channel = Channel(lambda: server.endpoint, timeout_s=5.0)
    yield SimpleNamespace(owner=owner, client=Client(channel, "a", timeout_s=5.0))
    server.close()


def test_a_step_may_take_longer_than_a_request_and_a_signal_is_sent_meanwhile(pod):
    def decide():
        time.sleep(1.5)  # two requests
        pod.owner.step(0, no)

    threading.Thread(target=decide, daemon=True).start()
    signals = [False]
    plan = pod.client.step(0, lambda: signals.pop() if signals else True)
    assert plan == Plan(stop=True) and pod.owner.wants_stop


def test_a_failure_of_this_process_ends_its_wait(pod):
    calls = []

    def wants_stop():
        calls.append(1)
        if len(calls) > 1:
            raise LookupError("a searcher failed")

    with pytest.raises(LookupError, match="a searcher failed"):
        pod.client.step(0, wants_stop)
