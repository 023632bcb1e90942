# SPDX-License-Identifier: Apache-2.0
"""The channel: bytes over HTTP, with a token, deadlines and clear errors."""

import http.client
import socket
import threading
import time

import pytest

from tba_jax.devices.worker import WorkerError
from tba_jax.remote import channel as channels
from tba_jax.remote.channel import Channel, ChannelServer, Endpoint, Refused, Unreachable


@pytest.fixture
def server():
    """A server with one method for each kind of response."""
    release = threading.Event()

    def slow(data):
        release.wait(30.0)
        return data

    found = ChannelServer("secret")
    found.handlers = {
        "echo": lambda data: data,
        "slow": slow,
        "invalid": lambda data: bytes(int(data)),
        "broken": lambda data: {}["no such key"],
    }
    found.release = release
    yield found
    release.set()
    found.close()


def connect(server, timeout_s=10.0, **changed):
    endpoint = server.endpoint._replace(**changed)
    return Channel(lambda: endpoint, timeout_s=timeout_s)


@pytest.mark.parametrize("size", [0, 1, 2**22])
def test_bytes_come_back(server, size):
    assert connect(server).call("echo", bytes(size)) == bytes(size)


def test_a_local_server_listens_on_loopback_alone(server):
    host, _, port = server.endpoint.address.partition(":")
    assert host == "127.0.0.1" == channels.own_address("127.0.0.1")
    address = channels.own_address()
    # Other machines are not sent to their own loopback, whatever this one's name means here.
    for name in ("", socket.gethostname(), "0.0.0.0"):
        assert not channels.own_address(name).startswith("127.")
    with socket.socket() as probe:
        probe.settimeout(1.0)
        assert probe.connect_ex((address, int(port))) != 0


def test_a_wrong_token_is_refused_before_the_body_is_read(server):
    with pytest.raises(Refused, match="127.0.0.1:.*echo: wrong token. Start the same command"):
        connect(server, token="other").call("echo", b"x")
    link = http.client.HTTPConnection(server.endpoint.address, timeout=10.0)
    link.putrequest("POST", "/echo")
    link.putheader("content-length", str(2**29))
    link.endheaders()  # no body follows
    assert link.getresponse().status == 401
    link.close()


def test_an_unreachable_owner_is_named_with_its_address():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    endpoint = Endpoint(f"127.0.0.1:{port}", "secret")
    with pytest.raises(Unreachable, match=f"127.0.0.1:{port}.*refused"):
        Channel(lambda: endpoint, timeout_s=2.0).call("echo")


def test_a_slow_owner_exceeds_the_deadline_and_is_located_again(server):
    tried = []

    def locate():
        tried.append(1)
        return server.endpoint

    channel = Channel(locate, timeout_s=0.5)
    assert channel.call("echo") == b""
    start = time.monotonic()
    with pytest.raises(Unreachable, match="timed out"):
        channel.call("slow")
    assert time.monotonic() - start < 5.0
    assert channel.call("echo", b"again") == b"again" and len(tried) == 2


def test_an_owner_that_is_not_ready_and_an_invalid_request_differ(server):
    channel = connect(server)
    with pytest.raises(Refused, match="invalid literal for int"):
        channel.call("invalid", b"x")
    server.handlers = {}
    with pytest.raises(Unreachable, match="the trainer is starting, or has failed"):
        channel.call("echo")


def test_an_error_of_the_owner_is_the_owners_and_ends_its_run(server):
    with pytest.raises(Unreachable, match="the trainer failed: KeyError: 'no such key'"):
        connect(server).call("broken")
    with pytest.raises(WorkerError, match="channel-server failed: KeyError"):
        server.failure.check()
