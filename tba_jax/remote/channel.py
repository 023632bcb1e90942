# SPDX-License-Identifier: Apache-2.0
"""Channel: request and response bytes between the processes of a run, over HTTP.

A `ChannelServer` runs in the process that owns the data of the run; every other process has a
`Channel`. A request is a method name and bytes, and carries a bearer token. The traffic is not
encrypted: use it inside a private network (docs/security.md).
"""

import asyncio
import concurrent.futures
import hmac
import socket
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tba_jax.devices.worker import StopFlag
from tba_jax.remote.http_server import HttpServer, bind

Handler = Callable[[bytes], bytes]
"""Returns the response to a request; `Rewind`, `RunEnded` and ValueError reach the client."""
HEARTBEAT_S = 30
"""Seconds without a heartbeat after which a process counts as lost."""
_NUM_THREADS = 64  # threads that run handlers; each trainer process may block one


class Unreachable(Exception):
    """No response arrived in time; the request may have arrived."""


class Refused(Exception):
    """The server refuses the request: its token or message."""


class Rewind(Exception):
    """The searchers must join again and drop their tickets."""


class RunEnded(Exception):
    """The run has ended: searchers have no more work."""


_STATUS = {Rewind: 409, RunEnded: 410, ValueError: 400}
_ERRORS = {409: Rewind, 410: RunEnded, 500: Unreachable, 503: Unreachable}


class Endpoint(NamedTuple):
    """HOST:PORT of a channel server, and the token of the run."""

    address: str
    token: str


def own_address(towards: str = "") -> str:
    """Return the address of this machine on the route to `towards`; "": on the default route.

    The result is a loopback address only if `towards` is one. With a loopback address, a client on
    another machine would send its token to a server of its own machine.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards or "192.0.2.1", 9))  # sends nothing: the kernel chooses
        found = probe.getsockname()[0]
    is_local = towards.startswith(("127.", "localhost"))
    return own_address() if found.startswith("127.") and not is_local else found


class ChannelServer:
    """HTTP server of the process that owns the data of a run; it listens at once.

    Args:
        host: address of this machine for the clients; a loopback address: the server accepts
            connections of this machine only.

    Attributes:
        handlers: method name -> handler; {}: the process is starting, or has failed.
        failure: `failure.check()` raises the first unexpected error of a handler.
    """

    def __init__(self, token: str, host: str = "127.0.0.1") -> None:
        from starlette.applications import Starlette  # slow; runs of one process need no server
        from starlette.routing import Route

        self.handlers: Mapping[str, Handler] = {}
        self.failure = StopFlag()
        self._threads = concurrent.futures.ThreadPoolExecutor(_NUM_THREADS, "channel-handler")
        bound = bind("127.0.0.1" if host.startswith("127.") else "0.0.0.0", 0)
        self.endpoint = Endpoint(f"{host}:{bound.getsockname()[1]}", token)
        routes = [Route("/{method}", self._respond, methods=["POST"])]
        self._server = HttpServer(Starlette(routes=routes), "channel-server", bound)

    def close(self) -> None:
        """Stop listening; give unfinished requests a short time to end."""
        self._server.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _respond(self, request: Any) -> Any:
        from starlette.responses import Response

        # Checked before the body is read: a sender without the token must not fill the memory.
        given, wanted = request.headers.get("authorization", ""), f"Bearer {self.endpoint.token}"
        if not hmac.compare_digest(given.encode(), wanted.encode()):
            return Response("wrong token. Start the same command on every machine", 401)
        if not self.handlers:
            return Response("the trainer is starting, or has failed; its output has the cause", 503)
        body, loop = await request.body(), asyncio.get_running_loop()
        try:
            handler = self.handlers[request.path_params["method"]]
            return Response(await loop.run_in_executor(self._threads, handler, body))
        except (*_STATUS,) as error:
            status = next(status for kind, status in _STATUS.items() if isinstance(error, kind))
            return Response(str(error), status)
        except Exception as error:  # broad: the trainer's thread raises it
            self.failure.fail("channel-server", error)
            return Response(f"the trainer failed: {type(error).__name__}: {error}", 500)


class Channel:
    """Requests to the channel server of a run; thread-safe.

    Args:
        locate: returns the endpoint; called again after a failure, because a restarted owner may
            have another address. Raises `Unreachable` if no owner is running.
        timeout_s: longest wait for a response, in seconds.
    """

    def __init__(self, locate: Callable[[], Endpoint], *, timeout_s: float) -> None:
        import urllib3  # slow; runs of one process need no client

        self._locate, self._endpoint = locate, None
        timeout = urllib3.Timeout(connect=min(5.0, timeout_s), read=timeout_s)
        self._pool = urllib3.PoolManager(maxsize=64, retries=False, timeout=timeout)

    def call(self, method: str, body: bytes = b"") -> bytes:
        """Return the response to a request.

        Raises:
            Unreachable: no response arrived; the message has the address and the cause.
            Refused: the server refuses the request, or another program answers.
            Rewind, RunEnded: raised by the handler.
        """
        import urllib3

        endpoint = self._endpoint = self._endpoint or self._locate()
        url, headers = f"http://{endpoint.address}/{method}", f"Bearer {endpoint.token}"
        try:
            response = self._pool.request("POST", url, body, headers={"authorization": headers})
        except urllib3.exceptions.HTTPError as error:
            self._endpoint = None
            raise Unreachable(f"{url}: {type(error).__name__}: {error}"[:300]) from error
        if response.status == 200:
            return response.data
        kind = _ERRORS.get(response.status, Refused)
        if kind is Unreachable:
            self._endpoint = None
        text = response.data[:500].decode(errors="replace")
        raise kind(f"{url}: {text or f'HTTP {response.status}'}")
