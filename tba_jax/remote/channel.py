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
"""Returns the response to a request; it may block for about a second.

`NotReady`, `Rewind`, `RunEnded` and `ValueError` reach the client; any other error ends the run."""

MAX_REQUEST_BYTES = 2**30
HEARTBEAT_S = 30
"""Seconds without a heartbeat after which a process counts as lost."""
_NUM_THREADS = 64  # threads that run handlers; each trainer process may block one


class Unreachable(Exception):
    """No response arrived in time; the request may have arrived."""


class ChannelError(RuntimeError):
    """The channel cannot be used: wrong token, blocked port, or another program at the address."""


class NotReady(Exception):
    """The process at the other end of the channel is starting, or has failed."""


class Rewind(Exception):
    """Another owner continues the run: the searcher must join again and drop its tickets."""


class RunEnded(Exception):
    """The run has ended: searchers have no more work."""


class Refused(ValueError):
    """The owner refuses a message; raised in the client."""


_STATUS = {NotReady: 503, Rewind: 409, RunEnded: 410, ValueError: 400}
_ERRORS = {409: Rewind, 410: RunEnded, 400: Refused}


class Endpoint(NamedTuple):
    """HOST:PORT of a channel server, and the token of the run."""

    address: str
    token: str


def own_address(towards: str = "") -> str:
    """Return the address of this machine's network interface that reaches another machine.

    Args:
        towards: host name or address of the other machine; "": the interface of the default route.

    Raises:
        OSError: there is no route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards or "192.0.2.1", 9))  # sends nothing: the kernel chooses
        return probe.getsockname()[0]


class ChannelServer:
    """HTTP server of the process that owns the data of a run.

    Args:
        handlers: method name -> handler. Handlers run on several threads.
        host: address of this machine for the clients; a loopback address: the server accepts
            connections of this machine only.

    Attributes:
        endpoint: address and token for the clients.
        failure: `failure.check()` raises the first unexpected error of a handler.
    """

    def __init__(
        self, handlers: Mapping[str, Handler], token: str, host: str = "127.0.0.1"
    ) -> None:
        self._handlers, self.failure = dict(handlers), StopFlag()
        bound = bind("127.0.0.1" if host.startswith("127.") else "0.0.0.0", 0)
        self._server = HttpServer(self._respond, "channel-server", bound)
        self._threads = concurrent.futures.ThreadPoolExecutor(_NUM_THREADS, "channel-handler")
        self.endpoint = Endpoint(f"{host}:{self._server.port}", token)

    def start(self) -> "ChannelServer":
        """Start listening; return self."""
        self._server.start()
        return self

    def close(self) -> None:
        """Stop listening; give unfinished requests a short time to end."""
        self._server.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _respond(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one request, as an ASGI application."""
        if scope["type"] != "http":
            return
        status, body = await self._result(scope, receive)
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _result(self, scope: Any, receive: Any) -> tuple[int, bytes]:
        headers = dict(scope["headers"])
        # Checked before the body is read: a sender without the token must not fill the memory.
        given, wanted = headers.get(b"authorization", b""), f"Bearer {self.endpoint.token}"
        if not hmac.compare_digest(given, wanted.encode()):
            return 401, b"wrong token. Start the same command on every machine"
        handler = self._handlers.get(scope["path"].strip("/"))
        if handler is None or scope["method"] != "POST":
            return 404, b"no such method. Install the same version on every machine"
        if int(headers.get(b"content-length", b"0")) > MAX_REQUEST_BYTES:
            return 400, f"a request may have {MAX_REQUEST_BYTES:,} bytes".encode()
        chunks, message = [], {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            if message["type"] == "http.disconnect":
                return 503, b""
            chunks.append(message.get("body", b""))
        try:
            loop = asyncio.get_running_loop()
            return 200, await loop.run_in_executor(self._threads, handler, b"".join(chunks))
        except asyncio.CancelledError:
            return 503, b""
        except (*_STATUS,) as error:
            kind = next(kind for kind in _STATUS if isinstance(error, kind))
            return _STATUS[kind], str(error).encode()
        except Exception as error:  # broad: the trainer's thread raises it
            self.failure.fail("channel-server", error)
            return 500, f"the trainer failed: {type(error).__name__}: {error}".encode()


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
            ChannelError: the token is wrong, or another program answers.
            Rewind, RunEnded: raised by the handler. Refused: it raised a ValueError.
        """
        import urllib3

        endpoint = self._endpoint = self._endpoint or self._locate()
        address, headers = endpoint.address, {"authorization": f"Bearer {endpoint.token}"}
        try:
            response = self._pool.request(
                "POST", f"http://{address}/{method}", body=body, headers=headers
            )
        except urllib3.exceptions.HTTPError as error:
            self._endpoint = None
            raise Unreachable(f"{address}: {_brief(error)}") from error
        if response.status == 200:
            return response.data
        text = response.data[:500].decode(errors="replace")
        if response.status in (500, 503):
            self._endpoint = None
            raise Unreachable(f"{address}: {text or 'not ready'}")
        if (kind := _ERRORS.get(response.status)) is not None:
            raise kind(text)
        raise ChannelError(
            f"{address} answers HTTP {response.status} to {method!r} ({text}): another run, "
            "another program or another version of tba_jax listens there"
        )


def _brief(error: BaseException) -> str:
    """Return the innermost cause of an error, which urllib3 wraps in several exceptions."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return f"{type(error).__name__}: {error}"[:200]
